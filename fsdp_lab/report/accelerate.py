"""A trial's setting as a config file of accelerate, for `accelerate launch --config_file`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from textwrap import wrap
from typing import Any

import yaml

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.config.axes import AXES
from fsdp_lab.config.compare import counts, effective_settings
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.serialize import flatten, value_text
from fsdp_lab.config.without_hydra import read_config
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.their_keys import KINDS, read, write
from fsdp_lab.training.layout import read_layout

_OF_SCRIPT = ("training.global_batch_size", "training.grad_accum_steps", "training.max_grad_norm", "optimizer.lr")


def accelerate_of(trial: TrialRecord) -> str | None:
    """Return a trial's setting as a config file of accelerate; None if its layout is not known."""
    layout, world_size = read_layout(trial.facts.get("layout")), trial.facts.get("world_size")
    if trial.config is None or layout is None or not isinstance(world_size, int):
        return None
    title = f"Trial {trial.number}: {' '.join(trial.overrides)}"
    return to_accelerate(title, part(trial.config, TrialConfig), world_size, layout.block_classes)


def to_accelerate(title: str, config: TrialConfig, world_size: int, block_classes: Sequence[str] = ()) -> str:
    """Return a YAML file. Comments name what accelerate trains differently, as far as these settings decide it.

    Args:
        world_size: the number of ranks.
        block_classes: names of the classes of the model's blocks; empty: not known.
    """
    ranks, kind = Ranks.of(config.sharding, world_size), config.sharding.kind
    classes = [path.rpartition(".")[2] for path in config.model.block_classes or ()] or block_classes
    shard = ranks.shard if ranks.replicas > 1 or ranks.tp > 1 else None
    known: dict[str, Any] = {"dp_shard": shard, "model.block_classes": ",".join(classes) or None}
    values = write("accelerate", effective_settings(config, world_size) | known, kind if kind in KINDS else "fsdp2")
    script = " ".join(f"{key}={value_text(flatten(config)[key])}" for key in _OF_SCRIPT)
    lines = (title, "accelerate launch --config_file <this file> <script>", f"The script sets the rest: {script} ...")
    comments = [line for text in (*lines, *_other(config, values, world_size)) for line in wrap(text, 117)]
    nested: dict[str, Any] = {}
    for group, _, name in (key.rpartition(".") for key in values):
        (nested.setdefault(group, {}) if group else nested)[name] = values[f"{group}.{name}".lstrip(".")]
    return "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(nested, sort_keys=False)


def _other(config: TrialConfig, values: dict[str, Any], world_size: int) -> list[str]:
    """Return a sentence for each key with which accelerate trains differently."""
    again = read_config(None, [word for word in read("accelerate", values, {}).overrides if "cluster." not in word])
    keys = [*(key for axis in AXES for key in axis.keys), "init"]
    decided = [one.name for one in fields(TrialConfig) if one.name in {key.partition(".")[0] for key in keys}]
    theirs = replace(config, **{name: getattr(again, name) for name in decided})
    ours, read_back = (effective_settings(one, world_size) for one in (config, theirs))
    other = {key: value for key, value in ours.items() if not counts(key, keys) and value != read_back[key]}
    of_library = str(config.model.target).startswith("fsdp_lab.workloads.hf.")
    machines = ["accelerate shards within a machine, and replicates over as many as num_machines says."]
    return (machines if "num_machines" in values else []) + [
        f"No counterpart{'' if of_library or 'embeddings' not in key else ' for models of transformers'}: "
        f"{key}={value_text(value)}; this file has {key}={value_text(read_back[key])}."
        for key, value in other.items()
    ]
