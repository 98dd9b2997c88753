"""Sweeps made by hand, so that what a report must say of them can be worked out on paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fsdp_lab.config.metrics import MIB, OTHERS_CPU, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.data import SweepData

# sharding, precision, status, MiB, samples/s, val loss
ROWS = (
    ("ddp", "fp32", "finished", 100, 1000.0, 1.000),
    ("ddp", "bf16", "finished", 80, 1500.0, 1.100),  # learned less
    ("root", "fp32", "finished", 60, 900.0, 1.000),
    ("root", "bf16", "finished", 50, 1980.0, 1.010),
    ("per_block", "fp32", "oom", 0, 0.0, 0.0),
    ("per_block", "bf16", "finished", 40, 1950.0, 1.012),  # 1.5 % slower than the fastest that learned: a tie
)


def trial(number: int, row: Sequence[object] = ROWS[0], **figures: float) -> TrialRecord:
    sharding, precision, status, mib, speed, loss = row
    setting = {"sharding": str(sharding), "precision": str(precision)}
    measured: dict[str, float] = {}
    if status == "finished":
        measured = {
            "epoch": 2.0, "memory/peak_bytes": mib * MIB, "perf/samples_per_s": speed, "val/loss": loss,
            "train/loss": loss, "memory/param_bytes": mib * MIB / 4, "memory/activation_bytes": mib * MIB * 3 / 4,
            "forecast/peak_bytes": mib * MIB, "forecast/error": 0.0,
        }  # fmt: skip
    epochs = [{"epoch": float(e), "val/loss": loss + 1 / e, "train/loss": loss + 1 / e} for e in (1, 2)]
    reason = Reason.of(Code.job_failed, text="ran out of <memory> | `now`") if status == "oom" else None
    overrides = [f"{key}={value}" for key, value in setting.items()] + ["training.epochs=2"]
    epochs = epochs if measured else []
    return TrialRecord(
        number, setting, TrialStatus(str(status)), {**measured, **figures}, epochs, overrides, reason, f"{number:032x}"
    )


def sweep(trials: Sequence[TrialRecord] | None = None, **changed: object) -> SweepData:
    trials = [trial(i, row) for i, row in enumerate(ROWS)] if trials is None else trials
    given = {"loss_tolerance": 0.02, "speed_tolerance": 0.03, "axes": ["sharding", "precision"], **changed}
    return SweepData(name="a/sweep", command="python -m fsdp_lab -m", trials=list(trials), **given)  # type: ignore[arg-type]


def on_cpu(number: int, row: int, others: float, speed: float) -> TrialRecord:
    """A trial on a CPU of which other processes used a share."""
    one = trial(number, ROWS[row], **{SPEED: speed, OTHERS_CPU: others})
    return dataclasses.replace(one, facts={"device": "cpu"})


def rounds(row: int, *speeds: float, **figures: float) -> list[TrialRecord]:
    """A setting, once a round with each of these speeds."""
    ones = [trial(10 * row + i, ROWS[row], **{SPEED: s, **figures}) for i, s in enumerate(speeds)]
    return [dataclasses.replace(one, setting={**one.setting, "repeat": str(i)}) for i, one in enumerate(ones)]


REPEATED = ["sharding", "precision", "repeat"]
