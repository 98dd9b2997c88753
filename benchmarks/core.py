"""The training core of a trial under torchrun, without Ray and MLflow; like a trial, it writes its progress.

torchrun --nproc-per-node 2 -m benchmarks.core <folder> key=value ...
"""

import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.config.without_hydra import read_config
from fsdp_lab.engine.rank import RankReporter
from fsdp_lab.record.trial_files import TrialWriter
from fsdp_lab.training.train import train

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    config = part(read_config(None, sys.argv[2:]), TrialConfig)
    own = folder if os.environ["RANK"] == "0" else Path(tempfile.mkdtemp())  # of which only rank 0's is looked at
    train(config, folder, RankReporter(TrialWriter(own).receive, (own / "progress.json").open("w")))
    dist.destroy_process_group()
