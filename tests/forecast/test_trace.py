"""The program of a step: its arithmetic against PyTorch's own counter on a real step, its messages against hand-worked
sizes."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fsdp_lab.forecast.forecast import forecast_profile, forecast_step
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from fsdp_lab.training.train import train
from fsdp_lab.workloads.base import tensors_of
from fsdp_lab.workloads.build import build_workload
from tests.ranks import Memo, config, run_ranks

LM = ["model=lm_tiny", "task=language", "data=synthetic_tokens", "data.vocab_size=256", "data.seq_len=64"]
BLOCK = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64  # parameters: q and o, k and v, feed-forward, norms
ROOT = 2 * 256 * 64 + 64  # embedding, head, norm


SHARDED = ("sharding=per_block", "precision=fp32", "optimizer=adamw")
WHOLE = ("sharding=ddp", "precision=fp32", "optimizer=adamw")
HYBRID = ("sharding=per_block", "sharding.dp_replicate=2", "training.max_grad_norm=1.0")


@cache
def program(*words: str, workers: int = 4, cuda: bool = True) -> list[Operator]:
    return forecast_step(config(*LM, *words), workers, cuda, traced=True).program


def total(expected: list[Operator], *kinds: Kind) -> float:
    return sum(operator.flops for operator in expected if operator.kind in kinds)


@pytest.mark.parametrize(
    "words",
    [["sharding=per_block"], ["sharding=ddp"], pytest.param(["sharding=root", "init=meta"], marks=pytest.mark.ci)],
)
def test_the_matrix_products_are_those_of_a_real_step(words: list[str]):
    """Of the same batch on one device, unsharded; attention apart, of which a CPU calls another kernel."""
    workload = build_workload(config(*LM).model, config(*LM).data, config(*LM).task)
    model, batch = workload.model.build(), torch.zeros(4, 65, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        workload.task.loss(workload.task.forward(model, batch), batch).backward()
    by_name = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    products = sum(count for name, count in by_name.items() if "attention" not in name)
    attention = sum(count for name, count in by_name.items() if "attention" in name)
    operators = program(*words, "training.global_batch_size=16", "precision=bf16_mixed")
    assert total(operators, Kind.matmul) == products
    assert total(operators, Kind.attention) == attention / 2, "half of the scores are masked"


def test_what_is_gathered_and_scattered_is_every_unit_once_or_twice():
    """In bf16 forwards and backwards, the root's once, as it stays; the gradients in float32, once."""
    operators = program("sharding=per_block", "reshard_after_forward=default", "precision=bf16_mixed")
    gathered = Counter(o.num_bytes for o in operators if o.kind is Kind.gather)
    scattered = Counter(o.num_bytes for o in operators if o.kind is Kind.scatter)
    assert gathered == {2 * BLOCK: 4, 2 * ROOT: 1}
    assert scattered == {4 * BLOCK: 2, 4 * ROOT: 1}
    assert all(o.group == (0, 1, 2, 3) for o in operators if o.kind is Kind.gather)


def test_never_gathers_nothing_in_the_backward_pass():
    for policy, backwards in (("never", 0), ("always", 3)):
        operators = program("sharding=per_block", f"reshard_after_forward={policy}")
        assert sum(o.kind is Kind.gather and o.phase == "backward" for o in operators) == backwards, policy


def test_ddp_reduces_each_gradient_once():
    operators = program(*WHOLE)
    assert sum(o.num_bytes for o in operators if o.kind is Kind.reduce) == 4 * (2 * BLOCK + ROOT)
    assert not any(o.kind in (Kind.gather, Kind.scatter) for o in operators)


def test_hybrid_sharding_scatters_within_and_reduces_between_its_groups():
    operators = program(*HYBRID)
    assert {o.group for o in operators if o.kind is Kind.scatter} == {(0, 1)}
    replicas = [o for o in operators if o.kind is Kind.reduce and o.phase == "backward"]
    assert {o.group for o in replicas} == {(0, 2)}
    assert {o.stream for o in replicas} == {Stream.all_reduce}, "FSDP2 has a stream for it"
    narrow = program(*HYBRID, "precision=grad_bf16")
    after = {o.stream for o in narrow[narrow.index(next(o for o in narrow if o.kind is Kind.reduce)) :]
             if o.phase == "backward" and o.name == "aten._to_copy" and o.stream is not Stream.compute}  # fmt: skip
    assert after == {Stream.all_reduce}, "where the reduced gradients are cast, too"


