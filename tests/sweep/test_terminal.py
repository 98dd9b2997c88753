"""What a terminal shows of tables and of a sweep, at any width, and what a pipe, a file or a closed one gets."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console as RichConsole
from rich.text import Text

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import Engine
from fsdp_lab.report.terminal import Column, FittingTable, fit, open_console
from fsdp_lab.sweep.outputs.console import MOST_ROWS, Console
from fsdp_lab.sweep.outputs.table import epoch_line, how_far, trial_table
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.sweep import Sweep
from tests.conftest import PLAIN, ROOT
from tests.folders import SweepFolder
from tests.sweep.planted import Compose, plan_of, sweep_of, trial_by_hand

AXES = {
    "sharding": ("ddp", "per_block"),
    "precision": ("fp32", "bf16_mixed"),
    "reshard_after_forward": ("always", "never"),
    "model._target_": ("my_project.networks.wide.Net", "other.Net"),
}
ROWS = list(product(*AXES.values()))
FIGURES = {"train loss": 1.59331, "samples/s": 123456.0, "peak MiB": 98765.43, "largest microbatch": 1254.0}


def columns(axes: dict[str, tuple[str, ...]] = AXES) -> list[Column]:
    rows = list(product(*axes.values()))
    words = [Column(key, [r[i] for r in rows], is_axis=True, justify="left") for i, key in enumerate(axes)]
    drops = {"train loss": 2, "largest microbatch": 1}
    return words + [
        Column(name, [f"{value + number:.2f}" for number in range(len(rows))], drop=drops.get(name, 0))
        for name, value in FIGURES.items()
    ]


def shown(table: FittingTable, width: int) -> str:
    out = io.StringIO()
    RichConsole(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [30, 60, 80, 100, 160])
def test_at_any_width_no_figure_and_no_name_is_cut(width: int):
    text = shown(FittingTable(columns(), elsewhere="results.csv"), width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    left = re.search(r"Too narrow for (.*?): see results.csv\.", " ".join(text.split()))
    names = left[1].split(", ") if left else []
    for column in columns():
        if column.name in names:
            continue
        if not column.is_axis:
            assert all(re.search(rf"(?<![\d.]){re.escape(str(cell))}(?![\d.])", text) for cell in column.cells)
        for piece in column.name.replace("_", "_ ").replace(".", ". ").split():
            assert piece in text, (column.name, piece)


def test_many_axes_become_one_column_of_settings():
    axes = {f"model.number_{i}": (str(i), "1") for i in range(9)}
    kept, _ = fit(columns(axes), 80)
    assert [c.name for c in kept] == ["setting", "train\nloss", "samples/s", "peak MiB", "largest\nmicrobatch"]
    assert "model.number_0=0 model.number_1=1 " in str(kept[0].cells[0])


def test_a_terminal_shows_styles_and_none_with_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Neither does a pipe, which has whole tables."""

    def printed(**environment: str) -> str:
        for name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            monkeypatch.setenv(name, value)
        open_console().print(Text("Recommended: a " + "b" * 150, style="bold"))
        return capsys.readouterr().out

    terminal = {"FORCE_COLOR": "1", "COLUMNS": "200"}  # as a terminal is, for the library
    assert printed(**terminal).startswith("\x1b[1mRecommended: a")
    plain = f"Recommended: a {'b' * 150}\n"
    assert printed(**terminal, NO_COLOR="1") == plain
    monkeypatch.delenv("COLUMNS")
    assert printed() == plain


SWEPT = ["sharding", "precision", "offload", "reshard_after_forward"]
# The values of the axes, how the trial ended, val loss, samples/s, peak MiB.
TRIALS = (
    ("ddp", "fp32", "none", "always", "finished", 1.59331, 2335.2, 12345.67),
    ("root", "bf16_mixed", "none", "always", "finished", 1.60912, 18836.4, 8012.5),
    ("per_block", "bf16_mixed", "cpu", "never", "oom", None, None, None),
    ("per_block", "bf16_mixed", "cpu", "default", "running", 2.10444, 1422.0, 804.0),
    ("per_block", "fp32", "cpu", "default", "waiting", None, None, None),
)


