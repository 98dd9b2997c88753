"""A study every night, compared with the good nights before.

python -m fsdp_lab.nightly                       on its schedule, in the foreground: for systemd or a container
python -m fsdp_lab.nightly --once                now: for cron, Slurm's scrontab, CI
python -m fsdp_lab.nightly --check               print what would run, and when; run nothing
python -m fsdp_lab.nightly --accept "reason"     make the last night the baseline
python -m fsdp_lab.nightly --judge               judge the last night, if its verdict was not written

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
On its schedule it runs until it is stopped; SIGTERM or SIGHUP between nights exits with 0.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler.triggers.cron import CronTrigger
from tzlocal import get_localzone

from fsdp_lab.commands.messages import explain
from fsdp_lab.config import (
    ConfigError,
    NightlyConfig,
    all_keys,
    settings,
    split_config_dir,
    with_custom,
    workers_of,
)
from fsdp_lab.config.checks import check
from fsdp_lab.config.compare import NIGHTS
from fsdp_lab.config.compose import group_choices, nightly_config
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.launcher import leave_launcher
from fsdp_lab.config.machine import cpus_per_worker_of, loader_workers_of
from fsdp_lab.config.overrides import read_overrides, search_path
from fsdp_lab.config.words import key_of, with_environment
from fsdp_lab.machine.hardware import num_gpus
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.machine.signals import on_end
from fsdp_lab.nightly.gate import Night, Verdict
from fsdp_lab.nightly.night import Study, accept, good_nights, judge_night, log, log_dates, read_nights, run_night
from fsdp_lab.nightly.texts import regressions_line
from fsdp_lab.storage.locks import holder, locked
from fsdp_lab.sweep.grid import all_overrides, composer, discrete_values

NightTimes = Callable[[datetime], datetime]  # returns the first night after a time, in UTC

_OPTIONS = ("--once", "--check", "--accept", "--judge")
_NIGHTS_SHOWN = 3
_LOOK_S = 60.0  # clocks are set, and machines sleep
_LARGEST_CHANGE = timedelta(hours=3)  # by which a clock is set forward or back
_EVERY_HOUR = ("*", "*/1", "0-23")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")  # cron's numbers; APScheduler's start on Monday
_NUMBER_OR_NAME = re.compile(r"(\*|\d+(-\d+)?)(/\d+)?|[a-z]{3}(-[a-z]{3})?")
_WEEKDAY = re.compile(r"\*|[0-7](-[1-7])?|[a-z]{3}(-[a-z]{3})?")
_NOT_HERE = {  # keys that a night sets itself
    **{key: "a night always trains anew" for key in all_keys() if key.startswith("resume")},
    "dry_run": "it lists the trials of python -m fsdp_lab",
    **dict.fromkeys(("repeat", "repeats"), "nightly.repeats=3 sets how often a night trains each setting"),
}


def main() -> int:
    outlast_reader()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(docstring(sys.modules[__name__]))
        return 0
    try:
        on_end(signal.default_int_handler)  # as Ctrl-C
        leave_launcher()
        option, reason, overrides = read_words(words)
        study = read_study(overrides)
        times = night_times(study.config.nightly.cron, study.config.nightly.timezone, datetime.now(UTC))
        if option == "--check":
            print_plan(study, times)
        elif option == "--accept":
            with locked(study.folder, "nightly.folder"):
                accept(study, reason)
        elif option == "--judge":
            with locked(study.folder, "nightly.folder"):
                return judge_night(study)
        elif option == "--once":
            return run_once(study)
        else:
            return run_every_night(study, times, overrides)
        return 0
    except KeyboardInterrupt:
        print("fsdp_lab.nightly: ended")
        return 130 if set(words) & set(_OPTIONS) else 0
    except Exception as error:
        message = explain(error, "nightly.folder")
        if message is None:
            raise
        print(f"fsdp_lab.nightly: {message}", file=sys.stderr)
        return 2


def run_once(study: Study) -> int:
    """Run a night now, and return its exit status. Raises InUse if another process runs one."""
    try:
        with locked(study.folder, "nightly.folder"):
            return run_night(study)
    except KeyboardInterrupt:
        log("fsdp_lab.nightly: interrupted during a night, which stays incomplete; the next start runs another one")
        return 130


def run_every_night(study: Study, times: NightTimes, overrides: Sequence[str]) -> int:
    """Run nights on the schedule until this process is interrupted, and return the exit status."""
    nights = read_nights(study.folder)
    good_nights(study, nights)  # which checks now what a night would
    waits = not holder(study.folder / ".lock") and is_due(nights, times, datetime.now(UTC))
    status = run_schedule(times, overrides, waits)
    log("fsdp_lab.nightly: ended")
    return status


def read_words(words: list[str]) -> tuple[str | None, str, list[str]]:
    """Return the option, the reason of `--accept`, and the overrides.

    Raises:
        ConfigError: an unknown option, more than one, or no reason.
    """
    options = [word for word in words if word.startswith("-") and word.partition("=")[0] != "--config-dir"]
    if wrong := [word for word in options if word not in _OPTIONS]:
        raise ConfigError(f"{wrong[0]} is not an option here; the options are {', '.join(_OPTIONS)} and --help.")
    if len(options) > 1:
        raise ConfigError(f"{' and '.join(options)} cannot be combined; give one.")
    if options != ["--accept"]:
        return next(iter(options), None), "", [word for word in words if word not in options]
    before, after = words[: words.index("--accept")], words[words.index("--accept") + 1 :]
    if not after or not after[0].strip() or "=" in after[0].partition(" ")[0]:
        raise ConfigError('--accept takes a reason, which is recorded: --accept "the new model is larger".')
    return "--accept", after[0], [*before, *after[1:]]


def print_plan(study: Study, times: NightTimes) -> None:
    """Print what would run, when, and compared with what.

    Raises:
        UserError: the baseline is of another study.
    """
    nights, night = read_nights(study.folder), datetime.now(UTC)
    past = good_nights(study, nights)
    log_dates(nights)
    print(f"study:    {study.name}, in {study.folder}")
    shown = [word for word in study.arguments if not word.startswith("hydra.sweeper.params.")]  # null is no axis
    print(f"sweep:    {shlex.join(['python', '-m', 'fsdp_lab', '-m', *shown])}")
    print(f"baseline: {_named(past[-1]) if past else 'none yet: the first good night becomes it'}")
    if at_work := holder(study.folder / ".lock"):
        print(f"now:      a night runs here ({at_work})")
        nights = [night for night in nights if night.verdict is not Verdict.incomplete]
    if nights:
        print(f"last:     {_named(nights[-1], regressions_line(nights[-1]))}")
    for _ in range(_NIGHTS_SHOWN):
        night = times(night)
        print(f"night:    {night.astimezone():%Y-%m-%d %H:%M %Z}")


def _named(night: Night, more: str = "") -> str:
    return f"{night.id} ({night.verdict}{f': {more}' if more else ''})"


def read_study(overrides: list[str]) -> Study:
    """Return the study of these overrides.

    Raises:
        Exception: Hydra or the checks refuse them.
    """
    config_dir, overrides = split_config_dir(overrides)
    search_words = search_path(config_dir)
    overrides = with_environment(with_custom(read_overrides(overrides, config_dir)), config_dir)
    for word in overrides:
        if reason := _NOT_HERE.get(key_of(word)):
            raise ConfigError(f"{word}: {reason}; leave it out.")
    if not any(word.startswith("experiment=") for word in overrides):
        overrides = ["experiment=nightly", *overrides]
    with composer(overrides, search_words) as hydra:
        every = all_overrides(hydra.parser, hydra.defaults, overrides)
        axes = {key: discrete_values(override) for key, override in every.items()}
        own = [key for key, values in axes.items() if key.lstrip("+").startswith("nightly.") and len(values) > 1]
        if own:
            raise ConfigError(
                f"{own[0]} has several values, but takes one; quote a value with a comma: \"{own[0]}='0 2,14 * * *'\"."
            )
        first = hydra.compose([values[0] for values in axes.values()])
    name = group_choices(first).get("experiment", "nightly")
    config = nightly_config(first)
    check(config)
    chooses = {
        f"search={config.search.name}": config.search.samples,
        f"scheduler={config.scheduler.name}": config.scheduler.stops_early,
        f"forecast.keep={config.forecast.keep}": config.forecast.keep is not None,
        "forecast.prune=true": config.forecast.prune,
    }
    if chosen := [word for word, used in chooses.items() if used]:
        raise ConfigError(
            f"{chosen[0]}: a night runs every setting of its study to its end, because other settings than the "
            "night before are no regression; leave it out."
        )
    code = [f"--config-dir={config_dir}"] if config_dir is not None else []
    numbers = ",".join(map(str, range(config.nightly.repeats)))
    return Study(
        name,
        Path(config.nightly.folder) / name,
        config,
        [*code, *([f"repeat={numbers}"] if config.nightly.repeats > 1 else []), *_axes(hydra.defaults, overrides)],
        _settings(config, axes),
    )


def _settings(config: NightlyConfig, axes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what nights must have in common to be compared."""
    swept = {key.lstrip("+") for key, values in axes.items() if len(values) > 1}
    judged = {
        key: value
        for key, value in settings(config, NIGHTS).items()
        if key.partition(".")[0] not in swept and key not in swept
    }
    if "data.loader_workers" in judged:  # resolved: the meaning of null changes what is measured
        judged["data.loader_workers"] = loader_workers_of(config)
    if "cluster.cpus_per_worker" not in swept:
        judged["cluster.cpus_per_worker"] = cpus_per_worker_of(config.cluster)
    judged |= {"workers": workers_of(config), "device": "cuda" if num_gpus() else "cpu"}
    return judged | {f"axis {key}": ",".join(v.partition("=")[2] for v in axes[key]) for key in sorted(swept)}


