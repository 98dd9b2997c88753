"""Cells of a grid -> the trials that are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import open_dict

from fsdp_lab.compose import plain, typed_config
from fsdp_lab.config import ConfigError
from fsdp_lab.sweep.composer import Composer
from fsdp_lab.sweep.grid import enumerate_grid
from fsdp_lab.sweep.plan import Plan, plan_sweep


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


def test_ddp_is_held_once_under_each_reshard_after_forward(plan):
    made = plan("sharding=ddp,per_block", "reshard_after_forward=always,never,default")
    assert short(made) == [
        "sharding=ddp reshard_after_forward=always",
        "sharding=per_block reshard_after_forward=always",
        "sharding=per_block reshard_after_forward=never",
        "sharding=per_block reshard_after_forward=default",
    ]
    assert [number for _, number in made.folded] == [0, 0]
    (note,) = made.notes()
    assert note.startswith("2 duplicates left out (sharding=ddp reshard_after_forward=never")
    assert note.endswith("= trial 0)")


def test_what_is_the_same_in_all_cells_is_not_reported_of_one(plan):
    made = plan("sharding=ddp,per_block", "reshard_after_forward=always,never", "precision=bf16", "optimizer.lr=0.1")
    (note,) = made.notes()
    assert note.endswith("(sharding=ddp reshard_after_forward=never = trial 0)")


def test_for_root_default_is_never_by_another_name(plan):
    made = plan("sharding=root,per_block", "reshard_after_forward=default,never")
    assert short(made) == [
        "sharding=root reshard_after_forward=default",
        "sharding=per_block reshard_after_forward=default",
        "sharding=per_block reshard_after_forward=never",
    ]


def test_to_size_of_one_is_never_and_of_all_is_always(plan):
    made = plan("reshard_after_forward=never,always,to_size", "reshard_after_forward.size=1,2")
    kept = {(t.config.reshard_after_forward.policy.name, t.config.reshard_after_forward.size) for t in made.trials}
    assert {policy for policy, _ in kept} == {"never", "always"}


def test_what_is_named_twice_is_run_once(plan):
    assert len(plan("training.seed=1,1,2").trials) == 2


def test_values_that_make_a_difference_are_never_folded(plan):
    made = plan("sharding=ddp,root", "optimizer.lr=1e-3,1e-2", "training.seed=0,1", "precision=fp32,bf16")
    assert len(made.trials) == 16
    assert made.folded == []


def test_folder_numbers_run_without_gaps(plan):
    made = plan("sharding=ddp,root,per_block", "offload=none,cpu", "reshard_after_forward=default,never")
    assert made.left_out and made.folded
    assert [trial.index for trial in made.trials] == list(range(len(made.trials)))
    assert [trial.folder.name for trial in made.trials] == [str(n) for n in range(len(made.trials))]
    assert [number for _, number in made.folded] == [0, 1, 2]  # the trial that stands for each


def test_a_grid_in_which_nothing_has_a_meaning_is_an_error(plan):
    with pytest.raises(ConfigError, match=r"sharding=ddp with offload=cpu: .* / sharding=ddp with offload=cpu_unp"):
        plan("sharding=ddp", "offload=cpu,cpu_unpinned")


def test_a_bad_value_in_a_grid_is_an_error_and_not_left_out(plan):
    with pytest.raises(ConfigError, match=r"training\.epochs=0 is below 1"):
        plan("training.epochs=1,0")


def test_images_that_are_not_there_are_an_error_before_anything_starts(plan, tmp_path):
    with pytest.raises(Exception, match=r"data\.root=.*FashionMNIST.*data=digits"):
        plan("data=fashion_mnist", f"data.root={tmp_path}", "data.download=false")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["training.global_batch_size=63"], r"^training\.global_batch_size=63 is not divisible"),
        (["sharding.dp_replicate=3"], r"sharding\.dp_replicate=3 does not divide"),
    ],
)
def test_what_makes_every_cell_invalid_is_an_error(plan, arguments: list[str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        plan("sharding=ddp,root", "offload=none,cpu", *arguments)


def test_what_makes_some_cells_invalid_is_left_out(plan):
    made = plan("precision=fp16,bf16", "precision.loss_scaling=true")
    assert [trial.choices["precision"] for trial in made.trials] == ["fp16"]
    assert "precision.loss_scaling=true with precision.param_dtype=bfloat16" in made.notes()[0]
    made = plan("sharding=ddp,per_block", "reshard_after_forward=to_size", "reshard_after_forward.size=3")
    assert [trial.choices["sharding"] for trial in made.trials] == ["ddp"]
    made = plan("training.global_batch_size=63,64")
    assert [trial.config.training.global_batch_size for trial in made.trials] == [64]


CELLS = (
    ["sharding=root", "optimizer.lr=0.5"],
    ["sharding=root", "optimizer.lr=0.25", "training.seed=3"],
    ["optimizer=sgd", "optimizer.momentum=0.5", "model=mlp", "objective=[memory/peak_bytes:min]"],
    ["cluster.num_workers=2", "training.global_batch_size=${per_worker:8}"],
    ["experiment=fsdp_rules", "training.max_grad_norm=null"],
)


def test_cells_composed_by_parts_are_what_hydra_composes(parser: OverridesParser, tmp_path):
    loader = GlobalHydra.instance().config_loader()
    master = loader.load_configuration("config", ["hydra.sweep.subdir=${hydra.job.override_dirname}"], RunMode.MULTIRUN)
    composer = Composer(HydraContext(loader, Callbacks()), master, parser, tmp_path)
    for number, cell in enumerate([*CELLS, *CELLS]):
        trial = composer(cell, number)
        whole = loader.load_sweep_config(master, cell)
        with open_dict(whole):
            whole.hydra.job.id, whole.hydra.job.num = trial.hydra_config.hydra.job.id, number
        assert trial.composed == plain(whole)
        assert trial.config == typed_config(whole)
        assert trial.folder == tmp_path / whole.hydra.job.override_dirname


def test_a_key_that_is_none_is_reported_by_hydra(parser: OverridesParser, tmp_path):
    loader = GlobalHydra.instance().config_loader()
    master = loader.load_configuration("config", [], RunMode.MULTIRUN)
    composer = Composer(HydraContext(loader, Callbacks()), master, parser, tmp_path)
    for cell in (["optimizer.l=1"], ["optimizer.lr=fast"]):
        with pytest.raises(HydraException):
            composer(cell, 0)


def test_a_key_that_nothing_reads_is_an_error_of_every_cell(parser: OverridesParser, tmp_path):
    """Cells with the same options are checked once; what a check refuses was not checked."""
    loader = GlobalHydra.instance().config_loader()
    master = loader.load_configuration("config", [], RunMode.MULTIRUN)
    composer = Composer(HydraContext(loader, Callbacks()), master, parser, tmp_path)
    composer(["optimizer.lr=0.5"], 0)
    for cell in (["+optimizer.speed=1", "optimizer.lr=0.5"], ["+optimizer.speed=1", "optimizer.lr=0.25"]):
        with pytest.raises(ConfigError, match=r"optimizer\.speed is not a key"):
            composer(cell, 0)
