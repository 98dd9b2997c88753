"""Overrides -> trials. What is expected is written out, or comes from Hydra's own sweeper."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from fsdp_lab.config import SweepConfig, default_num_workers, workers_of
from fsdp_lab.config.compose import cell_trial
from fsdp_lab.config.machine import RunningCluster, ask_clusters
from fsdp_lab.sweep.command import axes_notes
from fsdp_lab.sweep.grid import enumerate_grid, repeat_axis, swept_keys, unescaped
from fsdp_lab.sweep.plan import Plan, plan_sweep
from tests.conftest import run_cli


def cells(*axes: str) -> list[list[str]]:
    """`cells("a=1,2", "b=3")` -> [["a=1", "b=3"], ["a=2", "b=3"]]; values are parted by `|` or a comma."""
    split = []
    for axis in axes:
        key, _, values = axis.partition("=")
        split.append([f"{key}={value}" for value in values.split("|" if "|" in values else ",")])
    return [list(cell) for cell in itertools.product(*split)]


PRINTED = {
    r"s3\://bucket/prefix": "s3://bucket/prefix",
    r"127.0.0.1\:6379": "127.0.0.1:6379",
    r"sqlite\:////srv/my\ runs/a.db": "sqlite:////srv/my runs/a.db",
    r"$\{per_worker\:64\}": "${per_worker:64}",
    r"a\=b\:c": r"a\=b\:c",  # Hydra takes no bare `=`
    r"a\,b": r"a\,b",  # would be two values
    r"C\:\\x": r"C:\x",
    "'a, b'": "'a, b'",
    "fp32": "fp32",
}


def test_an_override_is_printed_as_hydra_and_a_shell_read_it():
    assert [unescaped(f"key={value}") for value in PRINTED] == [f"key={plain}" for plain in PRINTED.values()]
    words = shlex.join(f"key={plain}" for plain in PRINTED.values())
    command = ["bash", "-c", f"printf '%s\\n' {words}"]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    parser = OverridesParser.create()
    assert [parser.parse_override(word).value() for word in read] == [
        parser.parse_override(f"key={value}").value() for value in PRINTED
    ]


TABLE = {
    "choice": (["training.seed=choice(3,1,2)"], cells("training.seed=3,1,2")),
    "range with step": (["training.epochs=range(1,6,2)"], cells("training.epochs=1,3,5")),
    "glob": (["sharding=glob(per_*)"], cells("sharding=per_block,per_layer")),
    "glob without": (["precision=glob(*,exclude=*16*)"], cells("precision=float8,fp32,tf32")),
    "sort": (["training.seed=sort(3,1,2,reverse=true)"], cells("training.seed=3,2,1")),
    "fixed": (["optimizer.lr=1e-3", "sharding=root"], [["optimizer.lr=0.001", "sharding=root"]]),
    "the last axis is the fastest, with a fixed one between": (
        ["training.seed=1,2", "offload=cpu", "optimizer.lr=1e-3,1e-2"],
        cells("training.seed=1,2", "offload=cpu", "optimizer.lr=0.001,0.01"),
    ),
    "added key": (["+hydra.x=1,2"], cells("+hydra.x=1,2")),
    "quoted": (["tracking.experiment='a,b'"], [["tracking.experiment='a,b'"]]),
}


@pytest.mark.parametrize("name", TABLE)
def test_arguments_become_trials_in_the_order_of_hydras_sweeper(parser: OverridesParser, name: str):
    arguments, expected = TABLE[name]
    (hydras,) = BasicSweeper.split_arguments(parser.parse_overrides(arguments), max_batch_size=None)
    assert enumerate_grid(parser, {}, arguments) == expected == hydras


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("choice('1',1)", ["1", 1]),
        ("str(choice(1,2))", ["1", "2"]),
        ("str([1,[2]]),[1,[2]]", [["1", ["2"]], [1, [2]]]),
        ("choice('介绍','a, b','true')", ["介绍", "a, b", "true"]),
        ("choice({a:'1'},{a:1})", [{"a": "1"}, {"a": 1}]),
        ("{a:1},{b:2}", [{"a": 1}, {"b": 2}]),
    ],
)
def test_each_spelling_of_a_value_stays_that_value(parser: OverridesParser, typed: str, values: list[object]):
    """Hydra's own sweeper drops the quotes inside a function."""
    grid = enumerate_grid(parser, {}, [f"model.x={typed}"])
    assert [parser.parse_override(word).value() for (word,) in grid] == values


@pytest.mark.parametrize(
    "typed",
    [
        ["training.seed=1,2", "precision=fp16"],
        ["training.seed=1,2", "offload=none,cpu", "sharding=per_layer,size_based"],
    ],
)
def test_the_order_with_default_axes_is_that_of_hydras_sweeper(parser: OverridesParser, typed: list[str]):
    """Hydra's sweeper puts its `params` before the command line, and a param that is typed too keeps its place."""
    params = ["sharding=ddp,root", "offload=none,cpu"]
    (hydras,) = BasicSweeper.split_arguments(parser.parse_overrides(params + typed), max_batch_size=None)
    assert enumerate_grid(parser, dict(p.split("=") for p in params), typed) == hydras


DEFAULTS = {"sharding": "ddp,root", "offload": "none,cpu"}


