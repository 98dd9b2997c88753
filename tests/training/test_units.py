"""Which modules are sharding units and blocks, what is gathered of them, and the private names that this takes."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_lab.config import UserError
from fsdp_lab.forecast import torch_private as of_forecasts
from fsdp_lab.forecast.fake import HOST, fake_world
from fsdp_lab.training import torch_private
from fsdp_lab.training.blocks import batch_norm_notes, check_blocks, find_block_classes
from fsdp_lab.training.build import leaves_some_unused
from fsdp_lab.training.distributed import build_parallel_dims
from fsdp_lab.training.layout import Layout, unit_notes
from fsdp_lab.training.parallelize import apply_fully_shard, in_groups, sharding_units
from fsdp_lab.workloads.build import build_model_spec, build_workload
from fsdp_lab.workloads.construct import Blueprint
from fsdp_lab.workloads.language.pydoc import PydocTokens
from tests.parity import WORKLOADS
from tests.ranks import config, run_ranks, train_all
from tests.training.reference import first_model, names_of
from tests.workloads.user import unusual
from tests.workloads.user.odd import Block, Odd

USER = WORKLOADS["user"].words
NESTED = (Block, nn.LayerNorm)  # the norm is in the block


class Held(nn.Module):
    """Parameters and blocks in containers, which nobody calls; one of these has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.named = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
        self.scales = nn.ParameterList(torch.ones(30) for _ in range(3))
        self.again = self.blocks


BLOCKS = [f"blocks.{n}" for n in range(3)]
LEAVES = [f"{block}.{leaf}" for block in BLOCKS for leaf in ("linear", "norm")]


@pytest.mark.parametrize(
    ("model", "blocks", "words", "expected"),
    [
        # FSDP2 shards what is nested from the inside out.
        (Odd, NESTED, "per_block", [f"{block}{leaf}" for block in BLOCKS for leaf in (".norm", "")]),
        # Tied parameters lie in one unit: neither the embedding nor the head, which are one, are units of their own.
        (Odd, (Block,), "per_block", BLOCKS),
        (Odd, (Block,), "per_layer", [*LEAVES, "frozen", "unused"]),
        (Odd, (Block,), "size_based sharding.min_num_params=80", BLOCKS),
        # Containers without a forward pass are no units.
        (Held, (), "per_layer", [*BLOCKS, "named.a.0", "named.a.1"]),
        (Held, (), "size_based sharding.min_num_params=40", ["named.a"]),
    ],
)
def test_units_of_nested_blocks_tied_parameters_and_containers(
    model: type[nn.Module], blocks: tuple[type[nn.Module], ...], words: str, expected: list[str]
) -> None:
    made = Blueprint(model, seed=0).model
    units = sharding_units(made, blocks, config(*f"sharding={words}".split()).sharding)
    assert names_of(made, units) == expected


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Holder(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Plain() for _ in range(3))


@pytest.mark.parametrize(
    ("size", "groups"),
    [
        (1, ["0.inner.0", "0.inner.1", "0.inner.2", "0", "1.inner.0", "1.inner.1", "1.inner.2", "1", "2"]),
        (3, ["0.inner.0 0.inner.1 0.inner.2", "1.inner.0 1.inner.1 1.inner.2", "0 1 2"]),
    ],
)
def test_neighbours_are_children_of_one_module_and_inner_ones_come_first(size: int, groups: list[str]) -> None:
    model = nn.Sequential(Holder(), Holder(), Plain())
    units = sharding_units(model, (Plain,), config("sharding=per_block").sharding)
    assert [" ".join(names_of(model, group)) for group in in_groups(model, units, size)] == groups
    assert Counter(map(id, units)) == Counter(id(m) for group in in_groups(model, units, size) for m in group)


def test_a_note_says_that_no_module_became_a_unit() -> None:
    shared = Blueprint(unusual.a_shared_module, seed=0).model
    assert sharding_units(shared, find_block_classes(shared), config("sharding=per_block").sharding) == []
    (note,) = unit_notes(Layout(), config("sharding=per_block"))
    assert note.startswith("sharding=per_block found no module") and "as with sharding=root" in note
    assert unit_notes(Layout(["blocks.*"]), config("sharding=per_block")) == []
    assert unit_notes(Layout(), config("sharding=root")) == unit_notes(Layout(), config("sharding=ddp")) == []