def show(sweep: Sweep, width: int) -> str:
    out = io.StringIO()
    rows = list(enumerate(sweep.trials))
    RichConsole(file=out, width=width).print(trial_table(sweep, rows, {1}, how_far(sweep)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.fixture
def sweep(compose_trial) -> Sweep:
    states = []
    for number, (*values, status, loss, speed, mib) in enumerate(TRIALS):
        words = [f"{key}={value}" for key, value in zip(SWEPT, values, strict=True)]
        state = TrialState(compose_trial(words, number), TrialStatus(status))
        epochs: list[dict[str, float]] = []
        if loss is not None:
            epochs.append({
                "epoch": 10, "train/loss": loss + 0.1, "val/loss": loss, "val/accuracy": 0.875,
                "perf/samples_per_s": speed, "memory/peak_bytes": mib * 2**20,
            })  # fmt: skip
        state.recorded(epochs, {"forecast/peak_bytes": (mib or 100.0) * 2**20}, {})
        states.append(state)
    return sweep_of(states, swept=SWEPT)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_at_this_width(sweep: Sweep, width: int):
    assert show(sweep, width) == (Path(__file__).parent / "tables" / f"{width}.txt").read_text()


def test_objectives_stay_at_any_width_and_have_a_column(sweep: Sweep):
    for state in sweep.trials:
        if state.epochs:
            state.figures["perf/step_time_p50_s"] = 0.01234
    assert "step p50 ms" not in show(sweep, 200)
    sweep.objectives = [("perf/step_time_p50_s", "min"), ("val/accuracy", "max")]
    text = show(sweep, 80)
    assert "12.34" in text and "0.875" in text and "pareto" in text


def test_values_that_look_the_same_are_none_the_best(sweep: Sweep):
    """They differ in a digit that is not shown."""
    for state, loss in zip(sweep.trials, (1.251411, 1.251413), strict=False):
        state.figures["val/loss"] = loss
    assert "*1.2514" not in show(sweep, 200)
    sweep.trials[3].status = TrialStatus.finished
    assert show(sweep, 200).count("*1.2514") == 2, "both are better than the third"


def test_losses_within_their_rounding_are_both_the_best(sweep: Sweep):
    """A loss of 1.6 in bfloat16, of which neighbours are 1/128 apart."""
    third = sweep.trials[3]
    third.status = TrialStatus.finished
    assert "*1.5933" in show(sweep, 200) and "*1.6091" not in show(sweep, 200)
    for loss, best in ((1.6, True), (1.62, False)):
        sweep.trials[1].figures |= {"val/loss": loss, "train/loss_eps": 2.0**-7}
        assert (f"*{loss:.4f}" in show(sweep, 200)) is best
    third.status = TrialStatus.running
    sweep.trials[1].figures["val/loss"] = 1.6
    assert "*1.5933" not in show(sweep, 200), "nothing tells the two apart"


def test_a_users_metric_has_a_column_and_is_in_an_epochs_line(sweep: Sweep):
    sweep.trials[1].figures |= {"val/f1@0.5": 0.62518, "other/f1": 1.0}
    heads, _, _, row, *_ = show(sweep, 200).splitlines()[1:]
    assert heads.index("val acc") < heads.index("val f1@0.5") < heads.index("samples/s") and "0.6252" in row
    assert "other" not in heads and "val f1@0.5 0.6252" in epoch_line(
        sweep.trials[1].trial, sweep.trials[1].figures, 10
    )


@pytest.fixture
def begun(compose_trial: Compose, tmp_path: Path) -> Sweep:
    """Four trials, of which the first runs."""
    cells = [[f"training.seed={seed}"] for seed in range(4)]
    run = plan_of(compose_trial, tmp_path, cells, [], ["training.seed"])
    run.prepare(0)
    run.trials[0].status = TrialStatus.starting
    run.begin(0)
    return run


def test_the_bar_is_over_trials_and_their_epochs(begun: Sweep):
    assert [state.share_done for state in begun.trials] == [0.0] * 4
    begun.trials[0].record_epoch({"epoch": 1})
    begun.trials[1].status = TrialStatus.finished
    assert sum(state.share_done for state in begun.trials) == 1 + 1 / begun.trials[0].trial.config.training.epochs
    shown = io.StringIO()
    console = Console(begun, RichConsole(file=shown, force_terminal=True, width=80))
    with console.bar:
        console.draw()
    assert "1 of 4 trials has a result" in shown.getvalue() and "━" in shown.getvalue()


def test_an_output_that_is_no_terminal_gets_lines_only(begun: Sweep, capsys: pytest.CaptureFixture[str]):
    shown = io.StringIO()
    console = Console(begun, RichConsole(file=shown, width=80))
    with console.bar:
        console.began(0)
        console.draw()
    assert shown.getvalue() == ""
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("s] trial 0 starts: training.seed=0")


@pytest.mark.parametrize("ticks", [True, False])
def test_the_clock_ticks_but_not_beside_a_debugger(begun: Sweep, ticks: bool):
    shown, threads = io.StringIO(), set(threading.enumerate())
    begun.config = replace(begun.config, engine=Engine.ray if ticks else Engine.inline)
    with Console(begun, RichConsole(file=shown, force_terminal=True, width=80)).bar:
        assert len(set(threading.enumerate()) - threads) == ticks, "no thread draws beside a debugger"
        until = time.monotonic() + 60
        while ticks and "0:00:01" not in shown.getvalue():
            assert time.monotonic() < until
            time.sleep(0.05)


def test_of_many_trials_the_last_table_has_a_few():
    states = [TrialState(trial_by_hand([]), TrialStatus.failed) for _ in range(MOST_ROWS + 100)]
    shown = io.StringIO()
    Console(sweep_of(states), RichConsole(file=shown, width=160)).final()
    assert "50 are below, the recommended ones first; all are in results.csv" in shown.getvalue()
    assert " 49 failed" in shown.getvalue() and " 50 failed" not in shown.getvalue()


COMMANDS = [["fsdp_lab", "--cfg", "job"], ["fsdp_lab.report", "--help"], ["fsdp_lab.nightly", "--help"]]
SWEEP = ["fsdp_lab", "-m", "optimizer.lr=0.1,0.01", "engine=inline", "model=mlp", "data=synthetic", "data.num_train=8",
         "data.num_val=8", "training.global_batch_size=8", "checkpoint.mode=off", "export=false", *PLAIN]  # fmt: skip


def ended(words: list[str], folder: Path, out: int, encoding: str = "utf-8") -> tuple[int, str]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=out, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    return done.returncode, done.stderr


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_may_close_the_pipe(words: list[str], tmp_path: Path):
    """As `head` does. Python itself would print a traceback, and once more when it exits."""
    assert ended(words, tmp_path, closed_pipe()) == (0, "")


@pytest.mark.ci
def test_a_sweep_goes_on_without_a_reader_of_its_output(tmp_path: Path):
    """Its table has characters that the encoding lacks."""
    assert ended(SWEEP, tmp_path, closed_pipe(), "ascii")[0] == 0
    (page,) = tmp_path.glob("outputs/multirun/*/*/report.html")
    assert SweepFolder(page.parent).statuses == ["finished", "finished"]


def test_characters_that_an_encoding_lacks_are_question_marks(tmp_path: Path):
    with (tmp_path / "out").open("w") as out:
        code, errors = ended(["fsdp_lab", "optimizer.lr='×'"], tmp_path, out.fileno(), "ascii")
    assert code == 2 and errors.startswith("fsdp_lab: optimizer.lr=?")


def test_a_full_disk_of_a_log_changes_no_status(tmp_path: Path):
    with open("/dev/full", "w") as out:
        assert ended(["fsdp_lab", "--keys"], tmp_path, out.fileno()) == (0, "")
