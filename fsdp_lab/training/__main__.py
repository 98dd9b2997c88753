"""One trial without the platform.

torchrun --nproc-per-node 2 -m fsdp_lab.training sharding=per_block precision=fp16 optimizer.lr=0.01
torchrun --nproc-per-node 2 -m fsdp_lab.training --config outputs/.../.hydra/config.yaml

Accepts `group=option` and `key=value` like the command line of fsdp_lab, without sweeps and presets.
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

from fsdp_lab.config import TrialConfig, UserError, part, to_dict
from fsdp_lab.config.closeness import gaps_to_plain, why_other_weights
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.metrics import FIRST_LOSS
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.without_hydra import read_config
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.training.checkpoint import Metrics
from fsdp_lab.training.train import train

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
    """Return the result of `fsdp_lab.training.plain`, from a process that knows nothing of ranks."""
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
