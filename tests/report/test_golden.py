"""What a sweep leaves to read, compared as a whole: the terminal's text, the words of the page, and `results.csv`.

`python -m tests.report.test_golden` writes the files again. Read what changed: a person will.
"""

from __future__ import annotations

import csv
import html
import io
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.metrics import MEDIAN_STEP, MEMORY, MIB, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.results_csv import write_results
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import answer, plain_text
from fsdp_lab.report.page import to_html
from fsdp_lab.sweep.outputs.results_csv import rows_of
from fsdp_lab.sweep.trial import TrialState
from tests.report.sweeps import (
    REPEATED,
    ROWS,
    amplified,
    compared,
    differing,
    on_cpu,
    one,
    plain_loop,
    rounds,
    sweep,
    trial,
)
from tests.sweep.planted import sweep_of

FOLDER = Path(__file__).parent / "golden"


def nearly_full() -> SweepRecord:
    """The fastest needs 95 of 100 MiB, so the smaller of two as fast is taken."""
    capacity = 100.0 * MIB
    needs = {3: 95.0 * MIB, 5: 60.0 * MIB}
    figures = {n: {"forecast/needed_bytes": need, "forecast/capacity_bytes": capacity} for n, need in needs.items()}
    return sweep([trial(n, ROWS[n], **figures[n]) for n in needs])


def rates() -> SweepRecord:
    """Learning rates, which cannot change the speed: compared by the loss alone, which is no better than guessing."""
    figures = {"0.1": (2.31, 1000.0), "0.01": (2.29, 950.0), "0.001": (2.302, 1020.0)}
    rows = [
        replace(one(n, f"optimizer.lr={lr}", [(loss, loss)], speed), config=SweepConfig())
        for n, (lr, (loss, speed)) in enumerate(figures.items())
    ]
    return sweep(rows, axes=["optimizer.lr"])


def rounded() -> SweepRecord:
    """4.03 is 0.75 % above 4, and less than a step of bfloat16."""
    narrow = {"train/loss_eps": 2.0**-7}
    rows = [("ddp", "fp32", "finished", 100, 1000.0, 4.0), ("root", "fp32", "finished", 100, 1500.0, 4.03)]
    return sweep([trial(n, row, **narrow) for n, row in enumerate(rows)], loss_tolerance=0.001)


def next_to_zero() -> SweepRecord:
    """Losses of 0, within its rounding, and 0.5. By their median steps the second is 1.14 times as slow, not 1.35."""
    rows = [("fp32", 1350.0, 0.0, 0.010), ("bf16", 1000.0, 1e-7, 0.0114), ("fp16", 900.0, 0.5, 0.020)]
    return sweep([
        trial(n, ("ddp", precision, "finished", 100, speed, loss), **{MEDIAN_STEP: step})
        for n, (precision, speed, loss, step) in enumerate(rows)
    ])  # fmt: skip


def many_settings() -> SweepRecord:
    """Nine settings, the later the slower; the last one learned less. Lines are of those that differ in one value."""
    pairs = product(("ddp", "root", "per_block"), ("fp32", "bf16", "fp16"))
    rows = [(*pair, "finished", 10 + n, 100.0 - 9 * n, 2.0 if n == 8 else 1.0) for n, pair in enumerate(pairs)]
    return sweep([trial(n, row) for n, row in enumerate(rows)])


def against_plain(*trials: TrialRecord) -> SweepRecord:
    return sweep(trials, axes=["sharding"], plain_loops=[plain_loop()])


def noting(one: TrialRecord) -> TrialRecord:
    return replace(one, facts={**one.facts, "notes": ["sharding=ddp looks for unused parameters."]})


