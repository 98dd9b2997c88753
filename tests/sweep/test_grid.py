"""Overrides -> trials. What is expected is written out, or comes from Hydra's own sweeper."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from fsdp_lab.config import conf_dir, default_num_workers
from fsdp_lab.config.compose import cell_trial, plain
from fsdp_lab.config.machine import RunningCluster, ask_clusters
from fsdp_lab.sweep.grid import Cells, enumerate_grid, swept_keys
from fsdp_lab.sweep.plan import Plan, plan_sweep
from tests.conftest import run_cli


@pytest.mark.parametrize(
    "typed",
    [
        "training.seed=choice(3,1,2)",
        "training.epochs=range(1,6,2)",
        "precision=glob(*,exclude=*16*)",
        "training.seed=sort(3,1,2,reverse=true)",
        "optimizer.lr=1e-3 sharding=root",
        "training.seed=1,2 offload=cpu optimizer.lr=1e-3,1e-2",
        "training.seed=1,2 offload=none,cpu sharding=per_layer,size_based",
        "+hydra.x=1,2",
        "tracking.experiment='a,b'",
    ],
)
def test_arguments_become_trials_in_the_order_of_hydras_sweeper(parser: OverridesParser, typed: str):
    """It puts its `params` before the command line, and a param that is typed too keeps its place."""
    defaults = {"sharding": "ddp,root", "offload": "none,cpu"}
    for params in ({}, defaults):
        words = [*(f"{key}={values}" for key, values in params.items()), *typed.split()]
        (hydras,) = BasicSweeper.split_arguments(parser.parse_overrides(words), max_batch_size=None)
        assert enumerate_grid(parser, params, typed.split()) == hydras


def test_keys_are_compared_by_their_names():
    """In lines of `trials.jsonl` that people have written, too."""
    cells = [["a=1", "b=1", "+c=1"], ["b=2", "a=1"], ["a=1", "b=1", "c=1", "d=1"]]
    assert swept_keys(cells) == ["b", "c", "d"] and swept_keys(cells[:1]) == swept_keys([]) == []


def test_default_axes_are_swept_until_they_are_named(parser: OverridesParser):
    defaults = {"sharding": "ddp,root", "offload": "none,cpu"}
    for word in ("offload=cpu", "+offload=cpu", "~offload"):
        cells = [["sharding=ddp", word], ["sharding=root", word]]
        assert enumerate_grid(parser, defaults, [word]) == cells
    assert enumerate_grid(parser, {**defaults, "offload": None}, []) == [["sharding=ddp"], ["sharding=root"]]
    assert enumerate_grid(parser, {"sharding": None}, []) == [[]]


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


FOUR = ("cluster.num_workers=4", "cluster.cpus_per_worker=0.1")  # the same plan on every machine


@pytest.fixture
def plan(parser: OverridesParser, compose_trial) -> Callable[..., Plan]:
    def make(*arguments: str) -> Plan:
        return plan_sweep(enumerate_grid(parser, {}, [*arguments, *FOUR]), compose_trial)

    return make


def short(plan: Plan) -> list[str]:
    return [trial.name.removesuffix(f" {' '.join(FOUR)}") for trial in plan.trials]


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
        ["reshard_after_forward=never,always,to_size", "reshard_after_forward.size=1,2,4"],
        ["never 1", "always 1", "to_size 2"],
    ),
    "of two replicas each has two workers": (
        ["sharding.dp_replicate=2", "reshard_after_forward=always,to_size", "reshard_after_forward.size=2"],
        ["2 always 2"],
    ),
    "a loss is compiled if the blocks are": (
        ["data=pydoc", "model=lm_tiny", "task=language", "compile=false,true", "compile_loss=true,false"],
        [f"pydoc lm_tiny language {both}" for both in ("False True", "True True", "True False")],
    ),
    "a loss in chunks is not compiled": (
        [
            "model=lm_tiny", "data=pydoc", "task=language", "task.loss_chunks=2",
            "compile=true", "compile_loss=true,false",
        ],
        ["lm_tiny pydoc language 2 True True"],
    ),
    "a loss of classes is not compiled": (["compile=true", "compile_loss=true,false"], ["True True"]),
    "values that are named twice": (["training.seed=1,1,2"], ["1", "2"]),
    "loss scaling with bfloat16": (["precision=fp16,bf16", "precision.loss_scaling=true"], ["fp16 True"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_equal_settings_run_once_and_invalid_ones_not_at_all(plan, name: str):
    arguments, kept = KEPT[name]
    made = plan(*arguments)
    assert [" ".join(re.findall("=([^ ]*)", trial)) for trial in short(made)] == kept
    assert bool(made.notes()) == (len(made.folded) + sum(map(len, made.left_out.values())) > 0)


def test_equal_settings_name_the_trial_that_runs(plan):
    made = plan("sharding=per_block,ddp", "reshard_after_forward=always,never")
    assert made.folded == [("sharding=ddp reshard_after_forward=never", 2)]
    (note,) = plan("training.seed=2,1,1,1,1,1,1,1,1").notes()
    assert note.startswith("7 duplicates left out (") and note.count("training.seed=1 = trial 1") == 6
    assert note.endswith("; and 1 more)")


PRESETS = sorted(file.stem for file in (conf_dir() / "experiment").glob("*.yaml"))
KEYS = (  # of cells that share their options, so that one may have left a key to the next
    ("training.epochs=3", "model.table={a:{b:1}}", "optimizer.lr=${training.epochs}", "repeat=1"),
    ("model.table.c=[1,2]", "training.global_batch_size=${per_worker:4}", "tracking.experiment='a=b,c'"),
    ("model.a=1", "+model.b=2", "~model.a", "model={a:3}", "model.a=1", "model.b=null", "repeat=2"),
)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_cell_is_what_hydra_composes(parser: OverridesParser, preset: str):
    loader = GlobalHydra.instance().config_loader()
    master = loader.load_configuration("config", ["hydra.job.name=x"], RunMode.MULTIRUN)
    asked: list[tuple[str, ...]] = []

    def by_hydra(words: Sequence[str]) -> DictConfig:
        asked.append((*words,))
        return loader.load_sweep_config(master, list(words))

    cells = Cells(parser, by_hydra)
    for keys in KEYS:
        words = (keys[0], f"experiment={preset}", *keys[1:], "sharding=root")
        made, hydras = cells.config(words), by_hydra(words)
        assert plain(made) == plain(hydras)
        assert cell_trial(made, words, 3, Path()) == cell_trial(hydras, words, 3, Path())
    assert asked.count((f"experiment={preset}", "sharding=root")) == 1


@pytest.mark.parametrize(
    "word", ["training.epochs=x", "training.epoch=1", "sharding=rot", "+training.epochs=1", "a.b=1"]
)
def test_what_hydra_refuses_is_refused_in_its_words(parser: OverridesParser, word: str):
    loader = GlobalHydra.instance().config_loader()
    master = loader.load_configuration("config", [], RunMode.MULTIRUN)
    cells = Cells(parser, lambda words: loader.load_sweep_config(master, list(words)))
    words = ["optimizer.lr=0.1", word]
    with pytest.raises(HydraException) as hydras:
        loader.load_sweep_config(master, words)
    with pytest.raises(type(hydras.value), match=re.escape(str(hydras.value))):
        cells.config(words)


def test_hydras_own_resolver_reads_the_trial_that_is_composed(parser: OverridesParser, tmp_path):
    loader = GlobalHydra.instance().config_loader()
    subdir = "hydra.sweep.subdir='${hydra:runtime.choices.sharding}-${hydra:job.num}'"
    master = loader.load_configuration("config", [subdir], RunMode.MULTIRUN)
    cells = [["sharding=root", "tracking.experiment=e${hydra:job.num}"], ["sharding=ddp", "tracking.experiment=x"]]
    composed = Cells(parser, lambda words: loader.load_sweep_config(master, list(words)))
    trials = [cell_trial(composed.config(cell), cell, n, tmp_path) for n, cell in enumerate(cells)]
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
    assert [t.config.sharding.dp_replicate for t in made.trials] == [1, 8]
    assert [t.config.training.global_batch_size for t in made.trials] == [64, 64]
    (reason,) = made.left_out
    assert "sharding.dp_replicate=3 does not divide cluster.num_workers=8" in reason
    assert asked == ["head:6379"]
    typed = plan("1,3,8", "cluster.address=other:6379", "cluster.num_workers=3")
    assert [t.config.training.global_batch_size for t in typed.trials] == [24, 24]
    divided = plan(
        "1",
        "cluster.address=other:6379",
        "cluster.num_workers=8",
        "sharding.tp=1,2,3",
        "model.tp_plan={a:colwise,b:rowwise}",
    )
    assert [t.config.training.global_batch_size for t in divided.trials] == [64, 32], "two workers share their samples"
    assert "sharding.tp=3 does not divide cluster.num_workers=8" in "".join(divided.left_out)
    here = plan("1")
    assert here.trials[0].config.training.global_batch_size == 8 * default_num_workers()
    assert asked == ["head:6379"]


@pytest.mark.ci
def test_a_dry_run_lists_the_trials_and_leaves_nothing(tmp_path: Path):
    """DDP has one way to reshard; the default setting is one trial."""
    done = run_cli(tmp_path, "-m", "sharding=root,ddp", "precision=fp32", "offload=none", "dry_run=true")
    assert done.returncode == 0, done.stderr
    first, *_, second_last, last = done.stdout.splitlines()
    assert first == "3 trials: sharding × reshard_after_forward"
    assert second_last == "  1  sharding=root reshard_after_forward=never"
    assert last == "  2  sharding=ddp reshard_after_forward=always"
    assert run_cli(tmp_path, "dry_run=true").stdout.startswith("1 trial: sharding=per_block")
    assert not any(tmp_path.iterdir())
