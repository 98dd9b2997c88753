"""What cron means, which night waits, and the scheduler that starts them."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import ClassVar
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
        ("0 2 * * 5-7", "2026-11-21T02:00"),  # Friday to Sunday
        ("0 2 * * mon-fri", "2026-11-23T02:00"),
        ("0 2 * * MON", "2026-11-23T02:00"),
        ("0 2 * jan-jun *", "2027-01-01T02:00"),
        ("0 2 1 * *", "2026-12-01T02:00"),
        ("*/15 * * * *", "2026-11-20T12:15"),
    ],
)
def test_cron_means_what_it_means_to_cron(cron: str, expected: str):
    assert night_times(cron, "UTC", FRIDAY)(FRIDAY) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


def test_the_zone_decides_also_where_an_hour_does_not_exist_or_comes_twice():
    berlin = night_times("30 2 * * *", "Europe/Berlin", FRIDAY)
    summer, winter = (berlin(datetime(2026, month, 7, 12, tzinfo=UTC)) for month in (10, 11))
    assert (summer.hour, winter.hour) == (0, 1)
    spring = berlin(datetime(2026, 3, 28, 12, tzinfo=UTC))  # 02:30 does not exist there on the 29th
    assert spring == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    assert berlin(spring) == datetime(2026, 3, 30, 0, 30, tzinfo=UTC)
    once = [datetime(2026, 10, 24, 12, tzinfo=UTC)]
    for _ in range(2):
        once.append(berlin(once[-1]))
    assert [f"{night:%d %H:%M}" for night in once[1:]] == ["25 00:30", "26 01:30"], "the first of two"


ZONES = (
    "Europe/Berlin", "America/New_York", "Australia/Sydney", "UTC", "Asia/Kolkata",
    "America/Santiago", "Africa/Cairo", "Asia/Beirut",  # there midnight itself is skipped
    "Australia/Lord_Howe", "Antarctica/Troll",  # half an hour, and two hours
)  # fmt: skip


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("shown", ["00:00", "00:30", "01:59", "02:15", "23:59"])
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
    ("zone", "hours"),
    [("Europe/Berlin", {1.0}), ("Africa/Cairo", {1.0}), ("Australia/Lord_Howe", {0.5, 1.0, 1.5})],
)
@pytest.mark.parametrize("cron", ["20 * * * *", "20 */1 * * *", "20 0-23 * * *"])
def test_nights_of_every_hour_are_an_hour_apart_while_clocks_change(zone: str, hours: set[float], cron: str):
    times, night = night_times(cron, zone, FRIDAY), datetime(2027, 3, 20, tzinfo=UTC)
    night, apart = times(night), set()
    while night < datetime(2027, 11, 10, tzinfo=UTC):
        night, before = times(night), night
        apart.add((night - before) / timedelta(hours=1))
    assert apart == hours


@pytest.mark.parametrize("value", ["Foo/Bar", "CET-1CEST"])
def test_a_machine_without_a_zone_by_name_is_refused(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("TZ", value)
    with pytest.raises(ConfigError, match=r"nightly\.timezone=null: .*use a name such as Europe/Berlin"):
        night_times("0 2 * * *", None, FRIDAY)
    assert night_times("0 2 * * *", "Europe/Berlin", FRIDAY)(FRIDAY).hour == 1


@pytest.mark.parametrize(
    ("cron", "zone", "message"),
    [
        ("0 0 30 2 *", "UTC", "never runs"),
        ("0 2 * *", "UTC", "got 4, expected 5"),
        ("nightly", "UTC", "got 1, expected 5"),
        ("", "UTC", "expected 5"),
        ("0 2 1 * 1", "UTC", "a day of the month and a weekday cannot be combined"),
        ("0 2 * * */2", "UTC", "nightly.cron='0 2 * * */2'"),
        ("61 2 * * *", "UTC", "61"),
        ("0 2 * * 1-5/2", "UTC", "1-5/2 cannot be read"),
        ("0 2 * * */2", "UTC", "*/2 cannot be read"),
        ("0 2 * * 1-0", "UTC", "1-0 cannot be read"),
        ("0 2 * * mon-0", "UTC", "mon-0 cannot be read"),
        ("0 2 * * mon-", "UTC", "mon- cannot be read"),
        ("0 2 1 jan- *", "UTC", "jan- cannot be read"),
        ("0 2 last * *", "UTC", "last cannot be read"),
        ("0 2 * * 5-2", "UTC", "higher than the maximum"),
        ("0 2 * * 5-2 5", "UTC", "got 6, expected 5"),
        ("0 2 1 jan-jun/2 *", "UTC", "jan-jun/2 cannot be read"),
        ("0 2 * * 8", "UTC", "nightly.cron='0 2 * * 8'"),
        ("x 2 * * *", "UTC", "nightly.cron='x 2 * * *'"),
        ("0 2 * * *", "Mars/Base", "nightly.timezone=Mars/Base is not a time zone"),
        ("0 2 * * *", "../x", "nightly.timezone=../x is not a time zone"),
    ],
)
def test_what_is_no_schedule_is_reported(cron: str, zone: str, message: str):
    with pytest.raises(ConfigError, match="nightly") as error:
        night_times(cron, zone, FRIDAY)
    assert message in str(error.value)


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
        ([night("19T02:00", Verdict.incomplete)], "20T09:00", True),
        ([night("19T02:00"), night("28T02:00")], "20T09:00", True),  # a clock was wrong
        ([night("20T02:00"), night("28T02:00")], "20T09:00", False),
        ([night("28T02:00")], "20T09:00", True),
    ],
)
def test_which_night_waits(nights: list[Night], now: str, expected: bool):
    assert is_due(nights, DAILY, datetime.fromtimestamp(at(now), UTC)) is expected


class Interrupted:
    """The process of a night that runs until the schedule is interrupted."""

    commands: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str], **options: object) -> None:
        self.commands.append(command)
        self._ended = False

    def wait(self) -> int:
        if not self._ended:
            raise KeyboardInterrupt
        return 130

    def terminate(self) -> None:
        self._ended = True


@pytest.mark.parametrize("waits", [True, False])
def test_a_night_that_was_missed_runs_once_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], waits: bool
):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    Interrupted.commands.clear()
    monkeypatch.setattr(command.subprocess, "Popen", Interrupted)
    monkeypatch.setattr(command.time, "sleep", interrupt)
    assert run_schedule(DAILY, ["precision=fp32"], waits) == (130 if waits else 0)
    assert Interrupted.commands == [[sys.executable, "-m", "fsdp_lab.nightly", "--once", "precision=fp32"]] * waits
    assert capsys.readouterr().out.startswith("the next night is ")


@pytest.mark.parametrize(("status", "was_killed"), [(-9, True), (3, False)])
def test_a_night_that_was_killed_is_named_and_leaves_the_next_one_to_the_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, was_killed: bool
):
    """A clock that runs ahead by each sleep. The machine then sleeps for three days, of which one night is made up."""
    now = [FRIDAY]
    begun: list[datetime] = []

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return now[0]

    def sleep(seconds: float) -> None:
        now[0] += timedelta(days=3) if len(begun) == 1 else timedelta(seconds=seconds)

    def run(*_: object, **__: object) -> object:
        begun.append(now[0])
        if len(begun) == 3:
            raise KeyboardInterrupt
        return SimpleNamespace(wait=lambda: status)

    monkeypatch.setattr(command, "datetime", Clock)
    monkeypatch.setattr(command.time, "sleep", sleep)
    monkeypatch.setattr(command.subprocess, "Popen", run)
    assert run_schedule(DAILY, [], False) == 0
    first = datetime(2026, 11, 21, 2, tzinfo=UTC)
    assert begun == [first, first + timedelta(days=3), first + timedelta(days=4)]
    out = capsys.readouterr().out
    assert ("the night was killed, and is incomplete" in out) is was_killed and out.count("the next night is ") == 3
