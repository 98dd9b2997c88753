"""A study every night, compared with the last good one.

python -m fsdp_lab.nightly                       on its schedule, in the foreground: for systemd or a container
python -m fsdp_lab.nightly --once                now: for cron, Slurm's scrontab, CI
python -m fsdp_lab.nightly --continue            only the rest of an interrupted night, if there is one
python -m fsdp_lab.nightly --check               say what would run, and when; run nothing
python -m fsdp_lab.nightly --accept "reason"     make the last night the baseline

What follows are overrides of fsdp_lab, lists are axes. Without experiment=... the study is experiment=nightly.
Its own keys:
  nightly.cron           '0 2 * * *': minute hour day month weekday      nightly.timezone    null: this machine's
  nightly.repeats        trials of each setting (3)                      nightly.jitter_s    start up to so much late
  nightly.tolerance.*    peak_memory, samples_per_s, loss: ratios; forecast_error, speed_forecast_error: differences
  nightly.significance   how often noise may pass for a regression of one setting and metric (0.005)
  nightly.others_cpu     on a CPU no speed is judged in a night in which others had more than this share of it (0.25)
  nightly.baseline       a night's name; null: the last good one         nightly.late_s      how late a missed one is
  nightly.folder         outputs/nightly                                 nightly.keep        nights with checkpoints
  nightly.notify.url     gets the verdict as JSON                        nightly.notify.timeout_s

Leaves with 0: good; 1: nothing finished; 2: bad input; 3: a regression; 130: interrupted, and the next start goes on.
On its schedule it never leaves by itself; SIGTERM between nights is 0.
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
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.compose import (
    check,
    check_overrides,
    explain,
    group_choices,
    nightly_config,
    register_schema,
    search_path,
)
from fsdp_lab.config import (
    Between,
    ConfigError,
    UserError,
    all_keys,
    conf_dir,
    is_address,
    settings,
    split_config_dir,
    with_custom,
    workers_of,
)
from fsdp_lab.config.machine import loader_workers_of
from fsdp_lab.config.options import secret_keys
from fsdp_lab.config.words import AUTO_REPEAT
from fsdp_lab.hardware import num_gpus
from fsdp_lab.locks import InUse, holder, locked
from fsdp_lab.nightly.loop import WallClock, due_unfinished, loop
from fsdp_lab.nightly.night import accept, run_night
from fsdp_lab.nightly.nights import Night, read_nights, read_since
from fsdp_lab.nightly.schedule import Schedule
from fsdp_lab.nightly.shared import read_all
from fsdp_lab.nightly.study import Study
from fsdp_lab.nightly.verdict import baseline_of
from fsdp_lab.redact import redact
from fsdp_lab.sweep.grid import all_overrides, discrete_values

_OPTIONS = ("--once", "--continue", "--check", "--accept")
_RESUME_KEYS = [key for key in all_keys() if key.startswith("resume")]
_NIGHTS_TOLD = 3


def main() -> int:
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
            tell_plan(study, schedule, now)
            return 0
        if option == "--accept":
            with locked(study.folder, "nightly.folder"):
                accept(study, reason, say)
            return 0
        running = True
        if option in ("--once", "--continue"):
            return run_once(study, schedule, only_go_on=option == "--continue")
        with locked(study.folder, "nightly.folder", ".schedule"):
            nightly = study.nightly
            baseline_of(study, read_all(study))  # now, not in the night
            since = read_since(study.folder, time.time())
            loop(
                schedule, lambda: nights_of(study), lambda due: run_locked(study, due), since, WallClock(),
                say, nightly.jitter_s, nightly.late_s,
            )  # fmt: skip
            return 0
    except KeyboardInterrupt:
        unfinished = running and is_unfinished_here(study, schedule)
        until = f"{schedule.after(datetime.now(UTC)).astimezone():%Y-%m-%d %H:%M %Z}" if unfinished else ""
        how = f", in a night; to resume it, start again until {until}, or: {study.go_on}" if unfinished else ""
        print(f"fsdp_lab.nightly: ended{how}")
        return 130 if unfinished else 0
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"fsdp_lab.nightly: {message}", file=sys.stderr)
        return 2


def nights_of(study: Study) -> list[Night]:
    """All that there are, but for one of another study that was interrupted: nobody goes on with it."""
    return _of_study(study, read_all(study))


def is_unfinished_here(study: Study, schedule: Schedule) -> bool:
    """Whether a night is left to go on with. Asks no store: one that is away may be why somebody ends this."""
    with suppress(UserError):  # a damaged file, which the next start tells
        return due_unfinished(schedule, _of_study(study, read_nights(study.folder)), time.time()) is not None
    return False


def _of_study(study: Study, nights: list[Night]) -> list[Night]:
    return [night for night in nights if night.over or night.study == study.settings]


def run_locked(study: Study, due: float) -> int:
    with locked(study.folder, "nightly.folder"):
        return run_night(study, due, say)


def run_once(study: Study, schedule: Schedule, only_go_on: bool) -> int:
    """A night now, or the rest of the one that was interrupted; with `only_go_on` nothing where none was, or where it
    runs.

    Raises:
        InUse: another one is at work.
    """
    try:
        with locked(study.folder, "nightly.folder"):
            begun = due_unfinished(schedule, nights_of(study), time.time())
            if only_go_on and begun is None:
                say("no night was interrupted")
                return 0
            return run_night(study, time.time() if begun is None else begun, say)
    except InUse as error:
        if not only_go_on:
            raise
        say(str(error))
        return 0


def read_words(words: list[str]) -> tuple[str | None, str, list[str]]:
    """The option, the reason of `--accept`, and the overrides.

    Raises:
        ConfigError: an option that there is not, or more than one.
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
            raise ConfigError(f"{option} and {name} are two things to do; give one.")
        option = name
        if name == "--accept":
            reason = value or next(rest, "")
            if not reason.strip() or "=" in reason.partition(" ")[0]:
                raise ConfigError('--accept takes a reason, which is recorded: --accept "the new model is larger".')
    return option, reason, overrides


