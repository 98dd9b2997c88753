"""Runs nights in the foreground on their schedule: never two at once, and a missed night only once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from fsdp_lab.config import UserError
from fsdp_lab.nightly.nights import Night
from fsdp_lab.nightly.schedule import Schedule

_AFTER_TROUBLE_S = 600.0
_LONGEST_NAP_S = 30.0  # a clock that is set, and a machine that slept, are seen within it


class Clock(Protocol):
    """The time, and waiting; tests replace it."""

    def now(self) -> float:
        """Return the seconds since 1970."""

    def sleep(self, seconds: float) -> None:
        """Wait so many seconds."""


class WallClock:
    """The machine's."""

    def now(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait so many seconds."""
        time.sleep(seconds)


def due_now(schedule: Schedule, nights: list[Night], since: float, now: float, late_s: float | None) -> float | None:
    """Return when the night was due that has to run now; None: none has. Of missed nights only the latest runs.

    Args:
        schedule: of the nights.
        nights: so far.
        since: when the schedule began; no earlier night was missed. Seconds since 1970, as all times here.
        now: the time.
        late_s: how late a night may start; one that was begun is resumed in any case. None: until the next one.
    """
    begun = due_unfinished(schedule, nights, now)
    if begun is not None:  # by --once perhaps, before there was a schedule
        return begun
    last = schedule.last(_moment(now), _moment(since))
    if last is None:
        return None
    due = last.timestamp()
    of_it = [night for night in nights if night.due >= due or night.begun >= due]
    if any(night.over for night in of_it):
        return None
    if late_s is not None and now - due > late_s:
        return None
    return due


def due_unfinished(schedule: Schedule, nights: list[Night], now: float) -> float | None:
    """Return when the interrupted night was due that can still be resumed, before the next one; None without one."""
    last = schedule.last(_moment(now))
    unfinished = [night for night in nights if not night.over]
    if unfinished and last is not None and unfinished[-1].begun >= last.timestamp():
        return unfinished[-1].due
    return None


def loop(
    schedule: Schedule,
    read: Callable[[], list[Night]],
    run: Callable[[float], int],
    since: float,
    clock: Clock,
    log: Callable[[str], None],
    jitter_s: float = 0.0,
    late_s: float | None = None,
    nights: int | None = None,
) -> None:
    """Run nights when they are due, and wait in between.

    Args:
        schedule: of the nights.
        read: returns the nights so far. An OSError or a UserError of it, or of `run`, is logged, and it is tried again.
        run: runs a night, given when it was due; returns its exit status.
        since: when the schedule began, in seconds since 1970.
        clock: the time.
        log: logs a message.
        jitter_s: start at random up to so many seconds late.
        late_s: see `due_now`.
        nights: end after so many; None: never.
    """
    done = 0
    # one that was waited for is late by the jitter and by a nap, which is not what late_s is about
    allowed = None if late_s is None else late_s + jitter_s + _LONGEST_NAP_S
    while nights is None or done < nights:
        due = None
        try:
            due = due_now(schedule, read(), since, clock.now(), allowed)
            if due is not None:
                if clock.now() - due > jitter_s + _LONGEST_NAP_S:
                    when = f"{_moment(due).astimezone():%Y-%m-%d %H:%M}"
                    log(f"the night of {when} was missed or interrupted: it runs now")
                run(due)
        except (OSError, UserError) as error:  # a full disk, a store that is away, another start: until it is mended
            what = "the nights could not be read" if due is None else "the night could not be run"
            log(f"{what}: {error}; next attempt in {_AFTER_TROUBLE_S:g} s")
            _wait(clock, clock.now() + _AFTER_TROUBLE_S)
        else:
            if due is None:
                start = schedule.after(_moment(clock.now())).timestamp()
                with_jitter = start + (random.uniform(0, jitter_s) if jitter_s else 0.0)
                log(f"the next night is {_moment(start).astimezone():%Y-%m-%d %H:%M:%S %Z}")
                _wait(clock, with_jitter)
        done += due is not None


def _wait(clock: Clock, until: float) -> None:
    while clock.now() < until:
        clock.sleep(min(_LONGEST_NAP_S, until - clock.now()))


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
