"""What the rules between the keys let pass, and what follows from the keys. tests/messages.txt has what they refuse."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.config import (
    ConfigError,
    SweepConfig,
    UserError,
    cpu_notes,
    effective_settings,
    is_address,
    sharding_notes,
)
from fsdp_lab.config.checks import check_cluster, check_local_capacity
from fsdp_lab.config.machine import loader_workers_of, ray_folder
from fsdp_lab.config.notes import node_notes
from fsdp_lab.config.rules import check_trial
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.machine import hardware
from tests.ranks import read_config


def trial(*overrides: str) -> SweepConfig:
    return read_config(None, list(overrides))


DDP = "sharding.granularity=ddp"
TO_SIZE = "reshard_after_forward.policy=to_size"


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        ([], 2),
        (["training.seed=0"], 2),
        (["data.num_train=null"], 2),
        (["optimizer.beta1=0.0"], 2),
        (["sharding.dp_replicate=4"], 8),
        ([TO_SIZE, "reshard_after_forward.size=2", "sharding.dp_replicate=2"], 4),
        ([DDP, TO_SIZE], 2),  # DDP reshards nothing: the size is not looked at
        (["model.patch_size=4"], 2),
        (["optimizer.name=sgd", "optimizer.momentum=0.9"], 2),
        ([DDP, "optimizer.name=sgd", "optimizer.implementation=fused"], 2),
        (["precision.loss_scaling=true", "precision.param_dtype=float16"], 2),
        (["training.global_batch_size=64", "training.grad_accum_steps=4"], 16),
    ],
)
def test_what_has_a_meaning_passes(overrides: list[str], workers: int) -> None:
    check_trial(trial(*overrides), workers)


ROOT = "sharding.granularity=root"
ALWAYS, NEVER, DEFAULT = (f"reshard_after_forward.policy={p}" for p in ("always", "never", "default"))
SIZE_1, SIZE_2, SIZE_4 = ([TO_SIZE, f"reshard_after_forward.size={n}"] for n in (1, 2, 4))


@pytest.mark.parametrize(
    ("one", "other", "workers", "equal"),
    [
        ([DDP, ALWAYS], [DDP, NEVER], 2, True),
        ([DDP, DEFAULT], [DDP, *SIZE_2], 2, True),
        ([ALWAYS], [NEVER], 2, False),
        ([DEFAULT], [NEVER], 2, False),
        ([DEFAULT], [ALWAYS], 2, False),  # the root's own parameters
        ([ROOT, DEFAULT], [ROOT, NEVER], 2, True),
        ([ROOT, DEFAULT], [ROOT, ALWAYS], 2, False),
        (SIZE_1, [NEVER], 4, True),
        (SIZE_4, [ALWAYS], 4, True),
        (SIZE_2, [ALWAYS], 4, False),
        (SIZE_2, SIZE_4, 4, False),
        ([*SIZE_2, "sharding.dp_replicate=2"], [ALWAYS, "sharding.dp_replicate=2"], 4, True),
        ([ALWAYS], [ALWAYS, "optimizer.lr=0.1"], 2, False),
        ([ALWAYS, "cluster.num_workers=2"], [ALWAYS], 2, True),  # null stands for two here
    ],
)
def test_effective_settings(one: list[str], other: list[str], workers: int, equal: bool) -> None:
    same = effective_settings(trial(*one), workers) == effective_settings(trial(*other), workers)
    assert same is equal


@pytest.mark.parametrize("target", ["none", "cpu", "cpu_unpinned"])
def test_cpu_notes(target: str) -> None:
    notes = list(cpu_notes(trial(f"offload.target={target}")))
    assert len(notes) == (target != "none")
    assert all(f"offload={target} has no effect on a CPU" in note for note in notes)


@pytest.mark.parametrize(("nodes", "split"), [("0000", 0), ("0011", 0), ("0001", 1), ("00010111", 2), ("01010101", 4)])
def test_a_shard_group_on_several_nodes_has_a_note(nodes: str, split: int) -> None:
    """Groups of two ranks."""
    sharding = trial("sharding=per_block", f"sharding.dp_replicate={len(nodes) // 2}").sharding
    notes = list(node_notes(sharding, nodes))
    assert len(notes) == bool(split)
    assert not split or f"{split} of {len(nodes) // 2} shard groups, each of 2 ranks, are on more than" in notes[0]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([ROOT], ["sharding=root", "sharding=per_block"]), ([DDP, NEVER], ["reshard_after_forward", "sharding=ddp"]),
        ([DDP], []), (["sharding.granularity=per_block"], []), (["sharding.granularity=per_layer", NEVER], []),
    ],
)  # fmt: skip
def test_sharding_notes(overrides: list[str], named: list[str]) -> None:
    notes = list(sharding_notes(trial(*overrides)))
    assert len(notes) == (len(named) > 0) and all(name in note for note in notes for name in named)


@pytest.mark.parametrize(
    ("gpus", "cores", "cluster", "workers", "words"),
    [
        (0, 2, ClusterConfig(), 4, "=4 needs 4 CPUs (cluster.cpus_per_worker=1 each), this machine has 2; use cluster."
         "num_workers=2, or cluster.cpus_per_worker=0.5, so"),
        (8, 96, ClusterConfig(cpus_per_worker=16), 8, "=8 needs 128 CPUs (cluster.cpus_per_worker=16 each), this"),
        (8, 4, ClusterConfig(), 8, "=8 needs 8 CPUs (cluster.cpus_per_worker=1 each), this machine has 4; use cluster."
         "num_workers=4, or cluster.cpus_per_worker=0.5, so"),
        (0, 2, ClusterConfig(), 7, "=7 needs 7 CPUs (cluster.cpus_per_worker=1 each), this machine has 2; use cluster."
         "num_workers=2, or cluster.cpus_per_worker=0.28, so"),
        (0, 2, ClusterConfig(cpus_per_worker=9), 1, "=1 needs 9 CPUs (cluster.cpus_per_worker=9 each), this machine has"
         " 2; use cluster.cpus_per_worker=2."),
        (2, 96, ClusterConfig(), 3, "=3 needs a GPU for each, this machine has 2; use cluster.num_workers=2, or hide"),
    ],
)  # fmt: skip
def test_more_workers_than_this_machine_can_place(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, cluster: ClusterConfig, workers: int, words: str
) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "num_cpus", lambda: cores)
    with pytest.raises(ConfigError, match=re.escape(f"cluster.num_workers{words}")):
        check_local_capacity(cluster, workers)
    check_local_capacity(replace(cluster, address="auto"), workers)
    if suggested := re.search(r"cluster\.cpus_per_worker=([\d.]*\d)(?:\.$|, so)", words):
        check_local_capacity(replace(cluster, cpus_per_worker=float(suggested[1])), workers)
    if (cluster.cpus_per_worker or 1) <= cores:
        check_local_capacity(cluster, 1)


@pytest.mark.parametrize(
    ("gpus", "cores", "settings", "workers"),
    [(0, 64, (), 0), (8, 96, (), 4), (8, 16, (), 1), (8, 8, (), 0), (8, 96, ("cluster.cpus_per_worker=3.5",), 2),
     (8, 96, ("data.loader_workers=0",), 0), (0, 2, ("data.loader_workers=2",), 2)],
)  # fmt: skip
def test_loader_workers_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, settings: tuple[str, ...], workers: int
) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "num_cpus", lambda: cores)
    assert loader_workers_of(trial(*settings)) == workers


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("s3://bucket", True), ("s3://my.bucket-1/a/b_c=1", True), ("gs://bucket/prefix", True), (None, False),
        ("shared", False), ("/mnt/shared", False),
    ],
)  # fmt: skip
def test_a_bucket_with_a_prefix_is_an_address_and_a_folder_is_none(place: str | None, expected: bool):
    check_cluster(ClusterConfig(storage_path=place))
    assert is_address(place) is expected


def test_a_folder_whose_path_is_too_long_for_rays_sockets_is_named(monkeypatch: pytest.MonkeyPatch):
    """The kernel says how long: the longest that is taken holds a socket where Ray has it, one byte more does not."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", f"/tmp/{'x' * 60}")
    with pytest.raises(
        UserError, match=r"^TMPDIR=/tmp/x{60} has 65 bytes, and .* there may be \d+; set RAY_TMPDIR"
    ) as error:
        ray_folder()
    longest = int(re.findall(r"may be (\d+)", str(error.value))[0])
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for length in (longest, longest + 1):
            folder = Path(short, "x" * (length - len(short) - 1))
            sockets = folder / "ray" / f"session_2026-11-26_16-44-27_474288_{os.getpid()}" / "sockets"
            sockets.mkdir(parents=True)
            monkeypatch.setenv("RAY_TMPDIR", str(folder))
            with socket.socket(socket.AF_UNIX) as there:
                if length == longest:
                    there.bind(str(sockets / "plasma_store"))
                    assert ray_folder() == folder
                    continue
                with pytest.raises(OSError, match="too long"):
                    there.bind(str(sockets / "plasma_store"))
            with pytest.raises(UserError, match=r"^RAY_TMPDIR="):
                ray_folder()