def read_study(overrides: list[str]) -> Study:
    """What the overrides stand for.

    Raises:
        Exception: what Hydra or the checks say of them.
    """
    config_dir, overrides = split_config_dir(overrides)
    overrides, found_in = with_custom(overrides), search_path(config_dir)
    words = [word.lstrip("+~") for word in overrides]
    if resumes := [word for word in words if word.partition("=")[0] in _RESUME_KEYS]:
        raise ConfigError(f"{resumes[0]}: a night goes on by itself when it was interrupted; leave it out.")
    auto = AUTO_REPEAT in words
    overrides = [word for word in overrides if word.lstrip("+~") != AUTO_REPEAT]
    if repeats := [word for word in words if word.startswith("repeat=") and word != AUTO_REPEAT]:
        raise ConfigError(
            f"{repeats[0]}: how often a night trains each setting is nightly.repeats=3; leave it out. With repeat=auto "
            "that is the most, and only what is undecided is repeated."
        )
    if not any(word.startswith("experiment=") for word in overrides):
        overrides = ["experiment=nightly", *overrides]
    check_overrides(overrides)
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(overrides)
        plain = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
        defaults: dict[str, Any] = compose("config", [*plain, *found_in], return_hydra_config=True).hydra.sweeper.params
        given = all_overrides(parser, {k: None if v is None else str(v) for k, v in defaults.items()}, overrides)
        axes = {o.get_key_element(): discrete_values(o) for o in given.values()}
        if several := [
            key for key, values in axes.items() if key.lstrip("+").startswith("nightly.") and len(values) > 1
        ]:
            raise ConfigError(
                f"{several[0]} has several values, it takes one; quote what holds a comma: "
                f"\"{several[0]}='0 2,14 * * *'\"."
            )
        first = [values[0] for values in axes.values()]
        cfg = compose("config", [*first, *found_in], return_hydra_config=True)
    config = nightly_config(cfg)
    choices = group_choices(cfg)
    check(config)
    swept = {key.lstrip("+") for key, values in axes.items() if len(values) > 1}
    shared = {
        key: value
        for key, value in settings(config, Between.NIGHTS).items()
        if key.partition(".")[0] not in swept and key not in swept
    }
    if "data.loader_workers" in shared:  # as a number: nights before null wrote one, and it changes what is measured
        shared["data.loader_workers"] = loader_workers_of(config)
    shared |= {"workers": workers_of(config), "device": "cuda" if num_gpus() else "cpu"}
    shared |= {f"axis {key}": ",".join(v.partition("=")[2] for v in axes[key]) for key in sorted(swept)}
    name = choices.get("experiment", "nightly")
    if config.forecast.keep is not None:
        raise ConfigError(
            f"forecast.keep={config.forecast.keep}: a night runs every setting of its study, for another prediction is "
            "no regression; leave it out."
        )
    nightly = config.nightly
    repeats = [f"repeat={','.join(map(str, range(nightly.repeats)))}"] if nightly.repeats > 1 else []
    if auto:
        if nightly.repeats < 2:
            raise ConfigError(f"repeat=auto with nightly.repeats={nightly.repeats}: nothing can repeat; use 2 or more.")
        if most := [word for word in words if word.startswith("repeat_max=")]:
            raise ConfigError(f"{most[0]}: the most rounds of a night are nightly.repeats; leave it out.")
        repeats = [AUTO_REPEAT, f"repeat_max={nightly.repeats}"]
    typed = [w for w in overrides if not w.lstrip("+~").startswith(("nightly.", "hydra.sweep.dir="))]
    named = {w.partition("=")[0] for w in typed}
    default_axes = [f"{key}={value}" for key, value in defaults.items() if value is not None and key not in named]
    # with defaults out of the way the axes have the order of the words: the repeats lie as far apart as they can
    no_defaults = [f"hydra.sweeper.params.{key}=null" for key, value in defaults.items() if value is not None]
    folder = [f"--config-dir={config_dir}"] if config_dir is not None else []
    arguments = [*folder, *repeats, *default_axes, *typed, *no_defaults]
    shares_cores = shared["device"] == "cpu" and config.cluster.address is None
    secret = [word for word in overrides if word.lstrip("+").partition("=")[0] in secret_keys()]
    shown = [f"{word.partition('=')[0]}=***" if word in secret else word for word in overrides]
    go_on = redact(shlex.join(["python", "-m", "fsdp_lab.nightly", "--continue", *folder, *shown]))
    path = config.cluster.storage_path
    return Study(
        name, Path(nightly.folder) / name, nightly, config.tracking, arguments, shared, shares_cores, go_on,
        storage=path if is_address(path) else None,
    )  # fmt: skip


