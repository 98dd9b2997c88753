"""What the running trials are doing, by their own word, and how long they and the sweep will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fsdp_lab.engine.files import read_facts, read_phase, read_progress
from fsdp_lab.engine.stacks import find_stuck, long_s
from fsdp_lab.sweep.names import label
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.wording import duration

_STARTS = "starting its workers"
_WORTH_TELLING_S = 5.0  # a shorter step needs no time beside it
_DUMP_S = 1.0  # until a rank has written its stack
_MOST = 5  # running trials that are told about


@dataclass(frozen=True)
class Doing:
    """What a trial does, as its rank 0 says.

    Attributes:
        what: a phase, or `step 7 of 290`.
        lasts_s: since when it was seen to do that. No clock of another machine is asked.
        left_s: seconds until its last step, by the mean of its steps; None where that is not known.
    """

    what: str
    lasts_s: float
    left_s: float | None = None

    def __str__(self) -> str:
        lasts = f", for {duration(self.lasts_s)}" if self.lasts_s >= _WORTH_TELLING_S else ""
        left = f", about {duration(self.left_s)} left" if self.left_s is not None else ""
        return f"{self.what}{lasts}{left}"


class Watch:
    """Looks at what trials do, and notices what lasts unusually long."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[str, float]] = {}
        self._num_steps: dict[int, int] = {}
        self._said: set[tuple[int, str]] = set()

    def look(self, number: int, folder: Path) -> Doing:
        """Returns what a running trial does."""
        progress, what = read_progress(folder), read_phase(folder)
        if what is None and "step" in progress:
            what = f"step {progress['step']:.0f}"
        what = what or _STARTS
        before, since = self._since.get(number, ("", 0.0))
        if what != before:
            since = time.monotonic()
            self._since[number] = what, since
        lasts_s = time.monotonic() - since
        if not what.startswith("step "):
            return Doing(what, lasts_s)
        total = self._steps_of(number, folder)
        return Doing(f"{what} of {total}", lasts_s, _left_s(progress, total)) if total else Doing(what, lasts_s)

    def _steps_of(self, number: int, folder: Path) -> int:
        if number not in self._num_steps and (facts := read_facts(folder)) is not None:
            self._num_steps[number] = int(facts.get("num_steps", 0))
        return self._num_steps.get(number, 0)

    def unusual(self, number: int, doing: Doing, folder: Path, timeout_s: float | None) -> str | None:
        """Returns what lasts unusually long, and where its rank is; once for each phase, and once for all steps.

        Args:
            timeout_s: `trial_timeout_s`.
        """
        kind = number, "step" if doing.what.startswith("step ") else doing.what
        if doing.what == _STARTS or kind in self._said or doing.lasts_s < long_s(timeout_s) + _DUMP_S:
            return None
        self._said.add(kind)
        stuck = find_stuck(folder)
        return f"{doing.what} has lasted {duration(doing.lasts_s)}" + (f"; {stuck}" if stuck else "")


def _left_s(progress: dict[str, float], total: int) -> float | None:
    done = progress["step"] - progress.get("from_step", progress["step"])
    if done <= 0:
        return None
    return (progress["time"] - progress["first_step"]) / done * (total - progress["step"])


def sweep_left_s(states: Sequence[TrialState], doings: dict[int, Doing], to_come: int, now: float) -> float | None:
    """Returns the seconds until a sweep ends, as long as the trials of before took; None where nothing is known.

    Args:
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
    """Returns a line for each running trial; the last says how long the sweep will take, where that is known.

    Args:
        what: ends when all known trials have: the sweep, or a round of `repeat=auto`.
    """
    lines = [f"{label(number, state.trials)}: {doing}" for number, doing in list(doings.items())[:_MOST]]
    if len(doings) > _MOST:
        lines.append(f"{len(doings) - _MOST} more run")
    left = sweep_left_s(state.trials, doings, to_come, now) if len(state.trials) + to_come > 1 else None
    return [*lines, f"{what}: about {duration(left)} left"] if left is not None else lines
