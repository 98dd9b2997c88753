"""The table of a sweep at any width of a terminal, and what a closed pipe, a full disk or another encoding change."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.sweep.outputs.table import epoch_line, how_far, trial_table
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.trial import TrialState
from tests.conftest import INLINE, ROOT
from tests.folders import SweepFolder
from tests.sweep.planted import sweep_of

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


@pytest.mark.parametrize("width", [30, 45, 60, 90, 160])
def test_at_any_width_no_figure_and_no_name_is_cut(sweep: Sweep, width: int):
    """What is left out is named; at 300 columns nothing is."""
    text, whole = show(sweep, width), show(sweep, 300)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    pieces = [set(re.findall(r"[a-z]+|[\d.]+", part)) for part in (text, f"{whole} Too narrow for: see results.csv.")]
    assert pieces[0] <= pieces[1] and "Too narrow" not in whole
    assert set(re.findall("[a-z]+", whole.splitlines()[1])) <= pieces[0], "the head of each column is there"


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


@pytest.mark.parametrize("words", ["fsdp_lab --cfg job", "fsdp_lab.report --help"])
def test_a_reader_may_close_the_pipe(words: str, tmp_path: Path):
    """As `head` does. Python itself would print a traceback, and once more when it exits."""
    assert ended(words.split(), tmp_path, closed_pipe()) == (0, "")


_CLOSED = """
import os, sys
from fsdp_lab.machine.output import outlast_reader
outlast_reader()
with open("database", "w") as file:
    for number in range(3):
        os.write(number, b"a library's warning")
    print("ours", file=sys.stderr, flush=True)
    sys.stdout.flush()
    assert os.system("echo theirs >&2") == 0
    file.write("whole")
"""


def test_nothing_is_printed_into_a_file_where_the_streams_were_closed(tmp_path: Path):
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", _CLOSED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=100).returncode == 0
    assert (tmp_path / "database").read_text() == "whole"


@pytest.mark.ci
def test_a_sweep_goes_on_without_a_reader_of_its_output(tmp_path: Path):
    """Its table has characters that the encoding lacks."""
    words = ["fsdp_lab", "-m", "optimizer.lr=0.1,0.01", *INLINE, "training.epochs=1"]
    assert ended(words, tmp_path, closed_pipe(), "ascii")[0] == 0
    assert (tmp_path / "out/report.html").exists()
    assert SweepFolder(tmp_path / "out").statuses == ["finished", "finished"]


def test_characters_that_an_encoding_lacks_are_question_marks(tmp_path: Path):
    with (tmp_path / "out").open("w") as out:
        code, errors = ended(["fsdp_lab", "optimizer.lr='×'"], tmp_path, out.fileno(), "ascii")
    assert code == 2 and errors.startswith("fsdp_lab: optimizer.lr=?")


def test_a_full_disk_of_a_log_changes_no_status(tmp_path: Path):
    with open("/dev/full", "w") as out:
        assert ended(["fsdp_lab", "--keys"], tmp_path, out.fileno()) == (0, "")
