"""The schedule of nights: APScheduler's scheduler with its cron trigger, and the night that was missed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.cron import CronTrigger
from tzlocal import get_localzone

from fsdp_lab.config import ConfigError
from fsdp_lab.nightly.nights import Night

_LARGEST_CHANGE = timedelta(hours=3)  # of a clock that is set forward or back
_EVERY_HOUR = ("*", "*/1", "0-23")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")  # cron's numbers; APScheduler counts from Monday


class NightTimes(BaseTrigger):
    """The times of a cron expression in a time zone.

    APScheduler's own trigger loses times after midnight on days on which clocks change. Here it computes in UTC what
    the clock on the wall shows, and `zoneinfo` says when it does. A time that clocks skip comes as much later as they
    are set forward. Of a time that occurs twice it is the first, or both of a schedule for every hour.
    """

    def __init__(self, shown: CronTrigger, zone: tzinfo, is_hourly: bool) -> None:
        self._shown, self._zone, self._folds = shown, zone, (0, 1) if is_hourly else (0,)

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        """Return the first time after the previous one and `now`: of those that were missed none is returned."""
        after = max(previous or now, now)
        return min(self._first(after, fold) for fold in self._folds)

    def _first(self, after: datetime, fold: int) -> datetime:
        shown = after.astimezone(self._zone).replace(tzinfo=UTC) - _LARGEST_CHANGE
        while True:
            shown = self._shown.get_next_fire_time(None, shown + timedelta(seconds=1))
            time = shown.replace(tzinfo=self._zone, fold=fold).astimezone(UTC)
            is_skipped = time.astimezone(self._zone).replace(tzinfo=UTC) != shown
            if time > after and not (fold and is_skipped):
                return time


def cron_trigger(cron: str, zone: str | None, now: datetime) -> NightTimes:
    """Return the times of a cron expression: minute hour day month weekday, with 0 and 7 for Sunday.

    Args:
        cron: the expression; of day and weekday, it has one.
        zone: a name such as Europe/Berlin; None: this machine's.
        now: for the check that there is a next night at all.

    Raises:
        ConfigError: an expression or a zone that is none, or a night that never comes.
    """
    try:
        known = ZoneInfo(zone) if zone is not None else get_localzone()
    except (KeyError, ValueError, OSError) as error:
        if zone is not None:
            named = f"nightly.timezone={zone} is not a time zone; use"
        elif os.environ.get("TZ"):
            named = f"TZ={os.environ['TZ']} in the environment is not a time zone; set it or nightly.timezone to"
        else:
            named = f"this machine's time zone cannot be read ({error}); set nightly.timezone to"
        raise ConfigError(f"{named} a name such as Europe/Berlin.") from None
    try:
        fields = cron.lower().split()
        if len(fields) == 5:
            if "*" not in (fields[2], fields[4]):
                raise ValueError("a day of the month and a weekday cannot be combined")
            for part in re.split("[ ,]", " ".join(fields)):  # APScheduler would ignore what follows a name
                if re.search("[a-z]", part) and not re.fullmatch("[a-z]{3}(-[a-z]{3})?", part):
                    raise ValueError(
                        f"{part} cannot be read; use names or ranges of them without a step, as in mon-fri"
                    )
            for part in fields[4].split(","):
                first, to, last = part.partition("-")
                if "/" in part or (to and first.isdigit() and last.isdigit() and int(first) > int(last)):
                    raise ValueError(f"{part} cannot be read as weekdays; list them, as in mon,wed,fri")
            fields[4] = re.sub("0-(?=[1-7])", "0,1-", fields[4])  # Sunday, which is APScheduler's last
            fields[4] = re.sub("[0-7]", lambda number: _DAYS[int(number[0])], fields[4])
        shown = CronTrigger.from_crontab(" ".join(fields), timezone=UTC)
    except ValueError as error:
        raise ConfigError(
            f"nightly.cron='{cron}': {error}; use minute hour day month weekday, for example '0 2 * * *'."
        ) from None
    if shown.get_next_fire_time(None, now) is None:
        raise ConfigError(
            f"nightly.cron='{cron}' never runs: no date has its day and month; use for example '0 2 * * *'."
        )
    return NightTimes(shown, known, fields[1] in _EVERY_HOUR)


def night_after(times: NightTimes, moment: datetime) -> datetime:
    """Return the first night after a moment, in UTC."""
    return times.get_next_fire_time(None, moment)


def is_due(nights: Sequence[Night], times: NightTimes, now: datetime) -> bool:
    """Return whether the night after the last one was missed. One that is dated in the future says nothing."""
    begun = [datetime.fromtimestamp(night.begun, UTC) for night in nights]
    past = [moment for moment in begun if moment <= now]
    return bool(begun) and (not past or night_after(times, past[-1]) <= now)


def run_schedule(times: NightTimes, overrides: Sequence[str], waits: bool, log: Callable[[str], None]) -> int:
    """Run `python -m fsdp_lab.nightly --once` at its times, until this process is interrupted.

    Each night is a process of its own, so it has the code as it is then.

    Args:
        waits: a night was missed, see `is_due`; it runs at once.

    Returns:
        130 if the interrupt interrupted a night; else 0.
    """
    command = [sys.executable, "-m", "fsdp_lab.nightly", "--once", *overrides]
    processes: list[subprocess.Popen[bytes]] = []
    ending = threading.Event()

    def log_next() -> None:
        log(f"the next night is {night_after(times, datetime.now(UTC)).astimezone():%Y-%m-%d %H:%M:%S %Z}")

    def run() -> None:
        processes[:] = [subprocess.Popen(command, start_new_session=True)]  # Ctrl-C is ours to pass on
        if ending.is_set():  # the interrupt came before there was a process
            processes[0].terminate()
        if processes[0].wait() < 0:
            log("the night was killed, and is incomplete")
        log_next()

    scheduler = BlockingScheduler(timezone=UTC)
    at_once: dict[str, Any] = {"next_run_time": datetime.now(UTC)} if waits else {}
    scheduler.add_job(run, times, coalesce=True, misfire_grace_time=None, **at_once)  # many missed: one runs
    log_next()
    try:
        scheduler.start()
    except KeyboardInterrupt:
        ending.set()
        for process in processes:
            process.terminate()
            if process.wait() == 130:
                return 130
    return 0
