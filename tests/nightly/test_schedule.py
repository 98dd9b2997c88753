"""What cron means, which night waits, and the scheduler that starts them."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock
from zoneinfo import ZoneInfo

import pytest

from fsdp_lab.commands import nightly as command
from fsdp_lab.commands.nightly import is_due, night_times, run_schedule
from fsdp_lab.config import ConfigError
from fsdp_lab.nightly.gate import Night, Verdict
from fsdp_lab.nightly.night import night_id

FRIDAY = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
DAILY = night_times("0 2 * * *", "UTC", FRIDAY)


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 4 * * *", "2026-11-21T04:30"),
        ("0 2 * * 0", "2026-11-22T02:00"),  # Sunday, as in cron
        ("0 2 * * 7", "2026-11-22T02:00"),
        ("0 2 * * 1-5", "2026-11-23T02:00"),  # Monday to Friday
        ("0 2 * * 6,0", "2026-11-21T02:00"),
        ("0 2 * * 0-4", "2026-11-22T02:00"),  # Sunday to Thursday
        ("0 2 * * MON-fri", "2026-11-23T02:00"),
        ("0 2 * jan-jun *", "2027-01-01T02:00"),
        ("*/15 * * * *", "2026-11-20T12:15"),
    ],
)
def test_cron_means_what_it_means_to_cron(cron: str, expected: str):
    assert night_times(cron, "UTC", FRIDAY)(FRIDAY) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "zone", "message"),
    [
        ("0 0 30 2 *", "UTC", "never runs"),
        ("0 2 * *", "UTC", "got 4, expected 5"),
        ("0 2 1 * 1", "UTC", "a day of the month and a weekday cannot be combined"),
        ("61 2 * * *", "UTC", "61"),
        ("0 2 * * */2", "UTC", "*/2 cannot be read"),  # APScheduler would ignore what follows
        ("0 2 * * 1-5/2", "UTC", "1-5/2 cannot be read"),
        ("0 2 * * 1-0", "UTC", "1-0 cannot be read"),
        ("0 2 1 jan- *", "UTC", "jan- cannot be read"),
        ("0 2 * * 5-2", "UTC", "higher than the maximum"),
        ("0 2 * * *", "../x", "nightly.timezone=../x is not a time zone"),
    ],
)
def test_what_is_no_schedule_is_refused(cron: str, zone: str, message: str):
    with pytest.raises(ConfigError, match="nightly") as error:
        night_times(cron, zone, FRIDAY)
    assert message in str(error.value)


def test_a_machine_without_a_zone_by_name_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "CET-1CEST")
    with pytest.raises(ConfigError, match=r"nightly\.timezone=null: .*use a name such as Europe/Berlin"):
        night_times("0 2 * * *", None, FRIDAY)


@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("Europe/Berlin", "02:30"), ("America/New_York", "00:00"), ("Australia/Sydney", "02:15"),
        ("America/Santiago", "00:00"), ("Africa/Cairo", "00:30"),  # there midnight itself is skipped
        ("Australia/Lord_Howe", "01:59"), ("Antarctica/Troll", "01:59"),  # half an hour, and two hours
    ],
)  # fmt: skip
def test_every_date_has_one_night_when_the_clock_shows_it(zone: str, shown: str):
    """Of a year. Where clocks skip the time, the night is at what `zoneinfo` makes of it."""
    hour, minute = map(int, shown.split(":"))
    times, day = night_times(f"{minute} {hour} * * *", zone, FRIDAY), datetime(2026, 12, 31, hour, minute)
    night = day.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    for _ in range(365):
        day += timedelta(days=1)
        night = times(night)
        assert night == day.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC), (day, night)


@pytest.mark.parametrize(
    ("cron", "zone", "hours"),
    [("20 * * * *", "Europe/Berlin", {1.0}), ("20 */1 * * *", "Australia/Lord_Howe", {0.5, 1.0, 1.5})],
)
def test_hourly_nights_are_an_hour_apart_while_clocks_change(cron: str, zone: str, hours: set[float]):
    """In the weeks around both changes of 2027."""
    times, apart = night_times(cron, zone, FRIDAY), set()
    for month, day in ((3, 25), (4, 1), (9, 30), (10, 28)):
        begun = night = times(datetime(2027, month, day, tzinfo=UTC))
        while night < begun + timedelta(days=7):
            night, before = times(night), night
            apart.add((night - before) / timedelta(hours=1))
    assert apart == hours


def at(text: str) -> float:
    return datetime.fromisoformat(f"2026-11-{text}:00+00:00").timestamp()


def night(begun: str, verdict: Verdict = Verdict.good) -> Night:
    """A night of the daily schedule."""
    return Night(night_id(at(begun)), at(begun), verdict)


@pytest.mark.parametrize(
    ("nights", "now", "expected"),
    [
        ([], "20T09:00", False),  # no night was missed before the first
        ([night("19T02:00")], "20T01:59", False),
        ([night("19T02:00")], "20T02:00", True),
        ([night("17T02:00")], "20T09:00", True),  # three were missed: one runs
        ([night("20T08:00")], "20T09:00", False),  # by --once, in the same night
        ([night("20T02:00", Verdict.incomplete)], "20T09:00", False),  # interrupted: the next one starts when it is due
        ([night("19T02:00"), night("28T02:00")], "20T09:00", True),  # a clock was wrong
        ([night("28T02:00")], "20T09:00", True),
    ],
)
def test_which_night_waits(nights: list[Night], now: str, expected: bool):
    assert is_due(nights, DAILY, datetime.fromtimestamp(at(now), UTC)) is expected


class Machine:
    """A machine whose clock runs ahead by each sleep, or by three days during the one after its first night.

    Attributes:
        begun: when each night began.
        status: that of each night; the third one is interrupted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
        self.now, self.begun, self.status = FRIDAY, list[datetime](), status
        self.commands = list[list[str]]()
        monkeypatch.setattr(command, "datetime", Mock(now=lambda zone: self.now))
        monkeypatch.setattr(command.time, "sleep", self.sleep)
        monkeypatch.setattr(command.subprocess, "Popen", self.run)

    def sleep(self, seconds: float) -> None:
        self.now += timedelta(days=3) if len(self.begun) == 1 else timedelta(seconds=seconds)

    def run(self, words: list[str], **options: object) -> Mock:
        self.begun.append(self.now)
        self.commands.append(words)
        interrupted = Mock(side_effect=[KeyboardInterrupt, 130])
        return Mock(wait=interrupted if len(self.begun) == 3 else Mock(return_value=self.status))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("status", [-9, 3])
def test_missed_nights_run_once_and_a_kill_ends_no_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, waits: bool
):
    """It sleeps for three days after its first night; of the three nights that it misses one is made up."""
    machine = Machine(monkeypatch, status)
    assert run_schedule(DAILY, ["precision=fp32"], waits) == 130, "interrupted during a night"
    first = FRIDAY if waits else datetime(2026, 11, 21, 2, tzinfo=UTC)
    woke = first + timedelta(days=3)
    assert machine.begun == [first, woke, datetime(2026, woke.month, woke.day + 1, 2, tzinfo=UTC)]
    assert machine.commands == [[sys.executable, "-m", "fsdp_lab.nightly", "--once", "precision=fp32"]] * 3
    assert ("the night was killed" in capsys.readouterr().out) is (status < 0)
