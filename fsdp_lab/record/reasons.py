"""Reasons as codes with values. `report/render.py` makes the sentences."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fsdp_lab.config.status import TrialStatus


class Code(StrEnum):
    """Why a trial did not finish. Files and MLflow have its name; the values of each are listed below it.

    Of a rank, which also has `rank` and, if it had begun one, `at`: the step or the file at work.
    """

    out_of_memory = "out_of_memory"
    """An allocator on this rank found no memory: `error` (a class) and `text`, as raised."""
    host_out_of_memory = "host_out_of_memory"
    """Ray or the kernel killed the process as the host ran out of memory. `loader`: one that loads data.

    Without `rank`: Ray killed the trial's own process, twice.
    """
    user_error = "user_error"
    """An error that only the user can correct: `text`, and without a rank if it was found before training."""
    diverged = "diverged"
    """A loss is not finite: `error` and `text`, as raised."""
    error = "error"
    """Any other exception: `error` and `text`, as raised, and `line`, the last one of the user's code."""
    peer_lost = "peer_lost"
    """Another rank went away; never the cause: `error` and `text`, as raised."""
    timed_out = "timed_out"
    """No progress for `limit_s` since the `phase` or `step` began; `stuck`: the place of the rank that all wait for."""
    crashed = "crashed"
    """The process crashed by `signal`, and its stack is in `log`."""
    killed = "killed"
    """The process ended without an error; `node`: its address, if it is not the driver's."""
    node_lost = "node_lost"
    """The `node` of the process went down."""

    # Of the whole trial.
    no_place = "no_place"
    """`num_workers` with the resources `each` waited `wait_timeout_s`; `total` and `free` resources."""
    not_started = "not_started"
    """A worker ended while it started."""
    job_failed = "job_failed"
    """Ray's own error: `text`."""
    no_outcome = "no_outcome"
    """Its process ended and left nothing."""
    sweep_failed = "sweep_failed"
    """The sweep ended early: `text`, its error."""

    # Of a trial that was not started, by its forecast.
    forecast_failed = "forecast_failed"
    """The forecast failed as training would: `text`; `may_train`: where it could have another file, or machine."""
    same_as = "same_as"
    """It would fail as `trial` does; `text`: its own error, if it differs."""
    does_not_fit = "does_not_fit"
    """It needs `needed_bytes` of `capacity_bytes`, with `peak_bytes`; `keep`: the key that skips it, else `prune`.

    `workers`: that share a host which is short of memory; these are its bytes then.
    """
    too_slow = "too_slow"
    """Predicted `speed` (`low` to `high`), a `share` of the last kept with a ratio's `error`; `keep`: the key."""


_STATUS = {
    Code.out_of_memory: TrialStatus.oom,
    Code.host_out_of_memory: TrialStatus.oom,
    Code.diverged: TrialStatus.diverged,
}


@dataclass(frozen=True)
class Reason:
    """A code with its values. They are plain values, because they are written as JSON."""

    code: Code
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, code: Code, **values: Any) -> Reason:
        """Return a reason with these values; values that are None or empty are left out."""
        return cls(code, {key: value for key, value in values.items() if value not in (None, "", [], {})})

    @property
    def status(self) -> TrialStatus:
        return _STATUS.get(self.code, TrialStatus.failed)
