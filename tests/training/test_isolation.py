"""The training core runs under torchrun as it is, and none of the platform comes with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).parents[2]
PLATFORM = ("ray", "hydra", "omegaconf", "mlflow")

# What `-m fsdp_lab.training` runs, and then a look at what that brought in.
SCRIPT = f"""
import os, runpy, sys
os._exit = sys.exit
try:
    runpy.run_module("fsdp_lab.training", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    status = ended.code
brought = sorted({{name.split(".")[0] for name in sys.modules}} & set({PLATFORM!r}))
sys.stdout.write(f"STATUS {{status}} BROUGHT {{brought}}\\n")
"""
SMALL = ["sharding=per_block", "precision=bf16", "data.num_train=128", "data.num_val=30", "training.epochs=1"]


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def alone(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Python with these arguments: a group of one."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_torchrun_end_to_end(tmp_path: Path) -> None:
    """From another working directory: metrics on rank 0 only, a checkpoint, a model; status 0."""
    ran = torchrun("-m", "fsdp_lab.training", *SMALL, "--folder", str(tmp_path / "out"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    facts, epoch = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert (facts["world_size"], facts["num_params"], facts["data_num_train"]) == (2, 139_018, 128)
    assert 0 < epoch["train/loss"] < 3
    assert epoch["memory/rank1/peak_bytes"] > 0
    assert (tmp_path / "out/checkpoints/step_00000002/meta.json").is_file()  # 128 images, 64 a step
    weights = torch.load(tmp_path / "out/model.pt", weights_only=True)["state_dict"]
    assert sum(w.numel() for w in weights.values()) == 139_018


def test_nothing_of_the_platform_is_imported(tmp_path: Path) -> None:
    ran = alone("-c", SCRIPT, *SMALL, "--folder", str(tmp_path / "out"), cwd=tmp_path)
    assert ran.stdout.splitlines()[-1] == "STATUS 0 BROUGHT []", ran.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epoch=3", "training.epoch is not a key"),
        ("training.global_batch_size=63", "training.global_batch_size=63 is not divisible by cluster.num_workers=1"),
    ],
)
def test_bad_input_without_torchrun(tmp_path: Path, override: str, words: str) -> None:
    """A group of one: status 1, one message, no traceback."""
    accumulate = "training.grad_accum_steps=2"
    ran = alone("-m", "fsdp_lab.training", override, accumulate, "--folder", str(tmp_path / "out"), cwd=tmp_path)
    assert ran.returncode == 1
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
