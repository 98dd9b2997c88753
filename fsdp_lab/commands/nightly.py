"""A study every night, compared with the good nights before.

python -m fsdp_lab.nightly                       on its schedule, in the foreground: for systemd or a container
python -m fsdp_lab.nightly --once                now: for cron, Slurm's scrontab, CI
python -m fsdp_lab.nightly --check               print what would run, and when; run nothing
python -m fsdp_lab.nightly --accept "reason"     make the last night the baseline

The other arguments are overrides of fsdp_lab; lists are axes. Without experiment=... the study is experiment=nightly.
Its own keys:
  nightly.cron           '0 2 * * *': minute hour day month weekday      nightly.timezone    null: this machine's
  nightly.repeats        trials of each setting (3)                      nightly.keep        nights with checkpoints
  nightly.tolerance.*    peak_memory, samples_per_s, loss: ratios; data_wait_share, forecast_error,
                         speed_forecast_error: differences
  nightly.significance   how often noise may pass for a regression of one setting and metric (0.005)
  nightly.folder         outputs/nightly
FSDP_LAB_WEBHOOK         an address in the environment that gets each verdict as JSON

Exits with 0: good; 1: nothing finished; 2: bad input; 3: a regression; 130: interrupted, the night is incomplete.
On its schedule it runs until it is stopped; SIGTERM between nights exits with 0.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from fsdp_lab.commands.explain import explain
from fsdp_lab.config import ConfigError
from fsdp_lab.config.launcher import leave_launcher
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.nightly.nights import Night, Verdict, read_nights
from fsdp_lab.nightly.read_study import Study, read_study
from fsdp_lab.nightly.run import accept, good_nights, log_dates, run_night
from fsdp_lab.nightly.schedule import NightTimes, cron_trigger, is_due, night_after, run_schedule
from fsdp_lab.nightly.texts import regressions_line
from fsdp_lab.storage.locks import holder, locked

_OPTIONS = ("--once", "--check", "--accept")
_NIGHTS_SHOWN = 3


def main() -> int:
    outlast_reader()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        leave_launcher()
        option, reason, overrides = read_words(words)
        study = read_study(overrides)
        times = cron_trigger(study.config.nightly.cron, study.config.nightly.timezone, datetime.now(UTC))
        if option == "--check":
            print_plan(study, times)
        elif option == "--accept":
            with locked(study.folder, "nightly.folder"):
                accept(study, reason, log)
        elif option == "--once":
            return run_once(study)
        else:
            return run_every_night(study, times, overrides)
        return 0
    except KeyboardInterrupt:
        print("fsdp_lab.nightly: ended")
        return 0
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"fsdp_lab.nightly: {message}", file=sys.stderr)
        return 2


def run_once(study: Study) -> int:
    """Run a night now, and return its exit status.

    Raises:
        InUse: another process is running a night.
    """
    try:
        with locked(study.folder, "nightly.folder"):
            return run_night(study, log)
    except KeyboardInterrupt:
        log("fsdp_lab.nightly: interrupted during a night, which stays incomplete; the next start runs another one")
        return 130


def run_every_night(study: Study, times: NightTimes, overrides: Sequence[str]) -> int:
    """Run nights on the schedule until this process is interrupted, and return the exit status."""
    nights = read_nights(study.folder)
    good_nights(study, nights)  # which checks now what a night would
    waits = not holder(study.folder / ".lock") and is_due(nights, times, datetime.now(UTC))
    status = run_schedule(times, overrides, waits, log)
    log("fsdp_lab.nightly: ended")
    return status


def read_words(words: list[str]) -> tuple[str | None, str, list[str]]:
    """Return the option, the reason of `--accept`, and the overrides.

    Raises:
        ConfigError: an unknown option, or more than one.
    """
    option, reason, overrides = None, "", []
    rest = iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        if not word.startswith("-") or name == "--config-dir":
            overrides.append(word)
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


def print_plan(study: Study, times: NightTimes) -> None:
    """Print what would run, when, and compared with what.

    Raises:
        UserError: the baseline is of another study.
    """
    nights, night = read_nights(study.folder), datetime.now(UTC)
    past = good_nights(study, nights)
    log_dates(nights, log)
    print(f"study:    {study.name}, in {study.folder}")
    shown = [word for word in study.arguments if not word.startswith("hydra.sweeper.params.")]  # null: no axis
    print(f"sweep:    {shlex.join(['python', '-m', 'fsdp_lab', '-m', *shown])}")
    print(f"baseline: {_named(past[-1]) if past else 'none yet: the first good night becomes it'}")
    if at_work := holder(study.folder / ".lock"):
        print(f"now:      a night runs here ({at_work})")
        nights = [night for night in nights if night.verdict is not Verdict.incomplete]
    if nights:
        print(f"last:     {_named(nights[-1], regressions_line(nights[-1]))}")
    for _ in range(_NIGHTS_SHOWN):
        night = night_after(times, night)
        print(f"night:    {night.astimezone():%Y-%m-%d %H:%M %Z}")


def log(text: str) -> None:
    print(text, flush=True)


def _named(night: Night, more: str = "") -> str:
    return f"{night.id} ({night.verdict}{f': {more}' if more else ''})"
