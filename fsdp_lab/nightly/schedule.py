"""The schedule of nights: a cron expression, by APScheduler's trigger, and the nights that are due.

APScheduler's own scheduler is not used: it stores missed runs as pickles, and here the nights' folders record them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger
from tzlocal import get_localzone

from fsdp_lab.config import ConfigError
from fsdp_lab.wording import count

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")
_LOOK_BACK_DAYS = (1, 8, 64, 512, 4096)


class Schedule:
    """The nights of a cron expression.

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
        try:
            self.after(now)
        except StopIteration:
            raise ConfigError(
                f"nightly.cron='{cron}' never runs: no date has its day and month; use for example '0 2 * * *'."
            ) from None

    def after(self, moment: datetime) -> datetime:
        """Return the first night after a moment, in UTC. If clocks are set back, the repeated hour counts once.

        Raises:
            StopIteration: there is none.
        """
        moment = moment.astimezone(UTC)
        asked = moment
        while True:
            fire_time = self._trigger.get_next_fire_time(None, asked + timedelta(microseconds=1))
            if fire_time is None:
                raise StopIteration
            night = fire_time.astimezone(UTC)
            if night > moment and not (fire_time.fold and self._was_night(fire_time.replace(fold=0))):
                return night
            asked = max(asked + timedelta(minutes=1), night)

    def _was_night(self, moment: datetime) -> bool:
        before = moment.astimezone(UTC)
        fire_time = self._trigger.get_next_fire_time(None, before - timedelta(microseconds=1))
        return fire_time is not None and fire_time.astimezone(UTC) == before

    def last(self, now: datetime, since: datetime | None = None) -> datetime | None:
        """Return the latest night in (since, now], in UTC; without `since`, within eleven years. None without one."""
        starts = [since] if since is not None else [now - timedelta(days=days) for days in _LOOK_BACK_DAYS]
        for start in starts:
            last, at = None, start.astimezone(UTC)
            while True:
                try:
                    at = self.after(at)
                except StopIteration:
                    break
                if at > now:
                    break
                last = at
            if last is not None:
                return last
        return None


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
