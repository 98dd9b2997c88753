"""The content of a run besides its metrics: parameters and tags. Imports no MLflow."""

from __future__ import annotations

import getpass
import hashlib
import importlib.metadata
import math
import platform
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import fsdp_lab
from fsdp_lab.config import compare, metrics, source_code
from fsdp_lab.config.describe import values_implied_by_option
from fsdp_lab.config.metrics import PREDICTED_BY
from fsdp_lab.config.serialize import value_text
from fsdp_lab.config.sweep import SweepConfig

_FOR_SAMPLERS = ("search.num_trials", "search.seed")  # a grid has all its cells
_HOW_TO_READ = """\
**How to read this experiment.** A parent run is one sweep, and its child runs are the trials. A run without \
children is a single trial.

The answer: open a sweep and look at `report.html` among its artifacts. It recommends a setting, with reasons.

To compare settings yourself: select the trials of a sweep and press *Compare*. The parameters are the keys of the \
command line; the groups (`sharding`, `precision`, `offload`, `reshard_after_forward` …) have the name of their option.

| metric | unit | what it is |
| --- | --- | --- |
METRICS

The sweep of a nightly run has the tag `nightly.verdict` (good, regression, accepted); `nightly.regressions` names \
what got worse.

The tag `status` says how a trial ended, `error` why it failed. Two trials with the same `data_digest` used the same \
data.
"""


def how_to_read() -> str:
    """Return the description of the experiment, with a row for each metric."""
    rows = []
    for metric in metrics.METRICS:
        named = [(metric.key, metric.unit), *([(metric.mib_key, "MiB")] if metric.mib_key else [])]
        if metric.about:
            keys, units = ", ".join(f"`{key}`" for key, _ in named), ", ".join(unit for _, unit in named)
            rows.append(f"| {keys} | {units} | {metric.about} |")
    return _HOW_TO_READ.replace("METRICS", "\n".join(rows))


# By these a start finds the runs of the start before it.
SWEEP_TAG, TRIAL_TAG, RECORDED_TAG = "fsdp_lab.sweep", "fsdp_lab.trial", "fsdp_lab.recorded"
FOLDER_TAG = "fsdp_lab.folder"
RECOMMENDED_TAG = "fsdp_lab.recommended"  # of the sweep, the number of the trial or none; of that trial, true
FINDING_TAG = "fsdp_lab.finding"  # of the sweep: that its model does not compute the same in all settings
_SETTING, _NONE = "recommended.", "none"
COMMAND_TAG, ANSWER_TAG, _NOTE_TAG = "fsdp_lab.command", "fsdp_lab.answer", "mlflow.note.content"
_FACTS = ("device", "world_size", "num_params", "data_digest", "resumed_from", PREDICTED_BY)
_LIBRARIES = ("torch", "torchvision", "ray", "mlflow", "hydra-core", "omegaconf")
NAME_LENGTH = 250  # of a run, a parameter or a tag: the columns of MLflow's databases
_PARAM_LENGTH, _TAG_LENGTH = 6000, 5000  # what every server of MLflow 3 accepts
_ANSWER_LENGTH = 1000  # so that the command after it is not cut


def shortened(name: str, length: int = NAME_LENGTH) -> str:
    """Return a name that a database takes; if it is cut, a digest of the whole keeps it unique."""
    if len(name) <= length:
        return name
    return f"{name[: length - 10]}-{hashlib.sha256(name.encode()).hexdigest()[:9]}"


def stored_name(name: str) -> str:
    """Return the name that MLflow gets for a metric, a parameter or a tag.

    MLflow accepts no `@` or `%` in them, for example, and no path such as `a//b`. A digest keeps a changed name unique.
    """
    allowed = re.sub(r"[^/\w.\- :]", "_", name)
    if posixpath.normpath(allowed) != allowed or allowed.startswith(("/", "..")) or allowed == ".":
        allowed = re.sub(r"[/.]", "_", allowed)
    return shortened(name if allowed == name else f"{allowed}-{hashlib.sha256(name.encode()).hexdigest()[:4]}")


def one_line(text: str, length: int) -> str:
    """Return text without line breaks, cut to `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def trial_params(
    config: SweepConfig, choices: Mapping[str, str], num_workers: int | None, typed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the parameters of a trial: the group choices, then every key by its dotted name, as they are typed.

    Keys that a choice implies are left out, so that a comparison shows an axis once. `num_workers` is the number of
    ranks, where `cluster.num_workers` is null; while it is None, not known, the key is left out. `typed` has the values
    that name variables of the environment.
    """
    chosen = {key: value for key, value in choices.items() if value not in (None, "", "null")}
    idle = () if config.search.samples else _FOR_SAMPLERS
    own = compare.settings(config, (*compare.PARAMS, *idle))
    own |= {key: value for key, value in (typed or {}).items() if key in own}
    own["cluster.num_workers"] = config.cluster.num_workers or num_workers
    if own["cluster.num_workers"] is None:  # MLflow changes no parameter
        del own["cluster.num_workers"]
    implied = {
        k: v for group, option in chosen.items() if group != "experiment" for k, v in _implied(group, option).items()
    }
    values = {**chosen, **{k: v for k, v in own.items() if k not in chosen and (k not in implied or implied[k] != v)}}
    return {stored_name(key): shortened(value_text(value), _PARAM_LENGTH) for key, value in values.items()}


