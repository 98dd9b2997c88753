"""Cells of a grid -> the trials that are run, which `dry_run=true` lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from fsdp_lab.config import SweepConfig, default_num_workers, workers_of
from fsdp_lab.config.compose import cell_trial
from fsdp_lab.config.machine import RunningCluster, ask_clusters
from fsdp_lab.sweep.command import axes_notes
from fsdp_lab.sweep.grid import enumerate_grid
from fsdp_lab.sweep.plan import Plan, plan_sweep
from tests.conftest import run_cli


@pytest.fixture
def plan(parser: OverridesParser, compose_trial) -> Callable[..., Plan]:
    def make(*arguments: str, defaults: Mapping[str, str] | None = None) -> Plan:
        workers = "cluster.num_workers=2"  # the same plan on a machine with GPUs
        return plan_sweep(enumerate_grid(parser, defaults or {}, [*arguments, workers]), compose_trial)

    return make


def short(plan: Plan) -> list[str]:
    return [trial.name.removesuffix(" cluster.num_workers=2") for trial in plan.trials]


def test_ddp_with_offload_is_left_out_once_with_its_reason(plan):
    made = plan("sharding=ddp,per_block", "offload=none,cpu,cpu_unpinned", "precision=fp32,bf16")
    assert len(made.trials) == 2 + 6
    assert not any("sharding=ddp offload=cpu" in name for name in short(made))
    assert [len(cells) for cells in made.left_out.values()] == [2, 2]
    notes = made.notes()
    assert len(notes) == 2
    assert notes[0].startswith("left out 2: sharding=ddp with offload=cpu: DDP keeps every parameter")
    assert "use offload=none" in notes[0]


POLICIES = "reshard_after_forward=always,never,default"
# What is typed; the trials that are kept, by the values that differ, in order.
KEPT = {
    "ddp has one way to reshard": (
        ["sharding=ddp,per_block", POLICIES],
        ["ddp always", "per_block always", "per_block never", "per_block default"],
    ),
    "for root default is never": (
        ["sharding=root,per_block", "reshard_after_forward=default,never"],
        ["root default", "per_block default", "per_block never"],
    ),
    "a size of one is never, and of all always": (
        ["reshard_after_forward=never,always,to_size", "reshard_after_forward.size=1,2"],
        ["never 1", "always 1"],
    ),
    "what is named twice": (["training.seed=1,1,2"], ["1", "2"]),
    "values that make a difference": (
        ["sharding=ddp,root", "optimizer.lr=1e-3,1e-2", "training.seed=0,1"],
        [f"{sharding} {lr} {seed}" for sharding in ("ddp", "root") for lr in (0.001, 0.01) for seed in (0, 1)],
    ),
    "loss scaling with bfloat16": (["precision=fp16,bf16", "precision.loss_scaling=true"], ["fp16 True"]),
    "a size that does not divide the workers": (
        ["sharding=ddp,per_block", "reshard_after_forward=to_size", "reshard_after_forward.size=3"], ["ddp to_size 3"],
    ),
    "a batch that does not divide": (["training.global_batch_size=63,64"], ["64"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_equal_settings_run_once_and_those_without_a_meaning_are_left_out(plan, name: str):
    arguments, kept = KEPT[name]
    made = plan(*arguments)
    assert [" ".join(re.findall("=([^ ]*)", trial)) for trial in short(made)] == kept
    assert bool(made.notes()) == (len(made.folded) + sum(map(len, made.left_out.values())) > 0)


def test_duplicates_are_counted_in_a_note_that_has_what_differs(plan):
    made = plan("sharding=ddp,per_block", POLICIES, "precision=bf16", "optimizer.lr=0.1")
    assert [number for _, number in made.folded] == [0, 0]
    (note,) = made.notes()
    assert note.startswith("2 duplicates left out (sharding=ddp reshard_after_forward=never")
    assert note.endswith("= trial 0)")


def test_folder_numbers_run_without_gaps(plan):
    made = plan("sharding=ddp,root,per_block", "offload=none,cpu", "reshard_after_forward=default,never")
    assert made.left_out and made.folded
    assert [trial.index for trial in made.trials] == list(range(len(made.trials)))
    assert [trial.folder.name for trial in made.trials] == [str(n) for n in range(len(made.trials))]
    assert [number for _, number in made.folded] == [0, 1, 2]  # the trial that stands for each


def test_hydras_own_resolver_reads_the_trial_that_is_composed(parser: OverridesParser, tmp_path):
    loader = GlobalHydra.instance().config_loader()
    subdir = "hydra.sweep.subdir='${hydra:runtime.choices.sharding}-${hydra:job.num}'"
    master = loader.load_configuration("config", [subdir], RunMode.MULTIRUN)
    cells = [["sharding=root", "tracking.experiment=e${hydra:job.num}"], ["sharding=ddp", "tracking.experiment=x"]]
    trials = [cell_trial(loader.load_sweep_config(master, cell), cell, n, tmp_path) for n, cell in enumerate(cells)]
    assert [trial.folder.name for trial in trials] == ["root-0", "ddp-1"]
    assert [trial.config.tracking.experiment for trial in trials] == ["e0", "x"]


def test_cells_are_composed_and_checked_for_the_workers_of_the_cluster(
    parser: OverridesParser, compose_trial, monkeypatch: pytest.MonkeyPatch
):
    """Of eight where null asks it, once; this machine has others."""
    asked: list[str] = []
    monkeypatch.setattr("fsdp_lab.config.machine._clusters", {})
    monkeypatch.setattr("fsdp_lab.config.machine._asks", [])
    ask_clusters(lambda address: asked.append(address) or RunningCluster(8, False))  # type: ignore[func-returns-value]

    def plan(replicas: str, *arguments: str) -> Plan:
        words = ("training.global_batch_size=${per_worker:8}", f"sharding.dp_replicate={replicas}", *arguments)
        return plan_sweep(enumerate_grid(parser, {}, words), compose_trial)

    made = plan("1,3,8", "cluster.address=head:6379")
    assert [(t.config.sharding.dp_replicate, t.config.training.global_batch_size) for t in made.trials] == [
        (1, 64), (8, 64)
    ]  # fmt: skip
    assert [workers_of(trial.config) for trial in made.trials] == [8, 8]
    (reason,) = made.left_out
    assert "sharding.dp_replicate=3 does not divide cluster.num_workers=8" in reason
    assert asked == ["head:6379"]
    typed = plan("1,3,8", "cluster.address=other:6379", "cluster.num_workers=3")
    assert [t.config.training.global_batch_size for t in typed.trials] == [24, 24]
    here = plan("1")
    assert here.trials[0].config.training.global_batch_size == 8 * default_num_workers()
    assert asked == ["head:6379"]


AXES = {"precision": "fp32,fp16", "offload": "none,cpu"}


@pytest.mark.ci
@pytest.mark.parametrize("words", [("-m", "sharding=root,ddp", "precision=fp32", "offload=none"), ()])
def test_it_lists_the_trials_and_leaves_nothing(tmp_path: Path, words: tuple[str, ...]):
    done = run_cli(tmp_path, *words, "dry_run=true")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if words:
        assert lines[0] == "3 trials: sharding × reshard_after_forward", "DDP has one way to reshard"
        cells = (("root", "always"), ("root", "never"), ("ddp", "always"))
        assert lines[-3:] == [f"  {n}  sharding={s} reshard_after_forward={r}" for n, (s, r) in enumerate(cells)]
    else:
        assert len(lines) == 1 and lines[0].startswith("1 trial: sharding=per_block")
    assert not any(tmp_path.iterdir())


def test_axes_that_nobody_typed_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.sweep.command.num_gpus", lambda: 0)
    swept = ["precision", "offload"]
    first, second = axes_notes(AXES, ["offload=none,cpu"], swept, SweepConfig())
    assert "precision=fp32,fp16" in first and "offload=none,cpu" not in first
    assert "offload" in second and "repeats" in second
    assert axes_notes(AXES, ["precision=fp16,fp32"], ["precision"], SweepConfig()) == []
    there = SweepConfig()
    there.cluster.address = "head:6379"
    assert axes_notes(AXES, swept, swept, there) == [], "what devices are there is not known here"
