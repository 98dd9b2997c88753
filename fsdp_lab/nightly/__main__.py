"""A study every night, compared with the last good one.

python -m fsdp_lab.nightly                       on its schedule, in the foreground: for systemd or a container
python -m fsdp_lab.nightly --once                now: for cron, Slurm's scrontab, CI
python -m fsdp_lab.nightly --continue            only the rest of an interrupted night, if there is one
python -m fsdp_lab.nightly --check               print what would run, and when; run nothing
python -m fsdp_lab.nightly --accept "reason"     make the last night the baseline

The other arguments are overrides of fsdp_lab; lists are axes. Without experiment=... the study is experiment=nightly.
Its own keys:
  nightly.cron           '0 2 * * *': minute hour day month weekday      nightly.timezone    null: this machine's
  nightly.repeats        trials of each setting (3)                      nightly.jitter_s    largest random delay
  nightly.tolerance.*    peak_memory, samples_per_s, loss: ratios; forecast_error, speed_forecast_error: differences
  nightly.significance   how often noise may pass for a regression of one setting and metric (0.005)
  nightly.others_cpu     on a CPU, judge no speed in a night in which other processes used more than this share (0.25)
  nightly.baseline       a night's name; null: the last good one         nightly.late_s      how late a missed one is
  nightly.folder         outputs/nightly                                 nightly.keep        nights with checkpoints
  nightly.notify.url     gets the verdict as JSON                        nightly.notify.timeout_s

Exits with 0: good; 1: nothing finished; 2: bad input; 3: a regression; 130: interrupted, and the next start resumes it.
On its schedule it runs until it is stopped; SIGTERM between nights exits with 0.
"""

from __future__ import annotations

import fsdp_lab.installed  # noqa: F401

# isort: split
import shlex
import signal
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.explain import explain
from fsdp_lab.locks import InUse, holder, locked
from fsdp_lab.nightly.loop import WallClock, due_unfinished, loop
from fsdp_lab.nightly.night import accept, run_night
from fsdp_lab.nightly.nights import Night, read_nights, read_since
from fsdp_lab.nightly.read_study import read_study
from fsdp_lab.nightly.schedule import Schedule
from fsdp_lab.nightly.shared import read_all
from fsdp_lab.nightly.study import Study
from fsdp_lab.nightly.submit import is_for_manager, submit_night
from fsdp_lab.nightly.verdict import baseline_of, differences
from fsdp_lab.redact import redact

_OPTIONS = ("--once", "--continue", "--check", "--accept")
_NIGHTS_SHOWN = 3


def main() -> int:
    """Run what the command line says, and return the exit status."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    running = False
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        option, reason, overrides = read_words(words)
        study = read_study(overrides)
        now = datetime.now(UTC)
        schedule = Schedule(study.nightly.cron, study.nightly.timezone, now)
        if option == "--check":
            print_plan(study, schedule, now)
            return 0
        if option == "--accept":
            with locked(study.folder, "nightly.folder"):
                accept(study, reason, log)
            return 0
        if is_for_manager(study):
            return submit_night(study, option, overrides)
        running = True
        if option in ("--once", "--continue"):
            return run_once(study, schedule, only_resume=option == "--continue")
        with locked(study.folder, "nightly.folder", ".schedule"):
            nightly = study.nightly
            baseline_of(study, read_all(study))  # now, not in the night
            since = read_since(study.folder, time.time())
            loop(
                schedule, lambda: nights_of(study), lambda due: run_locked(study, due), since, WallClock(),
                log, nightly.jitter_s, nightly.late_s,
            )  # fmt: skip
            return 0
    except KeyboardInterrupt:
        unfinished = running and is_unfinished_here(study, schedule)
        until = f"{schedule.after(datetime.now(UTC)).astimezone():%Y-%m-%d %H:%M %Z}" if unfinished else ""
        how = f"interrupted during a night; to resume it, start again before {until}, or: {study.resume_command}"
        print(f"fsdp_lab.nightly: {how if unfinished else 'ended'}")
        return 130 if unfinished else 0
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"fsdp_lab.nightly: {message}", file=sys.stderr)
        return 2


def nights_of(study: Study) -> list[Night]:
    """Return all nights, except interrupted ones of another study, which will not be resumed."""
    return _of_study(study, read_all(study))


def is_unfinished_here(study: Study, schedule: Schedule) -> bool:
    """Return whether an interrupted night is left to resume.

    Does not ask the store: a store that is away may be the reason for the interrupt.
    """
    with suppress(UserError):  # a damaged file, which the next start tells
        return due_unfinished(schedule, _of_study(study, read_nights(study.folder)), time.time()) is not None
    return False


def _of_study(study: Study, nights: list[Night]) -> list[Night]:
    return [night for night in nights if night.over or night.study == study.settings]


def run_locked(study: Study, due: float) -> int:
    """Run a night while no other process works in the study's folder, and return its exit status."""
    with locked(study.folder, "nightly.folder"):
        return run_night(study, due, log)


