"""`repeat=auto`: after the first round of a grid, only the settings that could still be the answer run again.

Every second round runs backwards, so that a steady drift affects all settings alike. The next trials are a function of
the existing ones, so a resume continues as an uninterrupted sweep would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fsdp_lab.compose import Trial
from fsdp_lab.config import ConfigError
from fsdp_lab.report import data
from fsdp_lab.report.repeats import undecided
from fsdp_lab.report.settings import Settings
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.grid import FIRST_ROUND
from fsdp_lab.sweep.state import SweepState

# Rounds after which it gives up where no run counts, because others use the cores too.
_TRIED_IN_VAIN = 2


class AutoRepeat:
    """A `Search` whose trials are repeats of the grid's.

    Args:
        state: of the sweep; the caller adds suggested trials to it.
        read_sweep: returns the report's view of the sweep's current trials.
        compose: makes a trial from its overrides and its number.
        most: rounds, including the first.
    """

    def __init__(
        self,
        state: SweepState,
        read_sweep: Callable[[], data.SweepData],
        compose: Callable[[Sequence[str], int], Trial],
        most: int,
    ) -> None:
        self._state, self._read_sweep, self._compose, self._most = state, read_sweep, compose, most
        self._notes: list[str] = []
        self._announced: set[int] = set()
        self._wanted: dict[int, list[list[str]]] = {}  # round -> the overrides of its trials, without the repeat

    def has_more(self) -> bool:
        """Return whether trials are running or a repeat is left."""
        return self._state.open or self._next_overrides() is not None

    def next(self) -> Trial | None:
        """Return the next repeat; None while the deciding round is running, and when the answer is settled."""
        overrides = self._next_overrides()
        return None if overrides is None else self._compose(overrides, len(self._state.trials))

    def code(self) -> list[str]:
        """Return nothing more than the trials that it repeats call."""
        return []

    def notes(self) -> list[str]:
        """Return the messages for the user since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def report_result(self, trial: Trial, status: TrialStatus, metrics: Mapping[str, float]) -> None:
        """Do nothing: the state has everything."""

    def _next_overrides(self) -> list[str] | None:
        current = max((state.trial.config.repeat for state in self._state.trials), default=0)
        if (left := self._left_of(current)) is not None:
            return left
        if self._state.open or current + 1 >= self._most:
            return None
        wanted = self._wanted_in(current + 1)
        if len(wanted) < 2:
            return None
        if current + 1 not in self._announced:
            self._announced.add(current + 1)
            count = f"{len(wanted)} settings" if len(wanted) < len(self._first_round()) else "all settings"
            self._notes.append(f"repeat=auto: round {current + 2} of at most {self._most} repeats {count}")
        return self._left_of(current + 1)

    def _left_of(self, number: int) -> list[str] | None:
        """Return the first trial of a round that has not begun; None if all have, and for the first round."""
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
        """Return what a round repeats, by the rounds before it."""
        if number not in self._wanted:
            self._wanted[number] = self._undecided_before(number)[:: -1 if number % 2 else 1]
        return self._wanted[number]

    def _undecided_before(self, number: int) -> list[list[str]]:
        sweep = self._read_sweep()
        before = [trial for trial in sweep.trials if self._state.trials[trial.number].trial.config.repeat < number]
        frame = replace(sweep, trials=before).frame()
        seen = Settings(frame, sweep.rules)
        if seen.compared.empty and (number >= _TRIED_IN_VAIN or seen.timed.empty):
            return []
        numbers = sorted(setting.trials[0] for setting in undecided(frame, sweep.rules))
        return [list(self._state.trials[n].trial.overrides) for n in numbers] if len(numbers) > 1 else []

    def _first_round(self) -> list[int]:
        return [n for n, state in enumerate(self._state.trials) if state.trial.config.repeat == 0]


def check_auto(most: int, samples: bool, axes: Sequence[str]) -> None:
    """Check that `repeat=auto` fits the other settings.

    Args:
        most: `repeat_max`.
        samples: whether a search suggests trials.
        axes: the keys that have several values.

    Raises:
        ConfigError: it does not.
    """
    if samples:
        raise ConfigError(
            "repeat=auto needs a grid; after a search, run a grid of its best settings with repeat=0,1,2."
        )
    if most < 2:
        raise ConfigError(f"repeat_max={most} leaves nothing to repeat; use 2 or more.")
    if "training.seed" in axes:
        raise ConfigError("repeat=auto with several values of training.seed: both repeat each setting; leave one out.")
