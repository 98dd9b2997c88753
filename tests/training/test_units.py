"""Which modules are sharding units and blocks, what is gathered of them, and the private names that this takes."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_lab.config import UserError
from fsdp_lab.forecast import torch_private as of_forecasts
from fsdp_lab.memory import torch_private
from fsdp_lab.training.blocks import check_blocks, find_block_classes
from fsdp_lab.training.layout import Layout, unit_notes
from fsdp_lab.training.parallel import fsdp2
from fsdp_lab.training.parallel.tensor import apply_tensor_parallel
from fsdp_lab.training.parallel.units import in_groups, last_unit, sharding_units
from fsdp_lab.workloads.build import build_workload
from fsdp_lab.workloads.construct import without_values
from fsdp_lab.workloads.examples.language.llama import Block as LlamaBlock
from fsdp_lab.workloads.examples.language.llama import Llama
from fsdp_lab.workloads.examples.language.pydoc import PydocTokens
from tests.parity import WORKLOADS
from tests.ranks import config, parallel_of, run_ranks, train_all
from tests.training.reference import first_model, names_of
from tests.workloads.user import unusual
from tests.workloads.user.odd import Block, Odd

USER = WORKLOADS["user"].words
NESTED = (Block, nn.LayerNorm)  # the norm is in the block
LLAMA = {"vocab_size": 8, "dim": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 8, "max_seq_len": 4}


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


class Parts(nn.Module):
    """Two positions beside the tokens, a list of projections, blocks in one of two towers, and two heads, one tied."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.tokens, self.positions = nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.lists = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.first = nn.Sequential(nn.Linear(4, 4), Block(0.0), nn.ReLU(), nn.LayerNorm(4))
        self.second = nn.Sequential(Block(0.0), nn.LayerNorm(4))
        self.head, self.tied = nn.Linear(4, 2), nn.Linear(4, 5)
        self.tied.weight = self.tokens.weight


@pytest.mark.parametrize(
    ("model", "units", "last"),
    [
        # What holds blocks, as the root does, stays in the root; so does what is tied. A list is not called.
        (Parts, "positions lists.0 lists.1 plain first.0 first.1 first.3 second.0", "second.1 head"),
        (Odd, "blocks.0 blocks.1 blocks.2", "frozen unused"),  # its embedding and its head are tied
        (partial(Llama, **LLAMA), "embedding blocks.0 blocks.1", "norm head"),
        (partial(Llama, tied=True, **LLAMA), "blocks.0 blocks.1", "norm"),
    ],
)
def test_what_is_outside_of_blocks_becomes_units_and_what_comes_last_shares_one(
    model: Any, units: str, last: str
) -> None:
    made, sharding = model(), config("sharding=per_block", "sharding.embeddings=own").sharding
    blocks = (Block, LlamaBlock)
    assert " ".join(names_of(made, sharding_units(made, blocks, sharding))) == units
    assert " ".join(names_of(made, last_unit(made, blocks, sharding))) == last
    assert last_unit(made, blocks, config("sharding=per_block").sharding) == []


@pytest.mark.parametrize(
    ("words", "reshards", "last_reshards"),
    [("default", None, False), ("always", True, True), ("never", False, False),
     ("to_size reshard_after_forward.size=2", 2, 2)],
)  # fmt: skip
def test_default_keeps_the_last_unit_after_the_forward_pass(words: str, reshards: Any, last_reshards: Any) -> None:
    trial = config("sharding=per_block", "sharding.embeddings=own", *f"reshard_after_forward={words}".split())
    model, made = Llama(**LLAMA), []

    def shard(module: Any, **options: Any) -> None:
        modules = module if isinstance(module, list) else [module]
        made.append((" ".join(names_of(model, modules)), options["reshard_after_forward"]))

    units, last = (find(model, (LlamaBlock,), trial.sharding) for find in (sharding_units, last_unit))
    with mock.patch.object(fsdp2, "fully_shard", shard), mock.patch.object(fsdp2.FSDP2, "_set_prefetch"):
        parallel_of(trial).divide(model, units, last)
    alone = [(name, reshards) for name in ("embedding", "blocks.0", "blocks.1")]
    assert made == [*alone, ("norm head", last_reshards), ("", reshards)]


@pytest.mark.parametrize(
    ("model", "blocks", "words", "expected"),
    [
        # FSDP2 shards what is nested from the inside out.
        (Odd, NESTED, "per_block", [f"{block}{leaf}" for block in BLOCKS for leaf in (".norm", "")]),
        # Neighbours are children of one module.
        (Odd, NESTED, "per_block sharding.blocks_per_unit=2",
         ["blocks.0.norm", "blocks.1.norm", "blocks.0 blocks.1", "blocks.2.norm", "blocks.2"]),
        # Tied parameters lie in one unit: neither the embedding nor the head, which are one, are units of their own.
        (Odd, (Block,), "per_block", BLOCKS),
        (Odd, (Block,), "per_layer", [*LEAVES, "frozen", "unused"]),
        (Odd, (Block,), "size_based sharding.min_num_params=80", BLOCKS),
        # Containers without a forward pass are no units.
        (Held, (), "per_layer", [*BLOCKS, "named.a.0", "named.a.1"]),
        (Held, (), "size_based sharding.min_num_params=40", ["named.a"]),
        # Nor is a module of which another one holds a part.
        (unusual.some_share_a_module, (unusual.Block,), "per_block", ["blocks.1", "blocks.3"]),
    ],
)  # fmt: skip
def test_units_of_nested_blocks_tied_parameters_and_containers(
    model: type[nn.Module], blocks: tuple[type[nn.Module], ...], words: str, expected: list[str]
) -> None:
    made, sharding = without_values(model), config(*f"sharding={words}".split()).sharding
    groups = in_groups(made, sharding_units(made, blocks, sharding), sharding.blocks_per_unit)
    assert [" ".join(names_of(made, group)) for group in groups] == expected


