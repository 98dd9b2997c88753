"""The schedule of nights: APScheduler's scheduler with its cron trigger, and the night that was missed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.triggers.cron import CronTrigger
from tzlocal import get_localzone

from fsdp_lab.config import ConfigError
from fsdp_lab.nightly.nights import Night

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")  # cron's numbers; APScheduler counts from Monday


def cron_trigger(cron: str, zone: str | None, now: datetime) -> CronTrigger:
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
    except (KeyError, ValueError, OSError):
        raise ConfigError(f"nightly.timezone={zone} is not a time zone; use a name such as Europe/Berlin.") from None
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
        trigger = CronTrigger.from_crontab(" ".join(fields), timezone=known)
    except ValueError as error:
        raise ConfigError(
            f"nightly.cron='{cron}': {error}; use minute hour day month weekday, for example '0 2 * * *'."
        ) from None
    if trigger.get_next_fire_time(None, now) is None:
        raise ConfigError(
            f"nightly.cron='{cron}' never runs: no date has its day and month; use for example '0 2 * * *'."
        )
    return trigger


def night_after(trigger: CronTrigger, moment: datetime) -> datetime:
    """Return the first night after a moment, in UTC."""
    return trigger.get_next_fire_time(None, moment + timedelta(seconds=1)).astimezone(UTC)


def is_due(nights: Sequence[Night], trigger: CronTrigger, now: datetime) -> bool:
    """Return whether the night after the last one was missed."""
    return bool(nights) and night_after(trigger, datetime.fromtimestamp(nights[-1].begun, UTC)) <= now


def run_schedule(trigger: CronTrigger, overrides: Sequence[str], waits: bool, log: Callable[[str], None]) -> int:
    """Run `python -m fsdp_lab.nightly --once` at the times of a trigger, until this process is interrupted.

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
        log(f"the next night is {night_after(trigger, datetime.now(UTC)).astimezone():%Y-%m-%d %H:%M:%S %Z}")

    def run() -> None:
        processes[:] = [subprocess.Popen(command, start_new_session=True)]  # Ctrl-C is ours to pass on
        if ending.is_set():  # the interrupt came before there was a process
            processes[0].terminate()
        if processes[0].wait() < 0:
            log("the night was killed, and is incomplete")
        log_next()

    scheduler = BlockingScheduler(timezone=UTC)
    at_once: dict[str, Any] = {"next_run_time": datetime.now(UTC)} if waits else {}
    scheduler.add_job(run, trigger, coalesce=True, misfire_grace_time=None, **at_once)  # many missed: one runs
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
