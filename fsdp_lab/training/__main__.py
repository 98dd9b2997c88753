"""One trial without the platform.

torchrun --nproc-per-node 2 -m fsdp_lab.training sharding=per_block precision=fp16 optimizer.lr=0.01
torchrun --nproc-per-node 2 -m fsdp_lab.training --config outputs/.../.hydra/config.yaml

Takes `group=option` and `key=value` like the command line of fsdp_lab, without sweeps and presets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_lab.config import ConfigError, NightlyConfig, TrialConfig, UserError, conf_dir, from_dict, part, to_dict
from fsdp_lab.config.closeness import gaps_to_plain, why_other_weights
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.metrics import FIRST_LOSS
from fsdp_lab.config.options import OPEN_GROUPS, group_dirs
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.words import with_custom
from fsdp_lab.config.workload import known_vocab_size
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.training.checkpoint import Metrics
from fsdp_lab.training.train import train
from fsdp_lab.workloads.hf.configuration import merge

_IMPORTS_S = 30.0  # before a plain loop starts to count its seconds


class ConsoleReporter:
    """Prints one line of JSON for each epoch, on rank 0.

    Attributes:
        known: the facts.
        first: the metrics of the first epoch.
    """

    def __init__(self) -> None:
        self.speaks = int(os.environ.get("RANK", 0)) == 0
        self.known: dict[str, Any] = {}
        self.first: Metrics = {}

    def facts(self, facts: dict[str, Any]) -> None:
        self.known = facts
        if self.speaks:
            print(json.dumps(facts), flush=True)

    def phase(self, name: str) -> None:
        """Do nothing."""
        pass

    def step(self, step: int) -> None:
        """Do nothing."""
        pass

    def epoch(self, metrics: Metrics) -> None:
        self.first = self.first or metrics
        if self.speaks:
            print(json.dumps({key: round(value, 6) for key, value in metrics.items()}), flush=True)


def compared(config: TrialConfig, facts: dict[str, Any], first: Metrics) -> dict[str, Any]:
    """Return how a trial compares with a plain loop: how far its losses are apart, what differs, or why it is missing.

    Args:
        first: the metrics of its first epoch.
    """
    if why := why_other_weights(config):
        return {"missing": why}
    loop = plain_loop(config, Ranks.of(config.sharding, facts["world_size"]).dp)
    if loop["missing"]:
        return {"missing": loop["missing"]}
    in_tf32 = facts["tf32"] or loop["device"] != facts["device"]
    gaps = list(gaps_to_plain(loop["figures"], first, config, in_tf32, loop["draws"], loop["noise"], loop["eps"]))
    for key, gap, limit in gaps:
        if gap > limit:
            return {"differs": key, "found": first[key], "expected": loop["figures"][key]}
    losses = [gap.found for gap in gaps if gap.is_of_loss]
    return {"steps": 0 if loop["draws"] else loop["steps"], "apart": max(losses, default=None)}


def plain_loop(config: TrialConfig, dp_degree: int) -> dict[str, Any]:
    """Return what `fsdp_lab.training.plain` does, in a process that knows nothing of ranks."""
    own = {name: value for name, value in os.environ.items() if not re.search("RANK|WORLD_SIZE|MASTER_|ELASTIC", name)}
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder, "in.json"), Path(folder, "out.json")
        asked.write_text(json.dumps({"config": to_dict(config), "parts": dp_degree, "limit_s": config.check.limit_s}))
        command = [sys.executable, "-m", "fsdp_lab.training.plain", str(asked), str(told)]
        try:
            subprocess.run(command, env=own, check=True, timeout=config.check.limit_s + _IMPORTS_S)
        except subprocess.SubprocessError as error:
            return {"missing": str(error)}
        answer: dict[str, Any] = json.loads(told.read_text())
        return answer


def read_config(base: Path | None, overrides: list[str]) -> NightlyConfig:
    """Return the defaults, or a composed config's file, with overrides on top.

    Args:
        base: a YAML file; None: the defaults.
        overrides: `group=option` and `key=value`.

    Raises:
        ConfigError: an unknown key or option, or a value of the wrong type.
    """
    import yaml  # `fsdp_lab.training` itself needs only PyTorch and torchvision

    values = to_dict(NightlyConfig())
    if base is not None:
        composed = yaml.safe_load(base.read_text()) or {}
        values = merge(values, composed) | {group: composed[group] for group in OPEN_GROUPS if group in composed}
    pairs = [override.partition("=")[::2] for override in with_custom(overrides)]
    for key, text in sorted(pairs, key=lambda pair: conf_dir() / pair[0] not in group_dirs()):  # options first
        group = conf_dir() / key
        value = read_option(group, text) if group in group_dirs() else yaml.safe_load(text)
        if key in OPEN_GROUPS and "_target_" in value:  # the arguments of another callable are none of this one's
            values = {**values, key: {}}
        for name in reversed(key.split(".")):
            value = {name: value}
        values = merge(values, value)
    return from_dict(NightlyConfig, resolved(values, values))


def read_option(group: Path, option: str) -> Any:
    """Return the values of a group's option.

    Raises:
        ConfigError: the group has no such option.
    """
    options = {file.stem: file for file in sorted(group.glob("*.yaml"))}
    if option not in options:
        raise ConfigError(f"{group.name}={option} is not an option. Choose one of: {', '.join(options)}.")
    import yaml

    return yaml.safe_load(options[option].read_text())


def resolved(value: Any, root: dict[str, Any]) -> Any:
    """Return `value` with each `${group.key}` replaced by the value of that key, as options of other groups use it.

    Args:
        value: plain values in any nesting.
        root: the whole config.

    Raises:
        ConfigError: there is no such key.
    """
    if isinstance(value, dict):
        return {key: resolved(item, root) for key, item in value.items()}
    if not isinstance(value, str) or not (named := re.fullmatch(r"\$\{([\w.]+)\}", value)):
        return value
    node: Any = root
    for name in named[1].split("."):
        if not isinstance(node, dict) or name not in node:
            if named[1] == "model.vocab_size" and (size := known_vocab_size(root["model"])):
                return size
            raise ConfigError(f"{value} refers to {named[1]}, which is not set; give the key that uses it a value.")
        node = node[name]
    return node


def main() -> int:
    outlast_reader()
    parser = argparse.ArgumentParser(
        "fsdp_lab.training", description=docstring(sys.modules[__name__]), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config", type=Path, help="a composed config, such as a trial's .hydra/config.yaml")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/training"), help="folder for checkpoints and the model"
    )
    args = parser.parse_intermixed_args()
    try:
        config = read_config(args.config, args.overrides)
        args.folder.mkdir(parents=True, exist_ok=True)
        trial, reporter = part(config, TrialConfig), ConsoleReporter()
        train(trial, args.folder, reporter)
        dist.destroy_process_group()
        if reporter.speaks and trial.check.enabled and FIRST_LOSS in reporter.first:
            found = compared(trial, reporter.known, reporter.first)
            print(json.dumps({"plain_loop": found}), flush=True)
            if "differs" in found:
                raise UserError(f"another model than that of a plain loop was trained: {found['differs']} differs")
    except UserError as error:
        print(f"fsdp_lab.training: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads may outlive the interpreter, and then abort a process that has done its work.
    os._exit(status)