@pytest.mark.parametrize(
    ("defaults", "arguments", "expected"),
    [
        (DEFAULTS, [], cells("sharding=ddp,root", "offload=none,cpu")),
        (DEFAULTS, ["offload=cpu", "sharding=root"], [["sharding=root", "offload=cpu"]]),
        (DEFAULTS, ["sharding=root,per_layer"], cells("sharding=root,per_layer", "offload=none,cpu")),
        ({**DEFAULTS, "offload": None}, [], cells("sharding=ddp,root")),
        ({"sharding": None}, [], [[]]),
        (DEFAULTS, ["~offload"], [["sharding=ddp", "~offload"], ["sharding=root", "~offload"]]),
        (DEFAULTS, ["+offload=cpu"], cells("sharding=ddp,root", "+offload=cpu")),
        (DEFAULTS, ["training.seed=1,2"], cells("sharding=ddp,root", "offload=none,cpu", "training.seed=1,2")),
    ],
)
def test_default_axes_are_swept_until_they_are_named(parser, defaults, arguments, expected):
    grid = enumerate_grid(parser, defaults, arguments)
    assert sorted(map(sorted, grid)) == sorted(map(sorted, expected))


def test_swept_keys_are_those_that_differ_in_the_order_typed():
    assert swept_keys(cells("sharding=root", "precision=fp32,bf16", "+a.b=1,2")) == ["precision", "a.b"]
    assert swept_keys([["sharding=root"]]) == swept_keys([]) == []


def test_a_number_of_repeats_is_an_axis_and_runs_may_be_named(parser: OverridesParser):
    assert repeat_axis(parser, SweepConfig(repeats=3), ["sharding=ddp,root"]) == ["repeat=range(3)"]
    for word in ("repeat=0", "repeat=0,1,2", "repeat=range(20)"):
        assert repeat_axis(parser, SweepConfig(), [word]) == []


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
    first, _ = made.notes()
    assert first.startswith("left out 2: sharding=ddp with offload=cpu: DDP keeps every parameter")


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
    "values that make a difference, named twice": (
        ["optimizer.lr=1e-3,1e-2", "training.seed=1,1,2"], ["0.001 1", "0.001 2", "0.01 1", "0.01 2"],
    ),
    "loss scaling with bfloat16": (["precision=fp16,bf16", "precision.loss_scaling=true"], ["fp16 True"]),
    "a size that does not divide the workers": (
        ["sharding=ddp,per_block", "reshard_after_forward=to_size", "reshard_after_forward.size=3"], ["ddp to_size 3"],
    ),
    "a batch that does not divide": (["training.global_batch_size=63,64"], ["64"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_equal_settings_run_once_and_invalid_ones_not_at_all(plan, name: str):
    arguments, kept = KEPT[name]
    made = plan(*arguments)
    assert [" ".join(re.findall("=([^ ]*)", trial)) for trial in short(made)] == kept
    assert bool(made.notes()) == (len(made.folded) + sum(map(len, made.left_out.values())) > 0)


def test_folders_have_no_gaps_and_a_note_counts_duplicates(plan):
    """DDP has one way to reshard, so that two of six cells are trial 0 again."""
    made = plan("sharding=ddp,per_block", POLICIES, "precision=bf16")
    assert [(trial.index, trial.folder.name) for trial in made.trials] == [(n, str(n)) for n in range(4)]
    assert [number for _, number in made.folded] == [0, 0]
    (note,) = made.notes()
    assert note.startswith("2 duplicates left out (sharding=ddp reshard_after_forward=never")
    assert note.endswith("= trial 0)")


def test_hydras_own_resolver_reads_the_trial_that_is_composed(parser: OverridesParser, tmp_path):
    loader = GlobalHydra.instance().config_loader()
    subdir = "hydra.sweep.subdir='${hydra:runtime.choices.sharding}-${hydra:job.num}'"
    master = loader.load_configuration("config", [subdir], RunMode.MULTIRUN)
    cells = [["sharding=root", "tracking.experiment=e${hydra:job.num}"], ["sharding=ddp", "tracking.experiment=x"]]
    trials = [cell_trial(loader.load_sweep_config(master, cell), cell, n, tmp_path) for n, cell in enumerate(cells)]
    assert [trial.folder.name for trial in trials] == ["root-0", "ddp-1"]
    assert [trial.config.tracking.experiment for trial in trials] == ["e0", "x"]


def test_cells_are_composed_for_the_workers_of_the_cluster(
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


@pytest.mark.ci
@pytest.mark.parametrize("words", [("-m", "sharding=root,ddp", "precision=fp32", "offload=none"), ()])
def test_a_dry_run_lists_the_trials_and_leaves_nothing(tmp_path: Path, words: tuple[str, ...]):
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
    axes, swept = {"precision": "fp32,fp16", "offload": "none,cpu"}, ["precision", "offload"]
    first, second = axes_notes(axes, ["offload=none,cpu"], swept, SweepConfig())
    assert "precision=fp32,fp16" in first and "offload=none,cpu" not in first
    assert "offload" in second and "repeats" in second
    assert axes_notes(axes, ["precision=fp16,fp32"], ["precision"], SweepConfig()) == []
    there = SweepConfig()
    there.cluster.address = "head:6379"
    assert axes_notes(axes, swept, swept, there) == [], "what devices are there is not known here"