class Reductions(TorchDispatchMode):
    """Notes the all-reduces inside, those within DTensor's operators too: name and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if DTensor in types:
            return NotImplemented
        name = str(func.overloadpacket)
        if "all_reduce" in name or "allreduce" in name:
            self.seen[name, sum(tensor.nbytes for tensor in tensors_of(args[0]))] += 1
        return func(*args, **(kwargs or {}))


def real_reductions(cases: list[list[str]]) -> list[Counter[tuple[str, int]]]:
    """Of each case, the all-reduces of a rank in a trial."""
    collected = []
    for words in cases:
        with tempfile.TemporaryDirectory() as folder, Reductions() as noted:
            train(config("model=mlp", *words), Path(folder), Memo())
        collected.append(noted.seen)
    return collected


def forecast_reductions(*words: str) -> Counter[tuple[str, int]]:
    operators = forecast_step(config("model=mlp", *words), 2, cuda=True, traced=True).program
    return Counter((o.name, int(o.num_bytes)) for o in operators if o.kind is Kind.reduce)


CLIPS = [
    [f"sharding={sharding}", f"training.max_grad_norm={norm}"] for sharding in ("root", "ddp") for norm in ("null", 1)
]


@pytest.mark.ci
def test_clipping_adds_the_reduction_that_a_real_step_issues():
    """One of the norms of all parameters where they are sharded; whole gradients have none."""
    sharded, clipped, whole, also = run_ranks(2, real_reductions, CLIPS)[0]
    steps = 4
    forecast = [forecast_reductions(*words) for words in CLIPS]
    added = {("_c10d_functional.all_reduce", 4 * 4): 1}  # two layers, each with its weight and bias, in float32
    assert forecast[1] - forecast[0] == added and clipped - sharded == dict.fromkeys(added, steps)
    assert forecast[3] == forecast[2] and whole == also


def test_the_norm_is_reduced_among_the_shards_and_clipping_waits_for_it():
    operators = [o for o in program(*HYBRID) if o.phase == "optimizer"]
    (reduced,) = (o for o in operators if o.kind is Kind.reduce)
    parameters = 2 * 9 + 3  # two blocks, embedding, head, norm
    assert reduced.group == (0, 1) and reduced.num_bytes == 4 * parameters
    after = operators[operators.index(reduced) + 1]
    assert after.name == "aten.pow" and set(after.reads) & set(reduced.writes)


def test_checkpointing_computes_the_blocks_again():
    plain, again = program(*SHARDED), program(*SHARDED, "activation_checkpointing=full")
    forward = sum(o.flops for o in plain if o.phase == "forward" and o.module.startswith("blocks"))
    last = max(o.flops for o in again if o.module.endswith("down_proj") and o.phase == "forward")  # stops before it
    assert total(again, Kind.matmul, Kind.attention) - total(plain, Kind.matmul, Kind.attention) == forward - 2 * last


def test_equal_settings_have_equal_programs_and_following_them_changes_no_profile():
    setting = config(*LM, *SHARDED)
    again = forecast_step(setting, 4, cuda=True, traced=True)
    assert again.program == program(*SHARDED)
    assert again.profile.events == forecast_profile(setting, 4, cuda=True).events


@pytest.mark.parametrize(("words", "shards"), [(SHARDED, 4), (WHOLE, 1)])
def test_the_optimizer_reads_and_writes_this_ranks_part(words: tuple[str, ...], shards: int):
    """Adam reads and writes the parameter and both averages, and the gradient, as its schema says: 8 * 4 bytes a
    parameter; the last 4 for each tensor are its count of steps."""
    operators = [o for o in program(*words) if o.name == "aten._fused_adamw_"]
    parameters = (2 * BLOCK + ROOT) / shards
    assert sum(o.num_bytes for o in operators) == pytest.approx(4 * 8 * parameters, rel=1e-3)


def test_the_optimizer_waits_for_the_last_gradients():
    operators = program(*SHARDED)
    last = [o for o in operators if o.kind is Kind.scatter][-1]
    adam = next(o for o in operators if o.name == "aten._fused_adamw_")
    assert set(last.writes) & {*adam.reads, *adam.writes}


def test_the_optimizer_runs_on_the_host_where_it_is_offloaded():
    for words, stream in ((("offload=cpu",), Stream.host), ((), Stream.compute)):
        assert {o.stream for o in program(*SHARDED, *words) if "adam" in o.name} == {stream}


def test_what_travels_to_the_device_has_the_bytes_of_the_shards():
    """Without a cast on the way, each step brings every shard once, in float32, and the batch in whole numbers."""
    step = forecast_step(config("model=mlp", "offload=cpu", "precision=fp32"), 2, cuda=True, traced=True)
    shapes = ((1024, 1024), (1024,), (10, 1024), (10,))
    shards = sum(4 * -(-shape[0] // 2) * math.prod(shape[1:]) for shape in shapes)
    travels = [o for o in step.program if o.kind is Kind.transfer]
    sent = [o for o in travels if o.phase == "forward" and o.stream is Stream.copy_in]
    assert sum(o.num_bytes for o in sent) == shards
    back = [o for o in travels if o.phase == "backward" and o.stream is not Stream.copy_in]  # others are gathered again
    assert sum(o.num_bytes for o in back) == shards


@pytest.mark.parametrize("checkpointing", [(), ("activation_checkpointing=full",)])
def test_the_rotary_embedding_of_all_blocks_is_named_after_each(checkpointing: tuple[str, ...]):
    result = Counter((o.phase, o.module) for o in program(*SHARDED, *checkpointing) if "rotary" in o.module)
    assert {module for _, module in result} == {f"blocks.{number}.attention.rotary" for number in range(2)}
    for phase in ("forward", "backward"):
        assert result[phase, "blocks.0.attention.rotary"] == result[phase, "blocks.1.attention.rotary"] > 0


def test_what_dtensor_tries_out_on_whole_shapes_is_no_part_of_the_step():
    """The second step is the first that multiplies the momentum."""
    operators = program(
        "sharding=per_block", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.implementation=foreach"
    )
    (scaled,) = (o for o in operators if o.phase == "optimizer" and o.name == "aten._foreach_mul_")
    assert scaled.num_bytes == pytest.approx(2 * 4 * (2 * BLOCK + ROOT) / 4, rel=0.01)
