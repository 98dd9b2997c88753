"""What the running trials report to be doing, and how long they and the sweep will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fsdp_lab.engine.stacks import long_s
from fsdp_lab.record.trial_files import TrialProgress, read_progress
from fsdp_lab.report.reason_texts import stuck_text
from fsdp_lab.sweep.names import label
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.wording import duration

_WORTH_TELLING_S = 5.0  # a shorter step needs no time beside it
_DUMP_S = 8.0  # by then its ranks have told where they are, or will not
_MOST = 5  # running trials that are told about


@dataclass(frozen=True)
class Doing:
    """What a trial is doing, as its rank 0 reports.

    Attributes:
        what: a phase, or `step 7 of 290`.
        lasts_s: seconds since that was first seen, by this machine's clock.
        left_s: seconds until its last step, by the mean of its steps; None: not known.
        kind: `step`, the phase, or None while its workers start.
    """

    what: str
    lasts_s: float
    left_s: float | None = None
    kind: str | None = None

    def __str__(self) -> str:
        lasts = f", for {duration(self.lasts_s)}" if self.lasts_s >= _WORTH_TELLING_S else ""
        left = f", about {duration(self.left_s)} left" if self.left_s is not None else ""
        return f"{self.what}{lasts}{left}"


class Watch:
    """Reads the progress of trials, and notices what lasts unusually long."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[float | str | None, float]] = {}
        self._reported: set[tuple[int, str]] = set()

    def look(self, number: int, folder: Path, num_steps: int) -> Doing:
        """Return what a running trial is doing.

        Args:
            number: of the trial.
            folder: the trial's.
            num_steps: of the trial; 0: not known yet.
        """
        progress = read_progress(folder)
        phase, step = progress.phase, progress.step
        now, doing = time.monotonic(), phase or step
        if self._since.get(number, ("", 0.0))[0] != doing:
            self._since[number] = doing, now
        lasts_s = now - self._since[number][1]
        if phase is not None or step is None:
            return Doing(phase or "starting its workers", lasts_s, kind=phase)
        if not num_steps:
            return Doing(f"step {step}", lasts_s, kind="step")
        return Doing(f"step {step} of {num_steps}", lasts_s, _left_s(progress, num_steps), "step")

    def unusual(self, number: int, doing: Doing, folder: Path, timeout_s: float | None) -> str | None:
        """Return what lasts unusually long, and where its rank is; once for each phase, and once for all steps.

        Args:
            number: of the trial.
            doing: of the trial.
            folder: the trial's.
            timeout_s: `trial_timeout_s`.
        """
        kind = doing.kind
        beyond_s = doing.lasts_s - long_s(timeout_s)
        if kind is None or (number, kind) in self._reported or beyond_s < 0:
            return None
        stuck = read_progress(folder).stuck
        if not stuck and beyond_s < _DUMP_S:
            return None
        self._reported.add((number, kind))
        where = f"; {stuck_text(**stuck)}" if stuck else ""
        return f"{doing.what} has lasted {duration(doing.lasts_s)}{where}"


def _left_s(progress: TrialProgress, total: int) -> float | None:
    step, time, from_step, first_step = progress.step, progress.time, progress.from_step, progress.first_step
    if step is None or time is None or from_step is None or first_step is None or step <= from_step:
        return None
    return (time - first_step) / (step - from_step) * (total - step)


def sweep_left_s(states: Sequence[TrialState], doings: dict[int, Doing], to_come: int, now: float) -> float | None:
    """Return the seconds until a sweep ends, if trials take as long as earlier ones; None: not known.

    Args:
        states: of all trials.
        doings: of the running trials, by their numbers.
        to_come: trials that a search is still to suggest.
        now: in seconds since 1970.
    """
    running = {i: states[i] for i in doings}
    took = [state.seconds for state in states if state.ended and state.begun and state.seconds]
    known = {i: doing.left_s for i, doing in doings.items() if doing.left_s is not None}
    took = took or [now - (running[i].begun or now) + left for i, left in known.items()]
    if not took:
        return None
    each = fmean(took)
    lefts = [known.get(i, max(0.0, each - (now - (state.begun or now)))) for i, state in running.items()]
    waiting = sum(not state.ended for state in states) - len(running) + to_come
    return (sum(lefts) + waiting * each) / max(1, len(running))


def progress_lines(
    state: SweepState, doings: dict[int, Doing], to_come: int, now: float, what: str = "the sweep"
) -> list[str]:
    """Return a line for each running trial, and one for the time until the end, if that is known.

    Args:
        state: of the sweep.
        doings: of the running trials, by their numbers.
        to_come: trials that a search is still to suggest.
        now: in seconds since 1970.
        what: the thing that ends with the known trials: the sweep, or a round of `repeat=auto`.
    """
    lines = [f"{label(number, state.trials)}: {doing}" for number, doing in list(doings.items())[:_MOST]]
    if len(doings) > _MOST:
        lines.append(f"{len(doings) - _MOST} more running")
    left = sweep_left_s(state.trials, doings, to_come, now) if len(state.trials) + to_come > 1 else None
    return [*lines, f"{what}: about {duration(left)} left"] if left is not None else lines