def run_once(study: Study, schedule: Schedule, only_resume: bool) -> int:
    """Run a night now, or the rest of the interrupted one, and return its exit status.

    With `only_resume` it does nothing if no night was interrupted, or if one is running.

    Raises:
        InUse: another process is running a night.
    """
    try:
        with locked(study.folder, "nightly.folder"):
            begun = due_unfinished(schedule, nights_of(study), time.time())
            if only_resume and begun is None:
                log("no night was interrupted")
                return 0
            return run_night(study, time.time() if begun is None else begun, log)
    except InUse as error:
        if not only_resume:
            raise
        log(f"fsdp_lab.nightly: {error}")
        return 0


def read_words(words: list[str]) -> tuple[str | None, str, list[str]]:
    """Return the option, the reason of `--accept`, and the overrides.

    Raises:
        ConfigError: an unknown option, or more than one.
    """
    option, reason, overrides = None, "", []
    rest = iter(words)
    for word in rest:
        name, has_value, value = word.partition("=")
        if not word.startswith("-") or name == "--config-dir":
            overrides.append(word if not word.startswith("-") or has_value else f"{word}={next(rest, '')}")
            continue
        if name not in _OPTIONS:
            raise ConfigError(f"{word} is not an option here; the options are {', '.join(_OPTIONS)} and --help.")
        if option is not None:
            raise ConfigError(f"{option} and {name} cannot be combined; give one.")
        option = name
        if name == "--accept":
            reason = value or next(rest, "")
            if not reason.strip() or "=" in reason.partition(" ")[0]:
                raise ConfigError('--accept takes a reason, which is recorded: --accept "the new model is larger".')
    return option, reason, overrides


def print_plan(study: Study, schedule: Schedule, now: datetime) -> None:
    """Print what would run, when, and compared with what.

    Raises:
        UserError: there is no such baseline, or it is of another study.
    """
    baseline = baseline_of(study, read_all(study))
    print(f"study:    {study.name}, in {study.where}")
    shown = [word for word in study.arguments if not word.startswith("hydra.sweeper.params.")]  # null: no axis
    print(f"sweep:    {redact(shlex.join(['python', '-m', 'fsdp_lab', '-m', *shown]))}")
    text = f"{baseline.id} ({baseline.verdict})" if baseline else "none yet: the first good night becomes it"
    busy = ", except its speeds: other processes used the machine" if baseline and baseline.busy else ""
    print(f"baseline: {text}{busy}")
    if over := [night for night in read_all(study) if night.over]:
        bad = [finding for finding in over[-1].findings if finding["regression"]]
        first = "".join(": {setting}: {metric} {change}".format(**finding) for finding in bad[:1])
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        print(f"last:     {over[-1].id} ({over[-1].verdict}{first}{more})")
        if others := differences(study, over[-1]):
            print(f"          of another study than this one: {'; '.join(others[:5])}")
    at_work = holder(study.folder / ".lock")
    if at_work:
        print(f"now:      a night runs here ({at_work})")
    elif due_unfinished(schedule, nights_of(study), now.timestamp()) is not None:
        until = f"{schedule.after(now).astimezone():%Y-%m-%d %H:%M %Z}"
        print(f"waits:    a night was interrupted; to resume it before {until}: {study.resume_command}")
    night = now
    for _ in range(_NIGHTS_SHOWN):
        night = schedule.after(night)
        here = night.astimezone()
        print(f"night:    {here:%Y-%m-%d %H:%M %Z}{f' ({night:%H:%M} UTC)' if here.utcoffset() else ''}")


def log(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