def _implied(group: str, option: str) -> dict[str, Any]:
    try:
        return values_implied_by_option(group, option)
    except OSError:  # an option from another folder, by Hydra's searchpath
        return {}


def sweep_tags(folder: Path, command: str) -> dict[str, str]:
    """Return the tags of a parent run. The time is in its description; its name is what it compares."""
    note = f"Started {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z} in `{folder.absolute()}` by\n\n    {command}\n"
    return _cut({**_origin(folder, command), _NOTE_TAG: note})


def answer_tags(tags: Mapping[str, str], answer: str) -> dict[str, str]:
    """Return the tags of a run with its sweep's answer at the start of the description, in place of an earlier one.

    Args:
        tags: the current ones; text that people added to the description stays.
    """
    answer = answer[:_ANSWER_LENGTH]
    note = tags.get(_NOTE_TAG, "").removeprefix(tags.get(ANSWER_TAG, "")).lstrip("\n")
    return _cut({ANSWER_TAG: answer, _NOTE_TAG: f"{answer}\n\n{note}"})


@dataclass(frozen=True)
class SweepAnswer:
    """The answer of a sweep, as its run and those of its trials have it.

    Attributes:
        sentence: the start of the description.
        finding: what the settings show of the model; "": nothing.
        trial: the number of the trial that represents the recommended setting; None: none is recommended.
        setting: the recommended one's value for each axis.
        figures: the recommended setting's, over its repeats.
    """

    sentence: str = ""
    finding: str = ""
    trial: int | None = None
    setting: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    def tags(self, before: Mapping[str, str]) -> dict[str, str]:
        """Return the tags of the sweep's run; values of an earlier answer (`before`) that this one lacks are `none`."""
        own = {f"{_SETTING}{key}": value for key, value in self.setting.items()}
        stale = {key: _NONE for key in before if key.startswith(_SETTING)}
        if self.finding or FINDING_TAG in before:
            own[FINDING_TAG] = self.finding or _NONE
        return {RECOMMENDED_TAG: _NONE if self.trial is None else str(self.trial), **stale, **own}

    def metrics(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the sweep's run; without a recommendation those of an earlier one are NaN."""
        if self.trial is None:
            return dict.fromkeys(before, math.nan)
        return {key: v for key, v in self.figures.items() if key not in ("epoch", "step") and math.isfinite(v)}

    def tags_of_trial(self, number: int, before: Mapping[str, str]) -> dict[str, str]:
        """Return the tag of a trial's run; that of a trial which an earlier answer recommended is `false`."""
        if number == self.trial:
            return {RECOMMENDED_TAG: "true"}
        return {RECOMMENDED_TAG: "false"} if RECOMMENDED_TAG in before else {}


def trial_tags(folder: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Return the tags of a trial; its command trains only it again."""
    return _cut(_origin(folder, shlex.join(["python", "-m", "fsdp_lab", *overrides])))


def fact_tags(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags for a trial's facts; a missing fact has no tag."""
    tags = {key: facts.get(key) for key in _FACTS}
    tags["note"] = " ".join(facts.get("notes") or ()) or None
    return _cut({key: value for key, value in tags.items() if value is not None})


def _origin(folder: Path, command: str) -> dict[str, Any]:
    return {
        **machine_tags(),
        FOLDER_TAG: folder.absolute(),
        COMMAND_TAG: command,
        "mlflow.source.name": "python -m fsdp_lab",
        "mlflow.source.type": "LOCAL",
    }


def _cut(tags: Mapping[str, Any]) -> dict[str, str]:
    return {stored_name(key): str(value)[:_TAG_LENGTH] for key, value in tags.items()}


@cache
def machine_tags() -> dict[str, str]:
    """Return tags for the user, the machine, the code and the libraries, as this process first found them."""
    tool = fsdp_lab.__version__ + (f" (commit {of_tool[:10]})" if (of_tool := source_code.commit()) else "")
    tags = {"mlflow.user": _user(), "host": platform.node(), "version.fsdp_lab": tool}
    tags["version.python"] = platform.python_version()
    tags |= {f"version.{name}": importlib.metadata.version(name) for name in _LIBRARIES}
    commit, is_dirty = source_code.users_commit()
    return tags | ({"mlflow.source.git.commit": commit, "git.dirty": value_text(is_dirty)} if commit else {})


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return "unknown"