class Named(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.block = Block(0.0)


def test_blocks_are_found() -> None:
    """By the name that transformers give them, else the longest list of one class."""
    assert find_block_classes(Named()) == (Block,)
    assert find_block_classes(Odd()) == (Block,)
    assert find_block_classes(nn.Sequential(*(Block(0.0) for _ in range(2)))) == (Block,)
    assert find_block_classes(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ()
    both = nn.ModuleDict({"a": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), "b": Odd()})
    assert find_block_classes(both) == (Block,)


@pytest.mark.parametrize(
    "setting",
    ["sharding=per_block", "activation_checkpointing=full", "activation_checkpointing=every_n", "compile=true"],
)
def test_a_model_without_blocks_is_refused_where_some_are_needed(setting: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    trial = config("sharding=root", setting)
    with pytest.raises(UserError, match=rf"{setting}: Sequential has no repeating block.*model.block_classes="):
        check_blocks(plain, find_block_classes(plain), trial)
    with pytest.raises(UserError, match="has no module of class Block"):
        check_blocks(plain, (Block,), trial)
    check_blocks(plain, (), config("sharding=root"))


def test_batch_norm_is_reported_once() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.LayerNorm(2))
    (note,) = batch_norm_notes(model, 2)
    assert note.startswith("BatchNorm1d, BatchNorm2d computes")
    assert batch_norm_notes(model, 1) == batch_norm_notes(model[2:], 2) == []


def test_ddp_that_looks_for_unused_parameters_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = config(*USER, "sharding=ddp")
    workload = build_workload(trial.model, trial.data, trial.task)
    assert workload.parameters_without_gradient() == ["unused.weight", "unused.bias"]
    found, (note,) = leaves_some_unused(workload, trial)
    assert found and "find_unused_parameters" in note and note.endswith("some of them get no gradient")

    def fails(_: object) -> list[str]:
        raise RuntimeError("no value on meta\nand more")

    monkeypatch.setattr(type(workload), "parameters_without_gradient", fails)
    found, (note,) = leaves_some_unused(workload, trial)
    assert found and note.endswith("are not known (RuntimeError: no value on meta)")
    monkeypatch.setattr(type(workload), "parameters_without_gradient", lambda _: [])
    assert leaves_some_unused(workload, trial) == (False, [])
    assert leaves_some_unused(workload, config(*USER, "sharding=root")) == (False, [])


def groups_made(num_layers: int, *words: str) -> int:
    """How many process groups one of 8 workers makes when it shards a ViT of so many blocks."""
    trial = config(f"model.num_layers={num_layers}", "sharding=per_block", *words)
    made = []
    make = dist.distributed_c10d._new_process_group_helper
    spy = mock.Mock(side_effect=lambda *args, **kwargs: made.append(1) or make(*args, **kwargs))
    with fake_world(8, HOST) as ranks:
        spec = build_model_spec(trial.model)
        with torch.device("meta"):
            model = spec.build()
        mesh = build_parallel_dims(trial.sharding, ranks).mesh
        with mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", spy):
            units = sharding_units(model, find_block_classes(model), trial.sharding)
            apply_fully_shard(model, units, trial, mesh)
    return len(made)


def test_more_blocks_take_no_more_process_groups() -> None:
    """With resharding to two of eight workers: their four pairs, and the two groups of counterparts."""
    to_size = ("reshard_after_forward=to_size", "reshard_after_forward.size=2")
    assert groups_made(8, *to_size) == groups_made(2, *to_size) == 4 + 2
    assert groups_made(8, "reshard_after_forward=always") == 0
    assert groups_made(4, "sharding.separate_reduce_scatter_group=true") == 1


class Watched(Odd):
    """Remembers what was in its buffer in the last forward pass."""

    last: Tensor

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        Watched.last = self.angles.detach()
        return super().forward(tokens)


def tables(cases: list[list[str]]) -> list[Tensor]:
    """On one rank: what is in the model's buffer in the last forward pass of each case."""
    results = []
    for words in cases:
        train_all([[*USER, "training.max_steps=1", f"model._target_={__name__}.Watched", *words]])
        results.append(Watched.last)
    return results


def test_buffers_keep_their_precision() -> None:
    cases = [
        [f"sharding={sharding}", f"precision={p}"]
        for sharding, p in (("ddp", "bf16"), ("root", "bf16"), ("per_block", "bf16_mixed"), ("per_layer", "bf16"))
    ]
    cases.append(["sharding=per_block", "precision=fp16", "precision.init_scale=8", "init=meta"])
    for case, got in zip(cases, run_ranks(1, tables, cases)[0], strict=True):
        assert torch.equal(got, Odd().angles) and got.dtype == torch.float32, case


def test_rotary_tables_are_used_in_float32_under_half_precision() -> None:
    """To the bit what a plain script computes that casts the parameters and not the tables: in bfloat16 the angles of
    neighbouring positions are equal."""
    torch.set_num_threads(1)
    rows = PydocTokens("train", seq_len=1024)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    batch = torch.stack([rows[i] for i in order[:2].tolist()])
    step = ("task=language", "data.seq_len=1024", "data.num_val=1", "training.global_batch_size=2",
            "training.max_steps=1")  # fmt: skip
    expected = []
    for cast in (nn.Module.parameters, lambda model: (*model.parameters(), *model.buffers())):
        model = first_model(config(*step))
        for tensor in cast(model):
            tensor.data = tensor.data.bfloat16()
        logits = model(batch[:, :-1]).float()
        expected.append(nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item())
    cases = [[*step, "sharding=root", "precision=bf16"], [*step, "sharding=per_block", "precision=bf16_mixed"]]
    got = [losses for losses, _ in run_ranks(1, train_all, cases)[0]]
    assert got == [[expected[0]]] * len(cases)
    assert expected[0] != expected[1], "the tables matter"


def test_pytorch_has_the_names_as_we_use_them():
    names = (*torch_private.NAMES, *of_forecasts.NAMES)
    lacks = [f"{name.module}: {name.lacks()}" for name in names if name.lacks() is not None]
    assert lacks == [], "see fsdp_lab/training/torch_private.py and fsdp_lab/forecast/torch_private.py"
