"""The clock, the schedule, what was missed and what overlaps, with a clock that a test sets."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.locks import InUse
from fsdp_lab.nightly.loop import due_now, due_unfinished, loop
from fsdp_lab.nightly.nights import GOOD, LEFT, Night, night_id
from fsdp_lab.nightly.schedule import Schedule
from tests.nightly.conftest import FakeClock

FRIDAY = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
DAILY = Schedule("0 2 * * *", "UTC", FRIDAY)


def at(text: str) -> float:
    return datetime.fromisoformat(f"2026-11-{text}:00+00:00").timestamp()


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
    night = Schedule(cron, "UTC", FRIDAY).after(FRIDAY)
    assert night == datetime.fromisoformat(expected).replace(tzinfo=UTC)


def test_the_zone_decides_and_the_hour_that_comes_twice_counts_once():
    berlin = Schedule("30 2 * * *", "Europe/Berlin", FRIDAY)
    nights, moment = [], datetime(2026, 10, 24, 12, tzinfo=UTC)
    for _ in range(3):
        moment = berlin.after(moment)
        nights.append(moment.astimezone(ZoneInfo("Europe/Berlin")).strftime("%d %H:%M %z"))
    assert nights == ["25 02:30 +0200", "26 02:30 +0100", "27 02:30 +0100"]
    spring = berlin.after(datetime(2026, 3, 28, 12, tzinfo=UTC))  # 02:30 does not exist there on the 29th
    assert spring == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    assert berlin.after(spring) == datetime(2026, 3, 30, 0, 30, tzinfo=UTC)


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
        Schedule(cron, zone, FRIDAY)
    assert message in str(error.value)


def night(due: str, verdict: str = GOOD, begun: str | None = None) -> Night:
    return Night(night_id(at(due)), at(due), at(begun or due), verdict=verdict)


@pytest.mark.parametrize(
    ("nights", "now", "late_s", "expected"),
    [
        ([], "19T01:00", None, None),  # none came since the first start
        ([], "19T02:00", None, "19T02:00"),
        ([], "20T09:00", None, "20T02:00"),  # two were missed: the latest, once
        ([], "20T09:00", 3600.0, None),  # too late for it
        ([night("20T02:00")], "20T09:00", None, None),
        ([night("20T02:00", LEFT)], "20T09:00", None, None),
        ([night("20T02:00", "running")], "20T09:00", None, "20T02:00"),  # interrupted: goes on
        ([night("20T02:00", "running")], "20T09:00", 60.0, "20T02:00"),  # and is never too late
        ([night("19T02:00", "running")], "20T09:00", None, "20T02:00"),  # another night by now
        ([night("20T08:00")], "20T09:00", None, None),  # by --once, in the same night
        ([night("20T08:00", "running")], "20T09:00", None, "20T08:00"),  # and interrupted: it goes on
    ],
)
def test_what_is_due(nights: list[Night], now: str, late_s: float | None, expected: str | None):
    result = due_now(DAILY, nights, at("19T01:30"), at(now), late_s)
    assert result == (at(expected) if expected else None)


def test_what_was_interrupted_goes_on_in_the_same_night_only():
    begun = night("20T08:00", "running")
    assert due_unfinished(DAILY, [begun], at("20T09:00")) == at("20T08:00")
    assert due_unfinished(DAILY, [begun], at("21T09:00")) is None
    assert due_unfinished(DAILY, [night("20T08:00")], at("20T09:00")) is None


def test_a_schedule_goes_on_with_what_once_began_before_there_was_one():
    assert due_now(DAILY, [night("20T08:00", "running")], at("20T08:30"), at("20T09:00"), 0.0) == at("20T08:00")
    assert due_now(DAILY, [night("20T08:00")], at("20T08:30"), at("20T09:00"), 0.0) is None


def run_loop(clock: FakeClock, takes: Callable[[float], float], count: int, **options: float) -> list[tuple[str, str]]:
    """`(due, begun)` of each night; `takes` says how long the one that was due then takes."""
    nights: list[Night] = []

    def run(due: float) -> int:
        nights.append(Night(night_id(clock.now()), due, clock.now(), verdict=GOOD))
        clock.time += takes(due)
        return 0

    loop(DAILY, lambda: nights, run, clock.now(), clock, lambda text: None, nights=count, **options)
    return [
        tuple(datetime.fromtimestamp(t, UTC).strftime("%dT%H:%M") for t in (n.due, n.begun))  # type: ignore[misc]
        for n in nights
    ]


def test_a_night_begins_at_its_time_and_none_twice():
    assert run_loop(FakeClock(at("20T12:00")), lambda due: 600.0, 3) == [
        ("21T02:00", "21T02:00"), ("22T02:00", "22T02:00"), ("23T02:00", "23T02:00"),
    ]  # fmt: skip


def test_a_night_that_takes_longer_than_a_day_is_followed_by_one_not_by_all_it_missed():
    took = run_loop(FakeClock(at("20T12:00")), lambda due: 60 * 3600.0 if due == at("21T02:00") else 600.0, 3)
    assert took == [("21T02:00", "21T02:00"), ("23T02:00", "23T14:00"), ("24T02:00", "24T02:00")]


def test_a_machine_that_slept_through_its_nights_runs_the_last_of_them_once():
    clock = FakeClock(at("20T12:00"))
    clock.jump = 50 * 3600.0
    assert run_loop(clock, lambda due: 600.0, 2) == [("22T02:00", "22T14:00"), ("23T02:00", "23T02:00")]
    late = FakeClock(at("20T12:00"))
    late.jump = 50 * 3600.0
    assert run_loop(late, lambda due: 600.0, 1, late_s=3600.0) == [("23T02:00", "23T02:00")]


def test_jitter_delays_the_start_within_its_limit():
    begun = [run_loop(FakeClock(at("20T12:00")), lambda due: 60.0, 1, jitter_s=1800.0)[0] for _ in range(20)]
    assert {due for due, _ in begun} == {"21T02:00"}
    assert len({start for _, start in begun}) > 1
    assert all("21T02:00" <= start <= "21T02:30" for _, start in begun)


def test_what_was_waited_for_is_never_too_late():
    clock = FakeClock(at("20T12:00"))
    assert len(run_loop(clock, lambda due: 60.0, 5, late_s=0.0, jitter_s=1800.0)) == 5
    assert clock.now() < at("26T00:00")  # five nights in a row


def test_a_night_that_cannot_be_run_is_tried_again_and_does_not_end_the_schedule():
    clock, logged, tries = FakeClock(at("20T12:00")), [], []

    def run(due: float) -> int:
        tries.append(clock.now())
        raise OSError(28, "No space left on device") if len(tries) == 1 else UserError("mend it")

    loop(DAILY, list, run, clock.now(), clock, logged.append, nights=2)
    assert [t - tries[0] for t in tries] == [0, 600.0]
    assert "No space left" in logged[1] and "was missed or interrupted" in logged[2] and "mend it" in logged[3]


def test_nights_that_cannot_be_read_are_read_again_and_do_not_end_the_schedule():
    clock, logged, reads, ran = FakeClock(at("21T02:00")), [], [], []

    def read() -> list[Night]:
        reads.append(clock.now())
        if len(reads) < 3:
            raise UserError("the store does not answer")
        return []

    loop(DAILY, read, lambda due: ran.append(due) or 0, at("20T12:00"), clock, logged.append, nights=1)
    assert [t - reads[0] for t in reads] == [0, 600.0, 1200.0] and ran == [at("21T02:00")]
    assert logged[:2] == ["the nights could not be read: the store does not answer; next attempt in 600 s"] * 2


def test_while_another_start_is_at_work_no_second_night_begins():
    clock, nights, tries = FakeClock(at("21T01:59")), [], []

    def run(due: float) -> int:
        tries.append(due)
        if nights:
            return 0
        nights.append(night("21T02:00"))  # the other's; it ends while we wait
        raise InUse("nightly.folder is in use by another sweep or run")

    loop(DAILY, lambda: nights, run, clock.now(), clock, lambda text: None, nights=2)
    assert tries == [at("21T02:00"), at("22T02:00")]


def test_a_clock_that_is_set_back_does_not_run_the_night_again():
    done = [night("20T02:00")]
    assert due_now(DAILY, done, at("19T01:30"), at("20T02:00") - 600, None) is None
    assert due_now(DAILY, done, at("19T01:30"), at("20T02:00") + timedelta(minutes=1).seconds, None) is None
