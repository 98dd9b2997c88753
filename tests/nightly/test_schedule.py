"""What cron means, which night waits, and the scheduler that starts them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.base import BaseTrigger

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.nightly import schedule as schedule_module
from fsdp_lab.nightly.nights import Night, Verdict, night_id
from fsdp_lab.nightly.schedule import Cron, Schedule, is_due

FRIDAY = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
DAILY = Cron("0 2 * * *", "UTC", FRIDAY)


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 4 * * *", "2026-11-21T04:30"),
        ("0 2 * * 0", "2026-11-22T02:00"),  # Sunday, as in cron
        ("0 2 * * 7", "2026-11-22T02:00"),
        ("0 2 * * 1-5", "2026-11-23T02:00"),  # Monday to Friday
        ("0 2 * * 6,0", "2026-11-21T02:00"),
        ("0 2 * * */2", "2026-11-21T02:00"),  # Sunday, Tuesday, Thursday, Saturday
        ("0 2 * * mon-fri", "2026-11-23T02:00"),
        ("0 2 1 * *", "2026-12-01T02:00"),
        ("*/15 * * * *", "2026-11-20T12:15"),
        ("0 2 1 * 1", "2026-11-23T02:00"),  # the first, or a Monday: either, as in cron
        ("0 2 21 * 1", "2026-11-21T02:00"),
    ],
)
def test_cron_means_what_it_means_to_cron(cron: str, expected: str):
    assert Cron(cron, "UTC", FRIDAY).after(FRIDAY) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


def test_the_zone_decides_and_the_hour_that_comes_twice_counts_once():
    berlin = Cron("30 2 * * *", "Europe/Berlin", FRIDAY)
    nights, moment = [], datetime(2026, 10, 24, 12, tzinfo=UTC)
    for _ in range(3):
        moment = berlin.after(moment)
        nights.append(moment.astimezone(ZoneInfo("Europe/Berlin")).strftime("%d %H:%M %z"))
    assert nights == ["25 02:30 +0200", "26 02:30 +0100", "27 02:30 +0100"]
    spring = berlin.after(datetime(2026, 3, 28, 12, tzinfo=UTC))  # 02:30 does not exist there on the 29th
    assert spring == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    assert berlin.after(spring) == datetime(2026, 3, 30, 0, 30, tzinfo=UTC)


def test_it_is_a_trigger_of_apscheduler():
    due = DAILY.get_next_fire_time(None, FRIDAY.replace(hour=2))
    assert due == FRIDAY.replace(hour=2), "the moment itself counts"
    assert DAILY.get_next_fire_time(due, FRIDAY + timedelta(days=5)) == due + timedelta(days=1), "what was missed, too"


@pytest.mark.parametrize(
    ("cron", "zone", "message"),
    [
        ("0 0 30 2 *", "UTC", "never runs"),
        ("0 2 * *", "UTC", "has 4 fields; it takes five"),
        ("nightly", "UTC", "has 1 field; it takes five"),
        ("61 2 * * *", "UTC", "61"),
        ("0 2 * * 8", "UTC", "the weekday 8"),
        ("x 2 * * *", "UTC", "nightly.cron='x 2 * * *'"),
        ("0 2 * * *", "Mars/Base", "nightly.timezone=Mars/Base is not a time zone"),
        ("0 2 * * *", "../x", "nightly.timezone=../x is not a time zone"),
    ],
)
def test_what_is_no_schedule_is_reported(cron: str, zone: str, message: str):
    with pytest.raises(ConfigError, match="nightly") as error:
        Cron(cron, zone, FRIDAY)
    assert message in str(error.value)


def at(text: str) -> float:
    return datetime.fromisoformat(f"2026-11-{text}:00+00:00").timestamp()


def night(begun: str, verdict: Verdict = Verdict.good, host: str = "here") -> Night:
    """A night of the daily schedule."""
    due = DAILY.after(datetime.fromtimestamp(at(begun), UTC)).timestamp()
    return Night(night_id(at(begun)), at(begun), due, host, verdict)


@pytest.mark.parametrize(
    ("nights", "now", "expected"),
    [
        ([], "20T09:00", False),  # no night was missed before the first
        ([night("19T02:00")], "20T01:59", False),
        ([night("19T02:00")], "20T02:00", True),
        ([night("17T02:00")], "20T09:00", True),  # three were missed: one runs
        ([night("20T08:00")], "20T09:00", False),  # by --once, in the same night
        ([night("20T02:00", Verdict.left)], "20T09:00", False),
        ([night("20T02:00", Verdict.running)], "20T09:00", True),  # interrupted: it continues
        ([night("19T02:00", Verdict.running)], "20T09:00", True),
        ([night("19T02:00"), night("20T02:00", Verdict.running, "there")], "20T01:00", False),  # another machine's
        ([night("19T02:00"), night("20T02:00", host="there")], "20T09:00", False),
    ],
)
def test_which_night_waits(nights: list[Night], now: str, expected: bool):
    assert is_due(nights, "here", at(now)) is expected


class Soon(BaseTrigger):
    """Fires at once, and then never; `after` is for the log alone."""

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
        return now if previous is None else None

    def after(self, moment: datetime) -> datetime:
        return moment


class Never(Soon):
    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
        return None


def started(
    monkeypatch: pytest.MonkeyPatch, trigger: Soon, waits: Sequence[bool | Exception], count: int = 1
) -> tuple[list[list[str]], list[str]]:
    """The commands that a schedule has started, and its log; it ends after so many, or when nobody waits any more."""
    commands: list[list[str]] = []
    logged: list[str] = []
    answers = iter(waits)

    class Process:
        def __init__(self, command: list[str], **options: object) -> None:
            commands.append(command)

        def wait(self) -> int:
            if len(commands) == count:
                schedule.scheduler.shutdown(wait=False)
            return 0

        def poll(self) -> int:
            return 0

    def waits_now() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def log(text: str) -> None:
        logged.append(text)
        if "could not be read" in text:
            schedule.scheduler.shutdown(wait=False)

    monkeypatch.setattr(schedule_module.subprocess, "Popen", Process)
    schedule = Schedule(trigger, ["precision=fp32"], waits_now, log)  # type: ignore[arg-type]
    assert schedule.run() == 0
    return commands, logged


def test_a_night_that_was_missed_runs_once_at_the_start(monkeypatch: pytest.MonkeyPatch):
    commands, logged = started(monkeypatch, Never(), [True])
    assert commands == [[sys.executable, "-m", "fsdp_lab.nightly", "--once", "precision=fp32"]]
    assert logged[0].startswith("the next night is ")


def test_a_night_runs_when_it_is_due(monkeypatch: pytest.MonkeyPatch):
    assert len(started(monkeypatch, Soon(), [False])[0]) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), UserError("the store does not answer")])
def test_nights_that_cannot_be_read_do_not_end_the_schedule(monkeypatch: pytest.MonkeyPatch, error: Exception):
    commands, logged = started(monkeypatch, Never(), [error])
    assert commands == [] and logged[1] == f"the nights could not be read: {error}; next attempt in 10 minutes"


def test_apscheduler_runs_what_was_missed_once_and_looks_every_ten_minutes():
    nights, looks = Schedule(DAILY, [], lambda: False, print).scheduler.get_jobs()
    assert nights.trigger is DAILY and looks.trigger.interval == timedelta(minutes=10)
    assert [(job.coalesce, job.misfire_grace_time) for job in (nights, looks)] == [(True, None)] * 2