def _axes(defaults: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return the arguments for the axes, in the order of the words.

    They name the default axes, too, so that the repeats come first and are as far apart as possible.
    """
    typed = [w for w in overrides if not w.lstrip("+~").startswith(("nightly.", "hydra.sweep.dir="))]
    named = {w.partition("=")[0] for w in typed}
    own = {key: value for key, value in defaults.items() if value is not None}
    default_axes = [f"{key}={value}" for key, value in own.items() if key not in named]
    return [*default_axes, *typed, *(f"hydra.sweeper.params.{key}=null" for key in own)]


def night_times(cron: str, zone: str | None, now: datetime) -> NightTimes:
    """Return the times of a cron expression: minute hour day month weekday, with 0 and 7 for Sunday.

    APScheduler's trigger loses times after midnight on days on which clocks change. So it computes local times as if
    they were UTC, and `zoneinfo` converts them. A time that clocks skip moves later by the change. Of a time that
    occurs twice the first counts, or both in a schedule for every hour.

    Args:
        cron: the expression; it may restrict the day or the weekday, not both.
        zone: a name such as Europe/Berlin; None: this machine's.
        now: for the check that there is a next night at all.

    Raises:
        ConfigError: an invalid expression or zone, or a date that never comes.
    """
    try:
        known = ZoneInfo(zone) if zone is not None else get_localzone()
    except (KeyError, ValueError, OSError) as error:
        wrong = f"{zone} is not a time zone" if zone is not None else f"null: this machine's cannot be read ({error})"
        raise ConfigError(f"nightly.timezone={wrong}; use a name such as Europe/Berlin.") from None
    try:
        fields = cron.lower().split()
        if len(fields) == 5:
            fields[4] = _weekdays(fields)
        shown = CronTrigger.from_crontab(" ".join(fields), timezone=UTC)
    except ValueError as error:
        raise ConfigError(
            f"nightly.cron='{cron}': {error}; use minute hour day month weekday, for example '0 2 * * *'."
        ) from None
    if shown.get_next_fire_time(None, now) is None:
        raise ConfigError(
            f"nightly.cron='{cron}' never runs: no date has its day and month; use for example '0 2 * * *'."
        )
    folds = (0, 1) if fields[1] in _EVERY_HOUR else (0,)
    return lambda moment: min(_first_after(moment, shown, known, fold) for fold in folds)


def _first_after(moment: datetime, shown: CronTrigger, zone: tzinfo, fold: int) -> datetime:
    on_the_wall = moment.astimezone(zone).replace(tzinfo=UTC) - _LARGEST_CHANGE
    while True:
        on_the_wall = shown.get_next_fire_time(None, on_the_wall + timedelta(seconds=1))
        night = on_the_wall.replace(tzinfo=zone, fold=fold).astimezone(UTC)
        is_skipped = night.astimezone(zone).replace(tzinfo=UTC) != on_the_wall
        if night > moment and not (fold and is_skipped):
            return night


def _weekdays(fields: list[str]) -> str:
    """Return the weekdays for APScheduler, which counts from Monday and ignores text after a name."""
    if "*" not in (fields[2], fields[4]):
        raise ValueError("a day of the month and a weekday cannot be combined")
    for place, field in enumerate(fields):
        for part in field.split(","):
            if not (_WEEKDAY if place == 4 else _NUMBER_OR_NAME).fullmatch(part):
                raise ValueError(f"{part} cannot be read; list what is meant, as in mon,wed,fri")
    listed = re.sub("0-(?=[1-7])", "0,1-", fields[4])  # Sunday, which is APScheduler's last
    return re.sub("[0-7]", lambda number: _DAYS[int(number[0])], listed)


def is_due(nights: Sequence[Night], times: NightTimes, now: datetime) -> bool:
    """Return whether the night after the last one was missed. Nights that are dated in the future are ignored."""
    begun = [datetime.fromtimestamp(night.begun, UTC) for night in nights]
    past = [moment for moment in begun if moment <= now]
    return bool(begun) and (not past or times(past[-1]) <= now)


def run_schedule(times: NightTimes, overrides: Sequence[str], waits: bool) -> int:
    """Run `python -m fsdp_lab.nightly --once` at its times, until this process is interrupted.

    Each night is a new process, so it runs the current code. Of several missed nights only one runs.

    Args:
        waits: a night was missed (see `is_due`) and runs at once.

    Returns:
        130 if the interrupt interrupted a night; else 0.
    """
    command = [sys.executable, "-m", "fsdp_lab.nightly", "--once", *overrides]
    night, process = datetime.now(UTC) if waits else times(datetime.now(UTC)), None
    try:
        while True:
            log(f"the next night is {night.astimezone():%Y-%m-%d %H:%M:%S %Z}")
            while (left := (night - datetime.now(UTC)).total_seconds()) > 0:
                time.sleep(min(left, _LOOK_S))
            process = subprocess.Popen(command, start_new_session=True)  # this process passes Ctrl-C on
            if process.wait() < 0:
                log("the night was killed, and is incomplete")
            night, process = times(datetime.now(UTC)), None
    except KeyboardInterrupt:
        if process is None:
            return 0
        process.terminate()
        return 130 if process.wait() == 130 else 0