CASES = {
    "failures": sweep(),
    "tie_where_memory_is_scarce": nearly_full(),
    "one_trial": sweep([trial(0)], axes=[]),
    "objectives": sweep(objectives=[("val/loss", "min"), (SPEED, "max")]),
    "beside_others": sweep([on_cpu(0, 0, 0.05, 1000.0), on_cpu(1, 2, 0.05, 900.0), on_cpu(2, 3, 0.44, 3000.0)]),
    "loss_within_rounding": rounded(),
    "repeats": sweep(
        [*rounds(0, 1000.0, 1010.0, 990.0), *rounds(3, 2000.0, 1500.0, 1900.0), *rounds(5, 1200.0, 1000.0, 1600.0)],
        axes=REPEATED,
    ),
    "none_qualifies": sweep([trial(0, (*ROWS[0][:2], "oom", 0, 0, 0)), trial(1, (*ROWS[2][:2], "diverged", 0, 0, 0))]),
    "learning_rates": rates(),
    "unfinished": sweep([trial(0), replace(trial(1, ROWS[2]), status=TrialStatus.waiting, figures={}, epochs=[])]),
    "next_to_zero": next_to_zero(),
    "side_by_side": sweep([replace(noting(trial(0)), span=(0.0, 10.0)), replace(trial(2, ROWS[2]), span=(5.0, 15.0))]),
    "many_settings": many_settings(),
    "another_model_when_sharded": sweep(differing(), axes=["sharding"]),
    "as_a_plain_loop": against_plain(
        compared(0, "sharding=ddp", first=1.339 * (1 + 2e-8)), compared(1, "sharding=root")
    ),
    "another_model": against_plain(
        compared(0, "sharding=ddp", 3000.0, first=1.298),
        compared(1, "sharding=root", norm=0.3),
        compared(2, "sharding=per_block"),
    ),
    "every_setting_another_model": against_plain(
        compared(0, "sharding=ddp", val=1.2), compared(1, "sharding=root", val=1.2)
    ),
    "rounding_that_training_amplifies": sweep(amplified(), axes=["sharding"]),
}


def written(made: SweepRecord) -> str:
    return "\n".join([*plain_text(answer(made)), "", "=" * 80, "", page_words(made)])


def page_words(made: SweepRecord) -> str:
    """The page as text: a line for each paragraph, item and row; `> ` stands before what is folded."""
    body = to_html(made, answer(made)).partition("<body>")[2].partition("<script>")[0].replace("<summary>", "&gt; ")
    lines = re.sub(r"</(p|h1|h2|li|tr|pre|div|summary|details)>|<br>", "\n", re.sub("</t[dh]>", " | ", body))
    text = html.unescape(re.sub("<[^>]+>", "", lines))
    return "".join(f"{line.strip()}\n" for line in text.split("\n") if line.strip())


@pytest.mark.parametrize("name", CASES)
def test_a_report_says_what_it_said(name: str):
    assert written(CASES[name]) == (FOLDER / f"{name}.txt").read_text()


def results() -> str:
    """Of ten trials, one of each status, with what a CSV has to quote, what is not known, and a user's metric."""
    figures = {
        "epoch": 2.0, "train/loss": 0.125, "val/loss": 1e-7, "val/f1": 0.62518, SPEED: 1234.5, "perf/undeclared": 1.0,
        MEMORY: 64.0 * MIB, "forecast/peak_bytes": 60.0 * MIB, "forecast/error": -0.0625,
    }  # fmt: skip
    states = []
    for number, status in enumerate(TrialStatus):
        choices = {"sharding": "root", "model": "a,b" if number else "x"}
        config = SweepConfig()
        config.optimizer.lr = 10.0**-number
        values = {"optimizer": {"lr": config.optimizer.lr}}
        states.append(TrialState(Trial(number, config, choices, [], Path("outputs", str(number)), values), status))
        states[-1].run_id = f"run{number}"
        if status.ended:
            states[-1].figures, states[-1].seconds = dict(figures), number + 0.126
            states[-1].facts = {"notes": ["One is noted.", "And another."]}
        if status is TrialStatus.failed:
            states[-1].reason = Reason.of(Code.error, rank=1, error="ValueError", text='of "a", b')
    planned = sweep_of(states, swept=["sharding", "model", "optimizer.lr"])
    planned.front = lambda: {2}  # type: ignore[method-assign]
    with TemporaryDirectory() as folder:
        write_results(Path(folder), planned.swept, rows_of(planned))
        return Path(folder, "results.csv").read_text()


def test_the_table_of_trials_is_what_it_was():
    assert results() == (FOLDER / "results.csv").read_text()


def test_a_users_metric_is_in_the_pages_table_and_in_the_csv():
    words = page_words(sweep([trial(0, **{"val/f1": 0.62518}), trial(1, ROWS[2])]))
    assert "val f1 |" in words and "| 0.6252 |" in words
    heads, *_ = csv.reader(io.StringIO(results()))
    assert heads[heads.index("val/f1") + 1] == SPEED


if __name__ == "__main__":
    for case, planted in CASES.items():
        (FOLDER / f"{case}.txt").write_text(written(planted))
    (FOLDER / "results.csv").write_text(results())
