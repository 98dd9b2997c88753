"""The schedule of nights: APScheduler's own scheduler, with a trigger that means what cron means."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger
from tzlocal import get_localzone

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.nightly.nights import Night
from fsdp_lab.wording import count

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")
_LOOK_MINUTES = 10  # for a night that was missed, or that could not run


class Cron(BaseTrigger):  # type: ignore[misc]
    """The times of a cron expression: APScheduler's, with cron's weekdays, and the hour that occurs twice counted once.

    Args:
        cron: minute hour day month weekday, with cron's numbers for weekdays: 0 and 7 are Sunday.
        zone: a name such as Europe/Berlin; None: this machine's.
        now: for the check that there is a next night at all.

    Raises:
        ConfigError: an expression or a zone that is none, or a night that never comes.
    """

    def __init__(self, cron: str, zone: str | None, now: datetime) -> None:
        fields = cron.split()
        if len(fields) != 5:
            raise ConfigError(
                f"nightly.cron='{cron}' has {count(len(fields), 'field')}; it takes five: minute hour day month "
                "weekday, for example '0 2 * * *'."
            )
        try:
            known = ZoneInfo(zone) if zone is not None else get_localzone()
        except (KeyError, ValueError, OSError):
            raise ConfigError(
                f"nightly.timezone={zone} is not a time zone; use a name such as Europe/Berlin."
            ) from None
        try:
            fields[4] = _weekdays(fields[4])
            # of a day of the month and a weekday, cron takes either; APScheduler would take both together
            either = fields[2] != "*" and fields[4] != "*"
            ways = [[*fields[:4], "*"], [*fields[:2], "*", *fields[3:]]] if either else [fields]
            self._trigger = OrTrigger([CronTrigger.from_crontab(" ".join(way), timezone=known) for way in ways])
        except ValueError as error:
            raise ConfigError(
                f"nightly.cron='{cron}': {error}; use minute hour day month weekday, for example '0 2 * * *'."
            ) from None
        if self.get_next_fire_time(None, now) is None:
            raise ConfigError(
                f"nightly.cron='{cron}' never runs: no date has its day and month; use for example '0 2 * * *'."
            )

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """Return the first time after the previous one, or from now on; None: there is none."""
        moment = (previous_fire_time or now - timedelta(microseconds=1)).astimezone(UTC)
        asked = moment
        while True:
            found: datetime | None = self._trigger.get_next_fire_time(None, asked + timedelta(microseconds=1))
            if found is None or (found.astimezone(UTC) > moment and not self._is_repeated(found)):
                return found
            asked = max(asked + timedelta(minutes=1), found.astimezone(UTC))

    def after(self, moment: datetime) -> datetime:
        """Return the first night after a moment, in UTC."""
        found = self.get_next_fire_time(moment, moment)
        assert found is not None, "the constructor has refused it"
        return found.astimezone(UTC)

    def _is_repeated(self, found: datetime) -> bool:
        """Return whether clocks were set back, and the same time of the clock was one an hour ago."""
        if not found.fold:
            return False
        before = found.replace(fold=0).astimezone(UTC)
        there = self._trigger.get_next_fire_time(None, before - timedelta(microseconds=1))
        return there is not None and there.astimezone(UTC) == before


def is_due(nights: Sequence[Night], host: str, now: float) -> bool:
    """Return whether a night waits: one of this machine was interrupted, or the last one's next was missed."""
    known = [night for night in nights if night.over or night.host == host]
    return bool(known) and (not known[-1].over or known[-1].next_due <= now)


class Schedule:
    """Runs `python -m fsdp_lab.nightly --once` at the times of a trigger, and when a night waits.

    Each night is a process of its own, so it has the code as it is then.

    Args:
        trigger: of the nights.
        overrides: of the command.
        waits: returns whether a night waits, see `is_due`.
        log: logs a message.
    """

    def __init__(
        self, trigger: Cron, overrides: Sequence[str], waits: Callable[[], bool], log: Callable[[str], None]
    ) -> None:
        self._trigger, self._waits, self._log = trigger, waits, log
        self._command = [sys.executable, "-m", "fsdp_lab.nightly", "--once", *overrides]
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._busy = threading.Lock()
        self.scheduler = BlockingScheduler(timezone=UTC)
        once: dict[str, Any] = {"coalesce": True, "misfire_grace_time": None}  # however many were missed, and when
        self.scheduler.add_job(self._run, trigger, **once)
        self.scheduler.add_job(
            self._look, "interval", minutes=_LOOK_MINUTES, next_run_time=datetime.now(UTC), **once
        )  # fmt: skip

    def run(self) -> int:
        """Run nights until this process is interrupted; return 130 if that interrupted one, else 0."""
        self._log_next()
        try:
            self.scheduler.start()
        except KeyboardInterrupt:
            self._stopping = True
            process = self._process
            if process is not None and process.poll() is None:
                process.terminate()
                return 130 if process.wait() == 130 else 0
        return 0

    def _look(self) -> None:
        try:
            waits = self._waits()
        except (OSError, UserError) as error:  # a store that is away
            self._log(f"the nights could not be read: {error}; next attempt in {_LOOK_MINUTES} minutes")
            return
        if waits:
            self._run()

    def _run(self) -> None:
        if not self._busy.acquire(blocking=False):
            return
        try:
            if self._stopping:
                return
            self._process = subprocess.Popen(self._command, start_new_session=True)  # Ctrl-C is ours to hand on
            if self._stopping:  # an interrupt came between the two
                self._process.terminate()
            self._process.wait()
            self._log_next()
        finally:
            self._busy.release()

    def _log_next(self) -> None:
        self._log(f"the next night is {self._trigger.after(datetime.now(UTC)).astimezone():%Y-%m-%d %H:%M:%S %Z}")


def _weekdays(text: str) -> str:
    """Return cron's weekdays as the names of days: APScheduler counts from Monday, cron from Sunday."""
    if not any(c.isdigit() for c in text) or text.startswith("*/1"):
        return text
    days: list[str] = []
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            first, last = "0", "6"
        if not first.isdigit():
            if step or last:
                raise ValueError(f"the weekday {part} cannot be read; use only numbers or only names")
            days.append(first)
            continue
        low, high = int(first), int(last or (6 if step else first))
        if not 0 <= low <= high <= 7 or (step and not (step.isdigit() and int(step))):
            raise ValueError(f"the weekday {part} is not between 0 (Sunday) and 7 (Sunday)")
        days += [_DAYS[day] for day in range(low, high + 1, int(step or 1))]
    return ",".join(dict.fromkeys(days))
