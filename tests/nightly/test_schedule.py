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

FRIDAY = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
DAILY = night_times("0 2 * * *", "UTC", FRIDAY)


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 4 * * *", "2026-11-21T04:30"),
        ("0 2 * * 0", "2026-11-22T02:00"),  # Sunday, as in cron
        ("0 2 * * 6,7", "2026-11-21T02:00"),
        ("0 2 * * 0-4", "2026-11-22T02:00"),  # Sunday to Thursday
        ("0 2 * * 1-5", "2026-11-23T02:00"),  # Monday to Friday
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
        ("0 2 * * */2", "UTC", "*/2 cannot be read"),  # APScheduler would ignore what follows
        ("0 2 * * *", "../x", "nightly.timezone=../x is not a time zone"),
    ],
)
def test_what_is_no_schedule_is_refused(cron: str, zone: str, message: str):
    with pytest.raises(ConfigError, match="nightly") as error:
        night_times(cron, zone, FRIDAY)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("Europe/Berlin", "02:30"),
        ("America/Santiago", "00:00"),  # midnight itself is skipped
        ("Australia/Lord_Howe", "01:59"),  # by half an hour
    ],
)
def test_every_date_has_one_night_when_the_clock_shows_it(zone: str, shown: str):
    """Of a year. Where clocks skip the time, the night is at what `zoneinfo` makes of it."""
    hour, minute = map(int, shown.split(":"))
    times, day = night_times(f"{minute} {hour} * * *", zone, FRIDAY), datetime(2026, 12, 31, hour, minute)
    night = day.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    for _ in range(365):
        day += timedelta(days=1)
        night = times(night)
        assert night == day.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC), (day, night)


def test_hourly_nights_are_an_hour_apart_while_clocks_change():
    """In the weeks around both changes of 2027."""
    for cron, zone, hours in (
        ("20 * * * *", "Europe/Berlin", {1.0}), ("20 */1 * * *", "Australia/Lord_Howe", {0.5, 1.0, 1.5}),
    ):  # fmt: skip
        times, apart = night_times(cron, zone, FRIDAY), set()
        for month, day in ((3, 25), (4, 1), (9, 30), (10, 28)):
            begun = night = times(datetime(2027, month, day, tzinfo=UTC))
            while night < begun + timedelta(days=7):
                night, before = times(night), night
                apart.add((night - before) / timedelta(hours=1))
        assert apart == hours


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-{text}:00+00:00")


def night(begun: str, verdict: Verdict = Verdict.good) -> Night:
    """A night of the daily schedule."""
    return Night(begun, at(begun).timestamp(), verdict)


@pytest.mark.parametrize(
    ("nights", "now", "expected"),
    [
        ([], "20T09:00", False),  # no night was missed before the first
        ([night("19T02:00")], "20T01:59", False),
        ([night("19T02:00")], "20T02:00", True),
        ([night("20T08:00")], "20T09:00", False),  # by --once, in the same night
        ([night("20T02:00", Verdict.incomplete)], "20T09:00", False),  # interrupted: the next one starts when it is due
        ([night("28T02:00")], "20T09:00", True),  # a clock was wrong
    ],
)
def test_which_night_waits(nights: list[Night], now: str, expected: bool):
    assert is_due(nights, DAILY, at(now)) is expected


@pytest.mark.parametrize(("status", "waits"), [(-9, True), (3, False)])
def test_missed_nights_run_once_and_a_kill_ends_no_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, waits: bool
):
    """It sleeps for three days after its first night; of the three nights that it misses one is made up. Each ends
    with a status, but the third one, which is interrupted."""
    now, begun = FRIDAY, list[datetime]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += timedelta(days=3) if len(begun) == 1 else timedelta(seconds=seconds)

    def run(words: list[str], start_new_session: bool) -> Mock:
        assert words == [sys.executable, "-m", "fsdp_lab.nightly", "--once", "precision=fp32"]
        begun.append(now)
        return Mock(wait=Mock(side_effect=[KeyboardInterrupt, 130] if len(begun) == 3 else [status]))

    monkeypatch.setattr(command, "datetime", Mock(now=lambda zone: now))
    monkeypatch.setattr(command.time, "sleep", sleep)
    monkeypatch.setattr(command.subprocess, "Popen", run)
    assert run_schedule(DAILY, ["precision=fp32"], waits) == 130, "interrupted during a night"
    first = FRIDAY if waits else datetime(2026, 11, 21, 2, tzinfo=UTC)
    woke = first + timedelta(days=3)
    assert begun == [first, woke, datetime(2026, woke.month, woke.day + 1, 2, tzinfo=UTC)]
    assert ("the night was killed" in capsys.readouterr().out) is (status < 0)


@pytest.mark.parametrize(("words", "status"), [(["--judge"], 130), (["--check"], 130), ([], 0)])
def test_what_was_asked_once_and_interrupted_is_not_done(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch
):
    """The mock stands for Ctrl-C while the study is read."""
    monkeypatch.setattr(sys, "argv", ["nightly", *words])
    monkeypatch.setattr(command, "read_study", Mock(side_effect=KeyboardInterrupt))
    assert command.main() == status