def tell_plan(study: Study, schedule: Schedule, now: datetime) -> None:
    """What would run, when, against what.

    Raises:
        UserError: the baseline cannot be compared with.
    """
    baseline = baseline_of(study, read_all(study))
    print(f"study:    {study.name}, in {study.where}")
    print(f"sweep:    {redact(shlex.join(['python', '-m', 'fsdp_lab', '-m', *study.arguments]))}")
    told = f"{baseline.id} ({baseline.verdict})" if baseline else "none yet: the first good night will be"
    busy = " but for its speeds, as others used the machine" if baseline and baseline.busy else ""
    print(f"baseline: {told}{busy}")
    at_work = holder(study.folder / ".lock")
    if at_work:
        print(f"now:      a night runs here ({at_work})")
    elif due_unfinished(schedule, nights_of(study), now.timestamp()) is not None:
        until = f"{schedule.after(now).astimezone():%Y-%m-%d %H:%M %Z}"
        print(f"waits:    a night was interrupted; to resume it until {until}: {study.go_on}")
    night = now
    for _ in range(_NIGHTS_TOLD):
        night = schedule.after(night)
        here = night.astimezone()
        print(f"night:    {here:%Y-%m-%d %H:%M %Z}{f' ({night:%H:%M} UTC)' if here.utcoffset() else ''}")


def say(text: str) -> None:
    print(text, flush=True)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
