"""The nights one after the other, in the foreground: waits, never two at once, what was missed once."""

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
    """Time, and waiting: a test has another one."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's."""

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def due_now(schedule: Schedule, nights: list[Night], since: float, now: float, late_s: float | None) -> float | None:
    """The night that is to run now: the latest that came and is not over, once, however many were missed.

    Args:
        since: nights before it were not missed, there was no schedule yet.
        late_s: how late it may still start; one that was begun goes on all the same.
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
    """When the night was due that was interrupted and is to go on: we are still within it. None without one."""
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
    say: Callable[[str], None],
    jitter_s: float = 0.0,
    late_s: float | None = None,
    nights: int | None = None,
) -> None:
    """Run what is due, wait for the next, and so on.

    Args:
        read: the nights; an OSError or a UserError of it, as of `run`, is told, and it is tried again.
        run: gets when the night was to be.
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
                    say(f"the night of {when} was missed or interrupted: now it runs")
                run(due)
        except (OSError, UserError) as error:  # a full disk, a store that is away, another start: until it is mended
            what = "the nights could not be read" if due is None else "the night could not be run"
            say(f"{what}: {error}; it is tried again in {_AFTER_TROUBLE_S:g} s")
            _wait(clock, clock.now() + _AFTER_TROUBLE_S)
        else:
            if due is None:
                start = schedule.after(_moment(clock.now())).timestamp()
                with_jitter = start + (random.uniform(0, jitter_s) if jitter_s else 0.0)
                say(f"the next night is {_moment(start).astimezone():%Y-%m-%d %H:%M:%S %Z}")
                _wait(clock, with_jitter)
        done += due is not None


def _wait(clock: Clock, until: float) -> None:
    while clock.now() < until:
        clock.sleep(min(_LONGEST_NAP_S, until - clock.now()))


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