def test_a_note_says_that_no_module_became_a_unit() -> None:
    (note,) = unit_notes(Layout(), config("sharding=per_block"))
    assert note.startswith("sharding=per_block found no module") and "as with sharding=root" in note
    assert unit_notes(Layout(["blocks.*"]), config("sharding=per_block")) == []
    assert unit_notes(Layout(), config("sharding=root")) == unit_notes(Layout(), config("sharding=ddp")) == []


def test_blocks_are_found() -> None:
    """By the names that a model gives, as those of transformers do, else the longest list of one class."""
    both = nn.ModuleDict({"a": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), "b": Odd()})
    assert find_block_classes(both) == find_block_classes(nn.Sequential(Block(0.0), Block(0.0))) == (Block,)
    assert find_block_classes(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ()
    both._no_split_modules = ("Odd",)
    assert find_block_classes(both) == (Odd,)


@pytest.mark.parametrize("setting", ["sharding=per_block", "activation_checkpointing=every_n", "compile=true"])
def test_a_model_without_blocks_is_refused_where_some_are_needed(setting: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    check_blocks(plain, (), config("sharding=root"))
    for blocks, what in (((), "repeating block"), ((Block,), "module of class Block")):
        with pytest.raises(UserError, match=rf"{setting}: Sequential has no {what}.*model.block_classes="):
            check_blocks(plain, blocks, config("sharding=root", setting))


class Normed(nn.Module):
    """Batch norm needs more than one sample; a draw leaves one layer out in some steps."""

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.norm, self.one, self.other, self.drops = nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Linear(2, 1), drops

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.one(x) if self.drops and torch.rand(1, device="cpu") > 0.7 else self.one(x) + self.other(x)

    @staticmethod
    def example_batch(size: int) -> Tensor:
        return torch.zeros(size, 2)


def summed(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


@pytest.mark.parametrize("drops", [False, True])
def test_ddp_looks_for_what_one_of_several_steps_leaves_out(drops: bool) -> None:
    model = (f"model._target_={__name__}.Normed", f"model.drops={drops}")
    ddp = config(*model, "data=example", f"task.loss={__name__}.summed", "sharding=ddp")
    workload, seen = build_workload(ddp.model, ddp.data, ddp.task), torch.get_rng_state()
    assert parallel_of(ddp).leaves_some_unused(workload)[0] is drops
    assert torch.equal(torch.get_rng_state(), seen)


def test_ddp_that_looks_for_unused_parameters_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, root = config(*USER, "sharding=ddp"), config(*USER, "sharding=root")
    workload = build_workload(ddp.model, ddp.data, ddp.task)
    found, (note,) = parallel_of(ddp).leaves_some_unused(workload)
    assert found and "find_unused_parameters" in note and note.endswith("some of them get no gradient")
    assert parallel_of(root).leaves_some_unused(workload) == (False, [])

    def fails(*_: object) -> list[str]:
        raise RuntimeError("no value on meta\nand more")

    monkeypatch.setattr(type(workload), "parameters_without_gradient", fails)
    found, (note,) = parallel_of(ddp).leaves_some_unused(workload)
    assert found and note.endswith("are not known (RuntimeError: no value on meta)")
    monkeypatch.setattr(type(workload), "parameters_without_gradient", lambda *_: [])
    assert parallel_of(ddp).leaves_some_unused(workload) == (False, [])


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
    cases = [
        [*step, "sharding=root", "precision=bf16"],
        [*step, "sharding=per_block", "precision=bf16_mixed", "init=rank0"],
        [*step, "sharding=per_layer", "precision=bf16"],
    ]
    got = [losses for losses, _ in run_ranks(1, train_all, cases)[0]]
    assert got == [[expected[0]]] * len(cases)
    assert expected[0] != expected[1], "the tables matter"


def test_pytorch_has_the_names_as_we_use_them():
    names = (*torch_private.NAMES, *of_forecasts.NAMES)
    lacks = [f"{name.module}: {name.lacks()}" for name in names if name.lacks() is not None]
    assert lacks == [], "see fsdp_lab/memory/torch_private.py and fsdp_lab/forecast/torch_private.py"


def graphs_of(num_layers: int) -> int:
    """How many graphs are compiled for the blocks of a Llama that two ranks divide."""
    sizes: dict[str, Any] = {"vocab_size": 32, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24}
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = Llama(**sizes, num_layers=num_layers, max_seq_len=8)
    apply_tensor_parallel(model, Llama._tp_plan, init_device_mesh("cpu", (2,)))
    for block in model.blocks:
        block.compile(backend=backend)
    model(torch.zeros(1, 8, dtype=torch.int64))
    return len(graphs)


def compile_one_and_three() -> list[int]:
    return [graphs_of(1), graphs_of(3)]


def test_code_compiled_for_one_block_of_a_divided_model_serves_all():
    """PyTorch compiles a function eight times, and runs it without the compiler from then on."""
    one, three = run_ranks(2, compile_one_and_three)[0]
    assert 0 < one == three
