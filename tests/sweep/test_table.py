"""The table of a sweep as terminals of three widths show it: all digits, and columns are dropped in one order."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.sweep.outputs.table import epoch_line, how_far, trial_table
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.sweep import Sweep
from tests.sweep.planted import sweep_of

AXES = ["sharding", "precision", "offload", "reshard_after_forward"]
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
    Console(file=out, width=width).print(trial_table(sweep, rows, {1}, how_far(sweep)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.fixture
def sweep(compose_trial) -> Sweep:
    states = []
    for number, (*values, status, loss, speed, mib) in enumerate(TRIALS):
        words = [f"{key}={value}" for key, value in zip(AXES, values, strict=True)]
        state = TrialState(compose_trial(words, number), TrialStatus(status))
        epochs: list[dict[str, float]] = []
        if loss is not None:
            epochs.append({
                "epoch": 10, "train/loss": loss + 0.1, "val/loss": loss, "val/accuracy": 0.875,
                "perf/samples_per_s": speed, "memory/peak_bytes": mib * 2**20,
            })  # fmt: skip
        state.recorded(epochs, {"forecast/peak_bytes": (mib or 100.0) * 2**20}, {})
        states.append(state)
    return sweep_of(states, swept=AXES)


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


def test_trials_with_a_result_are_counted(sweep: Sweep):
    assert how_far(sweep_of(sweep.trials[:1])) == "1 of 1 trial has a result"
    assert show(sweep, 80).startswith("3 of 5 trials have a result\n")
    sweep.trials[2].status = TrialStatus.failed
    assert how_far(sweep) == "2 of 5 trials have a result, 1 failed"


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


def test_a_users_metric_has_a_column_and_is_in_the_line_of_an_epoch(sweep: Sweep):
    sweep.trials[1].figures |= {"val/f1@0.5": 0.62518, "other/f1": 1.0}
    heads, _, _, row, *_ = show(sweep, 200).splitlines()[1:]
    assert heads.index("val acc") < heads.index("val f1@0.5") < heads.index("samples/s") and "0.6252" in row
    assert "other" not in heads and "val f1@0.5 0.6252" in epoch_line(
        sweep.trials[1].trial, sweep.trials[1].figures, 10
    )
