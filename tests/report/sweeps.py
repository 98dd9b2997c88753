"""Sweeps made by hand, so that what a report must say of them can be worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.metrics import MIB, OTHERS_CPU, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.plain_loops import PlainLoop
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord

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
    setting, is_finished = {"sharding": str(sharding), "precision": str(precision)}, status == "finished"
    measured = {
        "epoch": 2.0, "memory/peak_bytes": mib * MIB, "perf/samples_per_s": speed, "val/loss": loss,
        "train/loss": loss, "memory/param_bytes": mib * MIB / 4, "memory/activation_bytes": mib * MIB * 3 / 4,
        "forecast/peak_bytes": mib * MIB, "forecast/error": 0.0,
    }  # fmt: skip
    epochs = [{"epoch": float(e), "val/loss": loss + 1 / e, "train/loss": loss + 1 / e} for e in (1, 2)]
    return TrialRecord(
        number, setting, TrialStatus(str(status)), {**(measured if is_finished else {}), **figures},
        epochs if is_finished else [], [*(f"{key}={value}" for key, value in setting.items()), "training.epochs=2"],
        Reason.of(Code.job_failed, text="ran out of <memory> | `now`") if status == "oom" else None, f"{number:032x}",
    )  # fmt: skip


def sweep(trials: Sequence[TrialRecord] | None = None, **changed: object) -> SweepRecord:
    trials = [trial(i, row) for i, row in enumerate(ROWS)] if trials is None else trials
    given = {"loss_tolerance": 0.02, "speed_tolerance": 0.03, "axes": ["sharding", "precision"]}
    given |= {"command": "python -m fsdp_lab -m", **changed}
    return SweepRecord(name="a/sweep", trials=list(trials), **given)  # type: ignore[arg-type]


def on_cpu(number: int, row: int, others: float, speed: float) -> TrialRecord:
    """A trial on a CPU of which other processes used a share."""
    one = trial(number, ROWS[row], **{SPEED: speed, OTHERS_CPU: others})
    return replace(one, facts={"device": "cpu"})


def rounds(row: int, *speeds: float, **figures: float) -> list[TrialRecord]:
    """A setting, once a round with each of these speeds."""
    ones = [trial(10 * row + i, ROWS[row], **{SPEED: s, **figures}) for i, s in enumerate(speeds)]
    return [replace(one, setting={**one.setting, "repeat": str(i)}) for i, one in enumerate(ones)]


# By epoch: the loss of training and validation. The first is right; the other is of a model that branches by rank.
RIGHT, WRONG = ((1.4, 1.1), (0.9, 0.8205)), ((1.3, 1.0), (0.8, 0.7895))


def one(
    number: int, words: str, losses: Sequence[tuple[float, float]] = RIGHT, speed: float = 1000.0, **figures: float
) -> TrialRecord:
    """A finished trial of a setting, such as `sharding=ddp precision=fp32`, with the losses of its epochs."""
    made = trial(number, ("", "", "finished", 100, speed, losses[-1][1]), **figures)
    epochs = [
        {"epoch": float(n + 1), "step": 10.0 * (n + 1), "train/loss": train, "val/loss": val}
        for n, (train, val) in enumerate(losses)
    ]
    setting = dict(word.split("=") for word in words.split())
    return replace(made, setting=setting, epochs=epochs, overrides=words.split())


def early(first: float, second: float) -> dict[str, float]:
    """The losses of the first step and of the third."""
    return {"train/first_loss": first, "train/early_loss": second}


def differing() -> list[TrialRecord]:
    """Of a model that computes otherwise in two of four shardings, where it is faster and learns more."""
    almost = [(train * (1 + 2e-7), val * (1 - 2e-7)) for train, val in RIGHT]
    return [
        one(0, "sharding=per_block", WRONG, 3000.0), one(1, "sharding=ddp"),
        one(2, "sharding=root", almost, 1100.0), one(3, "sharding=per_layer", WRONG, 2000.0),
    ]  # fmt: skip


def amplified() -> list[TrialRecord]:
    """Two settings whose losses differ by 2e-7 in their third step, and by half in the end."""
    return [
        one(0, "sharding=ddp", RIGHT, **early(2.3, 2.2)),
        one(1, "sharding=root", ((1.5, 1.3), (1.3, 1.2)), 3000.0, **early(2.3, 2.2 * (1 + 2e-7))),
    ]


REPEATED = ["sharding", "precision", "repeat"]


def plain_loop(trial: int = 0) -> PlainLoop:
    """The plain loop of a trial, on a CPU."""
    figures = {
        "check/eval_loss": 1.341, "train/first_loss": 1.339, "check/grad_norm": 0.5, "train/early_loss": 1.2,
        "check/change_norm": 0.1, "check/val_loss": 1.1,
    }  # fmt: skip
    return PlainLoop(trial, 2, figures, steps=3, device="cpu")


def compared(
    number: int, words: str, speed: float = 1000.0, *, evaluated: float = 1.341, first: float = 1.339,
    norm: float = 0.5, early: float = 1.2, change: float = 0.1, val: float = 1.1,
) -> TrialRecord:  # fmt: skip
    """A finished trial of two workers that has the figures of `plain_loop`, but for those that are given."""
    given = (evaluated, first, norm, early, change, val)
    made = one(number, words, speed=speed, **dict(zip(plain_loop().figures, given, strict=True)))
    return replace(made, config=SweepConfig(), facts={"device": "cpu", "world_size": 2})
