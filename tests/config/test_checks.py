"""What the rules between the keys let pass, and what follows from the keys. tests/messages.txt has what they refuse."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.config import ConfigError, SweepConfig, UserError
from fsdp_lab.config.axes import Where, notes
from fsdp_lab.config.axes.tensor_parallel import check_nodes
from fsdp_lab.config.checks import check_local_capacity
from fsdp_lab.config.machine import loader_workers_of, ray_folder
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.machine import hardware
from tests.ranks import config


@pytest.mark.parametrize(
    ("gpus", "cores", "each", "workers", "remedies"),
    [
        (8, 96, 16, 8, "cluster.num_workers=6, or cluster.cpus_per_worker=12"),
        (0, 2, None, 7, "cluster.num_workers=2, or cluster.cpus_per_worker=0.28"),  # 2 / 7, rounded down
        (2, 96, None, 3, "cluster.num_workers=2, or hide"),
    ],
)
def test_more_workers_than_this_machine_can_place(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, each: float | None, workers: int, remedies: str
):
    """What the message suggests is accepted."""
    monkeypatch.setattr(hardware, "num_gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "num_cpus", lambda: cores)
    cluster = ClusterConfig(cpus_per_worker=each)
    with pytest.raises(ConfigError, match=re.escape(f"; use {remedies}")):
        check_local_capacity(cluster, workers)
    check_local_capacity(replace(cluster, address="auto"), workers)
    if fewer := re.search(r"num_workers=(\d+)", remedies):
        check_local_capacity(cluster, int(fewer[1]))
    if less := re.search(r"cpus_per_worker=([\d.]+)", remedies):
        check_local_capacity(replace(cluster, cpus_per_worker=float(less[1])), workers)


@pytest.mark.parametrize(
    ("tp", "nodes", "wrong"),
    [
        (2, "AAAABB", None),
        (2, "AAABBB", "ranks 2 to 3 divide each layer among them, but are on 2 nodes"),
        (4, "AABBCCCC", "ranks 0 to 3 .* on 2 nodes"),
        (3, "AAABCD", "ranks 3 to 5 .* on 3 nodes.* a multiple of 3 workers on each node"),
        (1, "ABC", None),
    ],
)
def test_a_tensor_parallel_group_stays_on_its_node(tp: int, nodes: str, wrong: str | None):
    with pytest.raises(UserError, match=wrong) if wrong else nullcontext():
        check_nodes(tp, nodes)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("sharding=per_block offload=none", ""),
        ("sharding=per_block offload=cpu", "offload=cpu has no effect on a CPU"),
        ("precision=tf32", "precision=tf32 has no effect on a CPU"),
        ("sharding=root", "sharding=per_block gathers block by block"),
        ("sharding=ddp reshard_after_forward=never", "reshard_after_forward has no effect with sharding=ddp"),
    ],
)
def test_settings_without_an_effect_have_a_note(words: str, named: str):
    trial = config(*words.split())
    said = [*notes(trial, Where(cuda=False))]
    assert len(said) == bool(named) and all(named in note for note in said)


def test_every_core_but_the_workers_own_loads_data_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """At most four: of 96 cores each of eight workers has 12, of 16 it has two, of 8 one."""
    monkeypatch.setattr(hardware, "num_gpus", lambda: 8)
    for cores, processes in ((96, 4), (16, 1), (8, 0)):
        monkeypatch.setattr(hardware, "num_cpus", lambda cores=cores: cores)
        assert loader_workers_of(SweepConfig()) == processes


def test_a_folder_too_long_for_rays_sockets_is_named(monkeypatch: pytest.MonkeyPatch):
    """The kernel says how long: the longest that is taken holds a socket where Ray has it, one byte more does not."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", f"/tmp/{'x' * 60}")
    with pytest.raises(UserError, match=r"^TMPDIR=/tmp/x{60} has 65 bytes, and .* may be \d+; set RAY_TMPDIR") as error:
        ray_folder()
    longest = int(re.findall(r"may be (\d+)", str(error.value))[0])
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for length, allowed in ((longest, nullcontext()), (longest + 1, pytest.raises(OSError, match="too long"))):
            folder = Path(short, "x" * (length - len(short) - 1))
            sockets = folder / "ray" / f"session_2026-11-26_16-44-27_474288_{os.getpid()}" / "sockets"
            sockets.mkdir(parents=True)
            with socket.socket(socket.AF_UNIX) as there, allowed:
                there.bind(str(sockets / "plasma_store"))
            monkeypatch.setenv("RAY_TMPDIR", str(folder))
            with nullcontext() if length == longest else pytest.raises(UserError, match=r"^RAY_TMPDIR="):
                assert ray_folder() == folder
