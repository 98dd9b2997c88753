"""Write the report of a sweep again.

python -m fsdp_lab.report sweep=last
python -m fsdp_lab.report sweep=<folder of a sweep>

Writes report.html into the sweep's folder and to its run in MLflow. Other options:
  report.loss_tolerance    a setting qualifies if its loss is within this ratio of the best (0.02)
  report.speed_tolerance   settings within this ratio of the fastest tie, and the simplest wins (0.03)
  tracking.uri             the store that holds the run
  tracking.ui              the address of an MLflow UI on it: a click on a point opens the run there
  out                      another folder for the files
  trust                    true: read a folder that belongs to another user, or that others can write to
  use                      pytorch: print the recommended setting as a function of plain PyTorch, and write nothing;
                           accelerate: as a config file for accelerate launch
  trial                    with use: the number of another trial
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import ConfigError, SweepConfig, UserError, check_ranges, read_words
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.sweep import ReportConfig
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.accelerate import accelerate_of
from fsdp_lab.report.answer import answer, plain_text
from fsdp_lab.report.page import FILES, write_report
from fsdp_lab.report.pytorch import setting_of

if TYPE_CHECKING:
    from fsdp_lab.record.sweep_json import SweepStart

TOLERANCES = ("loss_tolerance", "speed_tolerance")
USES = {"pytorch": setting_of, "accelerate": accelerate_of}
KEYS = ("sweep", *map("report.{}".format, TOLERANCES), "tracking.uri", "tracking.ui", "out", "trust", "use", "trial")


def main() -> int:
    outlast_reader()
    try:
        options = read_options(sys.argv[1:])
        run(options)
    except UserError as error:
        print(f"fsdp_lab.report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fsdp_lab.report: {error.filename}: {error.strerror}; name another folder with out=...", file=sys.stderr)
        return 2
    return 0


def read_options(arguments: list[str]) -> dict[str, str]:
    """Return the `key=value` arguments as a dictionary.

    Raises:
        ConfigError: an unknown key, no sweep, or an unknown `use`.
    """
    options = read_words(arguments, KEYS, docstring(sys.modules[__name__]))
    if not options.get("sweep"):
        raise ConfigError("give sweep=<folder> or sweep=last.")
    if options.get("use", "pytorch") not in USES:
        raise ConfigError(f"use={options['use']} is not an option. Choose one of: {', '.join(USES)}.")
    if "trial" in options and "use" not in options:
        raise ConfigError(f"trial={options['trial']} requires use=pytorch.")
    return options


def run(options: dict[str, str]) -> None:
    """Write the report and print its answer.

    Raises:
        UserError: there is no such sweep, or none of its trials has finished.
    """
    from fsdp_lab.sweep.record import record_of, require_results, sweep_in
    from fsdp_lab.sweep.store.find import find_trusted, read_trust
    from fsdp_lab.tracking import annotate_answer, runs_url
    from fsdp_lab.tracking.tags import SweepAnswer

    which = options["sweep"].strip("'\"")
    folder, own = find_trusted(which, "sweep", read_trust(options.get("trust")))
    read = sweep_in(folder)
    given: dict[str, Any] = {key: options[f"tracking.{key}"] for key in ("uri", "ui") if f"tracking.{key}" in options}
    tracking = dataclasses.replace(read.config.tracking, **given)
    sweep = dataclasses.replace(with_tolerances(record_of(read), options), runs_url=runs_url(tracking))
    require_results(sweep, which)
    if "use" in options:
        print(script(sweep, options["use"], options.get("trial")), end="")
        return
    out = Path(options["out"]) if "out" in options else folder
    out.mkdir(parents=True, exist_ok=True)
    recommendation = write_report(sweep, out)
    try:
        if "tracking.uri" not in options:
            tracking = dataclasses.replace(tracking, uri=store_of(read.started, read.config, own))
        files = [out / name for name in FILES if (out / name).exists()]
        if not annotate_answer(tracking, read.started.id, SweepAnswer(**recommendation.as_data), files):
            print("fsdp_lab.report: the store has no run of this sweep, so the report is only in its folder")
    except UserError as error:
        print(f"fsdp_lab.report: the report is not in MLflow: {error}", file=sys.stderr)
    print(*plain_text(recommendation), sep="\n")
    print(f"report: {out}/report.html")


def script(sweep: SweepRecord, use: str, number: str | None = None) -> str:
    """Return a trial's setting as Python code, or as a file.

    Args:
        use: a key of `USES`.
        number: of the trial; None: the recommended trial.

    Raises:
        UserError: there is no such trial, or its facts are missing.
    """
    if number is None:
        recommendation = answer(sweep)
        if recommendation.trial is None:
            raise UserError(f"use={use}: {recommendation.sentence} Choose a trial with trial=<number>.")
        trial = recommendation.trial
    else:
        by_number = {str(trial.number): trial for trial in sweep.trials}
        if number not in by_number:
            raise ConfigError(f"trial={number} is not in this sweep; use one of: {', '.join(by_number)}.")
        trial = by_number[number]
    code = USES[use](trial)
    if code is None:
        raise UserError(
            f"use={use}: the sharding units of trial {trial.number} are not known: it did not start, or an earlier "
            "version ran it."
        )
    return code


def store_of(record: SweepStart, config: SweepConfig, own: bool) -> str:
    """Return the tracking store that a folder names.

    Args:
        own: the folder belongs to this user. A report opens no store that another user's folder names.

    Raises:
        ConfigError: the user has to type the address.
    """
    uri = config.tracking.uri
    if not own:
        raise ConfigError(f"tracking.uri={uri} is from another user's folder; to use it, add it to the command.")
    return seen_from(uri, record.launched_in)


def seen_from(uri: str, folder: str) -> str:
    """Return a store in a file, relative to the folder in which the sweep was started."""
    place = uri.removeprefix("sqlite:///")
    return uri if place == uri or place.startswith("/") else f"sqlite:///{Path(folder, place)}"


def with_tolerances(sweep: SweepRecord, options: dict[str, str]) -> SweepRecord:
    """Return the sweep with the tolerances of the command line.

    Raises:
        ConfigError: a tolerance is not a number, or is out of range.
    """
    given: dict[str, Any] = {}
    for key in TOLERANCES:
        text = options.get(f"report.{key}")
        try:
            given[key] = getattr(sweep, key) if text is None else float(text)
        except ValueError:
            raise ConfigError(f"report.{key}={text} is not a number; use for example 0.05.") from None
    check_ranges(ReportConfig(**given), "report.")
    return dataclasses.replace(sweep, **given)
