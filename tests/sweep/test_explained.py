"""A sweep in which a GPU's memory runs out: its report has the explanation. The error is raised by the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.answer import answer
from fsdp_lab.report.page import to_html
from tests import forked
from tests.conftest import HERE
from tests.folders import SweepFolder
from tests.report.sweeps import sweep, trial
from tests.servers import lay_store

MODEL = """
import torch
from torch import nn


class Block(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))
        self.head = nn.Linear(64, 10)
        self.passes = 0

    def forward(self, images):
        x = images.flatten(1)
        for block in self.blocks:
            x = x + block(x)
        self.passes += 1
        if type(self).__name__ == "FSDPNet" and self.passes == 3 and type(x) is torch.Tensor:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which "
                "2.00 MiB is free. Including non-PyTorch memory, this process has 62.00 MiB memory in use. Of the "
                "allocated memory 40.00 MiB is allocated by PyTorch, and 3.00 MiB is reserved by PyTorch but "
                "unallocated."
            )
        return self.head(x)
"""
SAID = "asked for 20.00 MiB of 64.00 MiB: 2.000 MiB free, 40.00 MiB in tensors of PyTorch, 3.000 MiB cached by PyTorch"


@pytest.mark.ci
def test_a_trial_without_memory_is_explained_once_a_setting(tmp_path: Path):
    (tmp_path / "big.py").write_text(MODEL)
    lay_store(tmp_path)
    words = (
        "-m", "model._target_=big.Net", "model.block_classes=[big.Block]", "sharding=root", "precision=fp32",
        "offload=none", "reshard_after_forward=never", "training.epochs=1", "data.num_train=256", "training.seed=0,1",
        "check=off", *HERE,
    )  # fmt: skip
    done = forked.run(tmp_path, "fsdp_lab", *words, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    made = SweepFolder(tmp_path / "out")
    assert made.statuses == ["oom", "oom"], done.stdout
    told = (made.trials[0].path / "out_of_memory.txt").read_text()
    assert SAID in told and "the setting needs" in told and "forecasting" not in told
    assert not (made.trials[1].path / "out_of_memory.txt").exists(), "the same setting"
    assert SAID in " ".join(done.stdout.split()) and SAID in (made.path / "report.html").read_text()


def test_the_report_has_the_explanation_of_a_trials_folder(tmp_path: Path):
    (tmp_path / "out_of_memory.txt").write_text("asked for <b>20.00 MiB\nfits with sharding=per_block")
    lacks = trial(4, ("per_block", "fp32", "oom", 0, 0.0, 0.0))
    lacks.folder = tmp_path
    made: SweepRecord = sweep([trial(0), lacks])
    assert "<br>asked for &lt;b&gt;20.00 MiB<br>fits with sharding=per_block" in to_html(made, answer(made))
