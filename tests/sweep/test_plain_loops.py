"""Sweeps beside a plain loop of the user's own code. What is concluded from its figures: report/test_plain_check.py."""

from __future__ import annotations

import csv
import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.conftest import INLINE, run_cli, without
from tests.processes import descendants
from tests.sweep.conftest import started, wait_for

pytestmark = pytest.mark.timeout(400)

# A model that is another one when it is sharded.
CODE = """
import os, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, factor=1.0, seconds=0.0, ends=False):
        super().__init__()
        if not torch.distributed.is_initialized():  # the plain loop's own process
            time.sleep(seconds)
            if ends:
                os._exit(7)
        self.layer, self.head, self.factor = nn.Linear(4, 8), nn.Linear(8, 2), factor

    def forward(self, x):
        sharded = type(self) is not Net
        return self.head(self.layer(x).relu()) * (self.factor if sharded else 1.0)

def data(split):
    draw = torch.Generator().manual_seed(len(split))
    return torch.utils.data.TensorDataset(torch.randn(64, 4, generator=draw), torch.randint(2, (64,), generator=draw))
"""
WORDS = (
    "model=custom", "model._target_=mine.Net", "data=custom", "data._target_=mine.data",
    "training.global_batch_size=16", "training.timing_warmup_steps=0", "training.epochs=1", "sharding=root",
    "check.limit_s=190",  # on busy cores
    *without(INLINE, "model=", "data.", "training.", "check=", "sharding="),
)  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "out/results.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def loops(folder: Path) -> list[dict[str, object]]:
    return list(json.loads((folder / "out/plain_loops.json").read_text())["loops"])


@pytest.mark.ci
def test_a_sweep_agrees_with_its_plain_loop_and_keeps_its_figures(mine: Path):
    """The second sweep takes no process; after a change of the code, or of what it imports, another one runs."""
    done = run_cli(mine, "-m", "optimizer.lr=0.1,0.01", "training.seed=0", *WORDS)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert "has the losses of a plain loop of your model (3 steps, " in done.stdout
    assert [row["plain_loop"] for row in rows(mine)] == ["agrees", ""] and not loops(mine)[0]["kept"]
    again = [*without(WORDS, "hydra."), "hydra.sweep.dir=again"]
    run_cli(mine, "-m", "optimizer.lr=0.1", *again)
    assert json.loads((mine / "again/plain_loops.json").read_text())["loops"][0]["kept"]
    (mine / "mine.py").write_text(f"{CODE}\n# changed\n")
    run_cli(mine, "-m", "optimizer.lr=0.1", *without(again, "hydra."), "hydra.sweep.dir=third")
    assert not json.loads((mine / "third/plain_loops.json").read_text())["loops"][0]["kept"]


def test_a_model_in_bfloat16_has_a_plain_loop_of_its_own(mine: Path):
    words = ("sharding=ddp", "precision=fp32,bf16,bf16_pure", *without(WORDS, "sharding=", "precision="))
    done = run_cli(mine, "-m", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["plain_loop"] for row in rows(mine)] == ["agrees"] * 3
    assert [loop["eps"] for loop in loops(mine)] == [2**-23, 2**-7]


def test_a_model_that_is_another_one_when_it_is_sharded_is_found(mine: Path):
    """By its plain loop: DDP shards nothing. Without a setting that agrees the sweep has failed, and so has a trial."""
    words = without(WORDS, "sharding=", "hydra.")
    both = run_cli(mine, "-m", "model.factor=2.0", "sharding=ddp,root", *words, "hydra.sweep.dir=out")
    assert both.returncode == 0, both.stdout + both.stderr
    assert [row["plain_loop"] for row in rows(mine)] == ["agrees", "differs"]
    found = "sharding=root: the loss before the first step is"
    assert found in both.stdout and "Recommended: sharding=ddp" in both.stdout
    wrong = run_cli(mine, "-m", "model.factor=2.0", "sharding=root", *words, "hydra.sweep.dir=wrong")
    assert wrong.returncode == 1 and "to retry failed trials" not in wrong.stdout
    alone = run_cli(mine, "model.factor=2.0", "sharding=root", *words, "hydra.run.dir=alone")
    assert alone.returncode == 1 and "it trains another model" in wrong.stdout and "it trains another" in alone.stdout


@pytest.mark.full
def test_kept_figures_that_a_trial_does_not_have_are_computed_again(mine: Path):
    """What they depend on has changed without the code: here a file that an earlier sweep wrote."""
    run_cli(mine, "-m", "optimizer.lr=0.1", *WORDS)
    (file,) = (mine / "outputs/plain_loops").iterdir()
    content = json.loads(file.read_text())
    content["loop"]["figures"]["train/first_loss"] *= 2
    file.write_text(json.dumps(content))
    done = run_cli(mine, "-m", "optimizer.lr=0.1", *without(WORDS, "hydra."), "hydra.sweep.dir=again")
    assert done.returncode == 0 and "has the losses of a plain loop of your model" in done.stdout, (
        done.stdout + done.stderr
    )
    assert not json.loads((mine / "again/plain_loops.json").read_text())["loops"][0]["kept"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("model.ends=true",), "its process ended with exit code 7"),
        pytest.param(
            ("model.seconds=300", "check.limit_s=0.5"),
            "its process did not answer within .*; check.limit_s=0.5 is over",
            marks=pytest.mark.ci,
        ),
        (("init=meta",), "init=meta draws other first weights"),
        (("check=off",), ""),
    ],
)
def test_a_plain_loop_that_does_not_end_costs_no_sweep(mine: Path, words: tuple[str, ...], why: str):
    done = run_cli(mine, "-m", *WORDS, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = "not compared with a plain loop: "
    assert re.search(said + why, done.stdout.replace("\n", " ")) if why else said not in done.stdout, done.stdout
    assert rows(mine)[0]["plain_loop"] == ""


@pytest.mark.ci
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_sweep_leaves_no_plain_loop_behind(mine: Path, number: signal.Signals, status: int):
    with started(mine, "-m", "model.seconds=300", *WORDS) as process:
        wait_for((mine / "out/plain_loop.log").exists, process)
        mine_too = descendants(process.pid)
        assert mine_too
        process.send_signal(number)
        assert process.wait(60) == status
        assert psutil.wait_procs(mine_too, timeout=30)[1] == []
    assert not (mine / "out/0/trial.json").exists()


@pytest.mark.full
def test_a_smaller_model_is_compared_in_each_layout(mine: Path):
    """One that is right, in place of the sweep's own, which is another one when it is sharded."""
    words = without(WORDS, "sharding=")
    done = run_cli(
        mine,
        "-m",
        "model.factor=2.0",
        "check.keys=[model.factor=1.0]",
        "sharding=ddp,root",
        *words,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 settings have the losses of a plain loop of your model (3 steps, " in done.stdout
    assert "; the smaller model of check.keys)." in done.stdout
    assert [row["plain_loop"] for row in rows(mine)] == ["agrees", "agrees"]
