"""`repeat=auto`: after the first round of a grid only the settings that could still be the answer run again.

Round by round, every second one backwards, so that what drifts evenly meets all settings alike. What to run next is a
function of the trials that there are, so a resume goes on as an uninterrupted sweep would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fsdp_lab.compose import Trial
from fsdp_lab.config import ConfigError
from fsdp_lab.report import data
from fsdp_lab.report.choice import candidates
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.grid import FIRST_ROUND
from fsdp_lab.sweep.state import SweepState

# Rounds after which it gives up where no run counts, because others use the cores too.
_TRIED_IN_VAIN = 2


class AutoRepeat:
    """A `Search` whose trials are repeats of those that the grid began with.

    Args:
        state: of the sweep; trials that are suggested are added to it by the caller.
        told: the sweep as a report sees it, of the trials in the state.
        compose: makes the trial of overrides, given its number.
        most: rounds, the first included.
    """

    def __init__(
        self,
        state: SweepState,
        told: Callable[[], data.Sweep],
        compose: Callable[[Sequence[str], int], Trial],
        most: int,
    ) -> None:
        self._state, self._told, self._compose, self._most = state, told, compose, most
        self._notes: list[str] = []
        self._told_of: set[int] = set()
        self._wanted: dict[int, list[list[str]]] = {}  # round -> the overrides of its trials, without the repeat

    def has_more(self) -> bool:
        return self._state.open or self._next_overrides() is not None

    def next(self) -> Trial | None:
        """The next repeat; None while the round that decides is running, and when the answer is settled."""
        overrides = self._next_overrides()
        return None if overrides is None else self._compose(overrides, len(self._state.trials))

    def code(self) -> list[str]:
        """Return nothing more than the trials that it repeats call."""
        return []

    def notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def tell(self, trial: Trial, status: TrialStatus, metrics: Mapping[str, float]) -> None:
        """Nothing to keep: all is in the state."""

    def _next_overrides(self) -> list[str] | None:
        current = max((state.trial.config.repeat for state in self._state.trials), default=0)
        if (left := self._left_of(current)) is not None:
            return left
        if self._state.open or current + 1 >= self._most:
            return None
        wanted = self._wanted_in(current + 1)
        if len(wanted) < 2:
            return None
        if current + 1 not in self._told_of:
            self._told_of.add(current + 1)
            count = f"{len(wanted)} settings" if len(wanted) < len(self._first_round()) else "all settings"
            self._notes.append(f"repeat=auto: round {current + 2} of at most {self._most} repeats {count}")
        return self._left_of(current + 1)

    def _left_of(self, number: int) -> list[str] | None:
        """The first trial of a round that nobody has begun; None when all were, and of the first round."""
        earlier = (state for state in self._state.trials if state.trial.config.repeat < number)
        if number == 0 or any(not state.ended for state in earlier):
            return None
        begun = {tuple(s.trial.overrides) for s in self._state.trials if s.trial.config.repeat == number}
        for overrides in self._wanted_in(number):
            again = [f"repeat={number}" if word == FIRST_ROUND else word for word in overrides]
            if tuple(again) not in begun:
                return again
        return None

    def _wanted_in(self, number: int) -> list[list[str]]:
        """What a round repeats, by the rounds before it."""
        if number not in self._wanted:
            self._wanted[number] = self._undecided_before(number)[:: -1 if number % 2 else 1]
        return self._wanted[number]

    def _undecided_before(self, number: int) -> list[list[str]]:
        sweep = self._told()
        before = [trial for trial in sweep.trials if self._state.trials[trial.number].trial.config.repeat < number]
        seen = replace(sweep, trials=before)
        if not seen.runs and (number >= _TRIED_IN_VAIN or not seen.timed):
            return []
        open_ones = candidates(seen)
        numbers = sorted(setting.trials[0].number for setting in open_ones)
        return [list(self._state.trials[n].trial.overrides) for n in numbers] if len(numbers) > 1 else []

    def _first_round(self) -> list[int]:
        return [n for n, state in enumerate(self._state.trials) if state.trial.config.repeat == 0]


def check_auto(most: int, samples: bool, axes: Sequence[str]) -> None:
    """
    Args:
        axes: the keys that have several values.

    Raises:
        ConfigError: `repeat=auto` with what it has no meaning with.
    """
    if samples:
        raise ConfigError(
            "repeat=auto repeats the settings of a grid; with a search use repeat=0,1,2 in a grid of its best settings."
        )
    if most < 2:
        raise ConfigError(f"repeat_max={most} leaves repeat=auto nothing to repeat; use 2 or more.")
    if "training.seed" in axes:
        raise ConfigError(
            "repeat=auto with several values of training.seed: both repeat each setting; leave one of them out."
        )
