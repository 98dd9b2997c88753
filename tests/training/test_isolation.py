"""The training core runs under torchrun as it is, and none of the platform comes with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_lab.training.__main__ import main

REPO = Path(__file__).parents[2]
PLATFORM = ("ray", "hydra", "omegaconf", "mlflow")

# Python runs it at the start of a rank: the rank's end is then preceded by a look at what it has imported.
SITECUSTOMIZE = f"""
import os, sys
leave = os._exit
def look_and_leave(status):
    brought = sorted({{name.split(".")[0] for name in sys.modules}} & set({PLATFORM!r}))
    print("brought", *brought, flush=True)
    leave(status)
os._exit = look_and_leave
"""
SMALL = ["sharding=per_block", "precision=bf16", "data.num_train=128", "data.num_val=30", "training.epochs=1"]


@pytest.mark.ci
@pytest.mark.documents("torchrun --nproc-per-node 2 -m fsdp_lab.training sharding=root")
def test_torchrun_end_to_end(tmp_path: Path) -> None:
    """From another working directory: metrics on rank 0 only, a checkpoint, a model; status 0, nothing of the platform
    imported."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{REPO}"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "fsdp_lab.training", *SMALL, "--folder", str(tmp_path / "out")]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if line.startswith("brought")] == ["brought"] * 2
    facts, epoch = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert (facts["world_size"], facts["num_params"], facts["data_num_train"]) == (2, 139_018, 128)
    assert 0 < epoch["train/loss"] < 3
    assert epoch["memory/rank1/peak_bytes"] > 0
    assert (tmp_path / "out/checkpoints/step_00000002.json").is_file()  # 128 images, 64 a step
    weights = torch.load(tmp_path / "out/model.pt", weights_only=True)["state_dict"]
    assert sum(w.numel() for w in weights.values()) == 139_018


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epoch=3", "training.epoch is not a key"),
        ("training.global_batch_size=63", "training.global_batch_size=63 is not divisible by cluster.num_workers=1"),
    ],
)
def test_bad_input_without_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    """A group of one: status 1, one message."""
    arguments = [override, "training.grad_accum_steps=2", "--folder", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["fsdp_lab.training", *arguments])
    try:
        assert main() == 1
    finally:
        if dist.is_initialized():  # it would end with a process of its own
            dist.destroy_process_group()
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("fsdp_lab.training: ") and words in message
