"""The program of a step, eager and compiled: against PyTorch's own counter on a real step, and hand-worked sizes."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.hub import tqdm
from torch.utils.flop_counter import FlopCounterMode

from fsdp_lab.config import TrialConfig
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.forecast import NotFollowedError, forecast, forecast_profile, forecast_step
from fsdp_lab.forecast.speed.device import load_device
from fsdp_lab.forecast.speed.program import FUSED, Kind, Operator, Stream
from fsdp_lab.forecast.torch_private import kernels_planned
from fsdp_lab.workloads.build import build_workload
from tests.forecast.planted import kept, num_bytes
from tests.ranks import config

LM = ["model=lm_tiny", "task=language", "data=synthetic_tokens", "data.vocab_size=256", "data.seq_len=64"]
BLOCK = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64  # parameters: q and o, k and v, feed-forward, norms
ROOT = 2 * 256 * 64 + 64  # embedding, head, norm
SHARDED = ("sharding=per_block", "precision=fp32", "optimizer=adamw")
WHOLE = ("sharding=ddp", "precision=fp32", "optimizer=adamw")
HYBRID = ("sharding=per_block", "sharding.dp_replicate=2", "training.max_grad_norm=1.0")


@cache
def program(*words: str) -> list[Operator]:
    return forecast_step(config(*LM, *words), 4, cuda=True, traced=True).program


def total(operators: list[Operator], kind: Kind, figure: str = "flops") -> float:
    return sum(getattr(operator, figure) for operator in operators if operator.kind is kind)


@pytest.mark.parametrize(
    "words",
    [["sharding=per_block"], ["sharding=ddp"], pytest.param(["sharding=root", "init=rank0"], marks=pytest.mark.ci)],
)
def test_the_matrix_products_are_those_of_a_real_step(words: list[str]):
    """Of the same batch on one device, unsharded; attention apart, of which a CPU calls another kernel."""
    workload = build_workload(config(*LM).model, config(*LM).data, config(*LM).task)
    model, batch = workload.model.build(), torch.zeros(4, 65, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        workload.task.loss(workload.task.forward(model, batch), batch).backward()
    by_name = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for name, count in by_name.items() if "attention" in name)
    operators = program(*words, "training.global_batch_size=16", "precision=bf16_mixed")
    assert total(operators, Kind.matmul) == sum(by_name.values()) - attention
    assert total(operators, Kind.attention) == attention / 2, "half of the scores are masked"


def trial_of(name: str, *words: str) -> TrialConfig:
    named = [f"model._target_=tests.forecast.models.{name}", "data._target_=tests.forecast.models.Rows"]
    return config(*named, "task=classification", "sharding=root", "training.global_batch_size=16", *words)


def of_model(name: str, *words: str) -> Forecast:
    return forecast(trial_of(name, *words), 2, cuda=True, sheet=load_device(Path("conf/device/h100_sxm.yaml")))


def test_products_of_groups_are_counted():
    """Of a rank's 8 x 16 rows of 64 numbers, each with its expert's 64 x 32: forwards, and twice backwards."""
    program = forecast_step(trial_of("Grouped"), 2, cuda=True, traced=True).program
    grouped = [operator for operator in program if "grouped_mm" in operator.name]
    assert [operator.flops for operator in grouped] == [2 * 8 * 16 * 64 * 32] * 3
    assert {operator.kind for operator in grouped} == {Kind.matmul}
    speed = of_model("Grouped").speed
    assert speed is not None and speed.mfu is not None


@pytest.mark.parametrize(("model", "operator"), [("Own", "fsdp_lab_tests.attend"), ("Fourier", "aten._fft_c2c")])
def test_a_step_with_arithmetic_that_nobody_knows_has_no_speed(model: str, operator: str):
    """Its memory is known. A trial has no MFU."""
    result, trial = of_model(model), trial_of(model)
    assert build_workload(trial.model, trial.data, trial.task).train_flops_per_sample() is None
    assert result.speed is None and result.peaks
    assert f"no formula for the FLOPs of {operator}" in (result.no_speed or "")


def test_an_operator_has_the_flops_of_its_formula():
    """Of a rank's 8 samples, though its name is that of attention, which we price by PyTorch's shapes."""
    program = forecast_step(trial_of("Priced"), 2, cuda=True, traced=True).program
    assert [(o.kind, o.flops) for o in program if "own_attention" in o.name] == [(Kind.matmul, 8000)]


def test_ddp_with_an_unused_parameter_has_a_speed():
    """DDP then reduces which parameters were used, a tensor that it reads itself."""
    assert of_model("Unused", "sharding=ddp").speed is not None


def test_sparse_gradients_have_no_forecast():
    with pytest.raises(NotFollowedError, match=r"sparse gradients have no forecast: .*; measure this trial"):
        of_model("Bag", "sharding=ddp", "optimizer=sgd")


def test_each_unit_is_gathered_twice_and_scattered_once():
    """In bf16 forwards and backwards, the root's once, as it stays; the gradients in float32, once."""
    operators = program("sharding=per_block", "reshard_after_forward=default", "precision=bf16_mixed")
    gathered = Counter(o.num_bytes for o in operators if o.kind is Kind.gather)
    scattered = Counter(o.num_bytes for o in operators if o.kind is Kind.scatter)
    assert gathered == {2 * BLOCK: 4, 2 * ROOT: 1} and scattered == {4 * BLOCK: 2, 4 * ROOT: 1}
    assert all(o.group == (0, 1, 2, 3) for o in operators if o.kind is Kind.gather)
    for policy, backwards in (("never", 0), ("always", 3)):
        operators = program("sharding=per_block", f"reshard_after_forward={policy}")
        assert sum(o.kind is Kind.gather and o.phase == "backward" for o in operators) == backwards, policy
    operators = program(*WHOLE)  # DDP reduces each gradient once
    assert total(operators, Kind.reduce, "num_bytes") == 4 * (2 * BLOCK + ROOT)
    assert not any(o.kind in (Kind.gather, Kind.scatter) for o in operators)


def test_fsdp1_gathers_and_scatters_flat_parameters_on_its_streams():
    """As many bytes as FSDP2, but FSDP1 keeps the root's, and casts a rank's part only."""
    words = ("sharding=per_block", "precision=bf16_mixed", "sharding.api=fsdp1")
    for policy, blocks in (("always", 4), ("never", 2)):
        operators = program(*words, f"reshard_after_forward={policy}")
        gathered = Counter(o.num_bytes for o in operators if o.kind is Kind.gather)
        scattered = Counter(o.num_bytes for o in operators if o.kind is Kind.scatter)
        assert gathered == {2 * BLOCK: blocks, 2 * ROOT: 1} and scattered == {4 * BLOCK: 2, 4 * ROOT: 1}, policy
    streams = {kind: {o.stream for o in operators if o.kind is kind and o.phase != "optimizer"} for kind in Kind}
    assert streams[Kind.gather] == {Stream.gather} and streams[Kind.scatter] == {Stream.scatter}
    casts = [o.num_bytes for o in operators if o.stream is Stream.copy_in]
    assert sorted(casts) == sorted((4 + 2) * size / 4 for size in (BLOCK, BLOCK, ROOT)), "of a rank's part"
    replicas = [o for o in program(*HYBRID, "sharding.api=fsdp1") if o.stream is Stream.all_reduce]
    assert {o.group for o in replicas if o.kind is Kind.reduce} == {(0, 2)}


def test_hybrid_sharding_scatters_within_and_reduces_between():
    operators = program(*HYBRID)
    assert {o.group for o in operators if o.kind is Kind.scatter} == {(0, 1)}
    replicas = [o for o in operators if o.kind is Kind.reduce and o.phase == "backward"]
    assert {o.group for o in replicas} == {(0, 2)}
    assert {o.stream for o in replicas} == {Stream.all_reduce}, "FSDP2 has a stream for it"
    narrow = program(*HYBRID, "precision=grad_bf16")
    after = narrow[next(number for number, o in enumerate(narrow) if o.kind is Kind.reduce) :]
    casts = [o for o in after if o.phase == "backward" and o.name == "aten._to_copy"]
    assert {o.stream for o in casts} - {Stream.compute} == {Stream.all_reduce}, "where reduced gradients are cast, too"


# Of 4 ranks, neighbours share the 8 samples of 64 tokens of a data-parallel part, and divide every matrix.
TP = ("sharding.tp=2", "sharding=per_block", "training.global_batch_size=16", "precision=bf16_mixed")
TOKENS, DIM = 8 * 64, 64


@pytest.mark.parametrize(
    ("words", "gathers", "scatters"),
    [
        ([], 0, 0),
        (["activation_checkpointing=selective"], 2, 0),  # what was scattered is kept
        # the recomputation ends before the last product of a block
        pytest.param(["activation_checkpointing=full"], 2, 1, marks=pytest.mark.ci),
        pytest.param(["compile=true"], 0, 0, marks=pytest.mark.ci),
    ],
)
def test_what_tensor_parallel_layers_send_by_formula(words: list[str], gathers: int, scatters: int):
    """Tokens * width in bfloat16. A block gathers what attention and the feed-forward layer get, and scatters what they
    return; backwards gradients travel the other way. Embedding and head do half of that. The loss reduces three numbers
    of a token in float32: the maximum, the sum of exponentials, and the logarithm of its label's. The five norms are
    whole, and their gradients, of a part of the sequence each, are added up in the type of reductions."""
    sent = [o for o in program(*TP, *words) if o.stream is Stream.layers]
    assert {o.group for o in sent} == {(0, 1)} and {o.phase for o in sent} == {"forward", "backward"}
    counts = Counter((o.kind, o.num_bytes) for o in sent)
    activations, blocks = TOKENS * DIM * 2, 2
    assert counts == {
        (Kind.gather, activations): blocks * (4 + gathers) + 2,
        (Kind.scatter, activations): blocks * (4 + scatters) + 2,
        (Kind.reduce, TOKENS * 4): 3,
        (Kind.reduce, DIM * 4): 2 * blocks + 1,
    }


def test_tensor_parallel_ranks_have_half_of_the_products_and_of_the_weights():
    """FSDP2 gathers, among the ranks with the other samples, half of each matrix and every norm."""
    divided, whole = program(*TP), program(*TP[1:], "training.global_batch_size=32")
    for kind in (Kind.matmul, Kind.attention):
        assert 2 * total(divided, kind) == total(whole, kind), "of 8 samples a rank, too"
    gathered = Counter((o.num_bytes, o.group) for o in divided if o.stream is Stream.gather)
    norms = 2 * DIM
    assert gathered == {(BLOCK - norms + 2 * norms, (0, 2)): 4, (ROOT - DIM + 2 * DIM, (0, 2)): 1}
    known = {storage for o in divided for storage in o.writes}
    assert all(known.intersection(o.reads) for o in divided if o.stream is Stream.layers), "what was computed before"
    other = forecast_step(config(*LM, *TP), 4, cuda=True, rank=2, traced=True).program
    assert {o.group for o in other if o.stream is Stream.layers} == {(2, 3)}, "not those of the forecast before"


def test_checkpointing_computes_the_blocks_again():
    plain, again = program(*SHARDED), program(*SHARDED, "activation_checkpointing=full")
    forward = sum(o.flops for o in plain if o.phase == "forward" and o.module.startswith("blocks"))
    last = max(o.flops for o in again if o.module.endswith("down_proj") and o.phase == "forward")  # stops before it
    more = sum(total(again, kind) - total(plain, kind) for kind in (Kind.matmul, Kind.attention))
    assert more == forward - 2 * last


@pytest.mark.parametrize(
    ("words", "shards", "stream"),
    [(SHARDED, 4, Stream.compute), (WHOLE, 1, Stream.compute), ((*SHARDED, "offload=cpu"), 4, Stream.host)],
)
def test_the_optimizer_reads_and_writes_this_ranks_part(words: tuple[str, ...], shards: int, stream: Stream):
    """Where the gradients are. Adam reads and writes the parameter and both averages, and reads the gradient, as its
    schema says: 8 * 4 bytes a parameter; the last 4 for each tensor are its count of steps."""
    operators = [o for o in program(*words) if o.name == "aten._fused_adamw_"]
    parameters = (2 * BLOCK + ROOT) / shards
    assert sum(o.num_bytes for o in operators) == pytest.approx(4 * 8 * parameters, rel=1e-3)
    assert {o.stream for o in operators} == {stream}


def test_what_travels_to_the_device_has_the_bytes_of_the_shards():
    """Without a cast on the way, each step brings every shard once, in float32, and the batch in whole numbers."""
    step = forecast_step(config("model=mlp", "offload=cpu", "precision=fp32"), 2, cuda=True, traced=True)
    shapes = ((1024, 1024), (1024,), (10, 1024), (10,))
    shards = sum(4 * -(-shape[0] // 2) * math.prod(shape[1:]) for shape in shapes)
    travels = [o for o in step.program if o.kind is Kind.transfer]
    assert sum(o.num_bytes for o in travels if o.phase == "forward" and o.stream is Stream.copy_in) == shards
    back = [o for o in travels if o.phase == "backward" and o.stream is not Stream.copy_in]  # others are gathered again
    assert sum(o.num_bytes for o in back) == shards


def test_what_blocks_save_crosses_twice_on_the_stream_of_computation():
    """32 rows of 1024 pixels, and what the only hidden layer returns, in float32; the batch is in whole numbers."""
    words = ("model=mlp", "sharding=per_block", "precision=fp32", "activation_offload=cpu")
    step = forecast_step(config(*words, "training.global_batch_size=64"), 2, cuda=True, traced=True)
    for phase in ("forward", "backward"):
        moved = [o for o in step.program if o.kind is Kind.transfer and o.phase == phase and o.module]
        assert [o.num_bytes for o in moved] == [32 * 1024 * 4] * 2
        assert {o.stream for o in moved} == {Stream.compute} and all(o.name != "aten.set_" for o in step.program)
        assert not any(o.module.startswith("head") for o in moved)


def test_a_fused_chain_is_one_kernel_and_keeps_its_input():
    """y = sin(sin(2 x)): eager execution keeps what each sine gets; the compiler keeps x and computes these again."""
    kernels: list[tuple[list[int], list[int]]] = []
    size = 64 * 8 * 4

    def seen(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        kernels.append(([t.nbytes for t in reads], [t.nbytes for t in writes]))

    def chain(x: Tensor) -> Tensor:
        return torch.sin(torch.sin(2 * x))

    with kernels_planned(torch.device("cpu"), seen), FakeTensorMode():
        x = torch.empty(64, 8, requires_grad=True)
        eager, compiled = (kept(lambda f=f: f(x).sum().backward()) for f in (chain, torch.compile(chain)))  # type: ignore[misc]
        assert (num_bytes(eager), num_bytes(compiled)) == (2 * size, size)
    assert type(tqdm.get_lock()) is type(threading.RLock()), "no semaphore that a killed process leaves behind"
    forward, backward = kernels
    assert forward == ([size], [size])
    assert backward == ([size, size], [size]), "it reads x and the gradient of y"


def test_a_compiled_loss_makes_no_logits_in_float32():
    """4 rows of 64 tokens on a rank. At the peak of an eager loss there are the logarithms of the softmax and two
    gradients, each of 4 bytes a logit; of a compiled one the logits and their gradient, each of 2."""
    words = [*LM, "model.vocab_size=8192", "training.global_batch_size=16", "precision=bf16_mixed", "compile=true"]
    peaks = [
        forecast_profile(config(*words, f"compile_loss={compiled}"), 4, cuda=True).peaks["device"]["total"]
        for compiled in ("false", "true")
    ]
    assert peaks[0] - peaks[1] == pytest.approx((3 * 4 - 2 * 2) * 4 * 64 * 8192, rel=1e-3)


def test_float8_layers_keep_bfloat16_and_cast_for_each_product():
    """Of a block: seven layers with three products each; the head stays in bfloat16."""
    sizes = ["model.dim=64", "model.num_layers=1", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=176"]
    words = ["task=language", *sizes, "model.max_seq_len=64", "data.seq_len=64", "training.global_batch_size=8"]
    narrow, wide = (
        forecast_step(config(*words, f"precision={p}"), 2, cuda=True, traced=True) for p in ("float8", "bf16_mixed")
    )
    products = [o for o in narrow.program if o.name == "aten._scaled_mm"]
    assert len(products) == 7 * 3 and {o.dtype for o in products} == {"float8_e4m3fn"}
    in_blocks = [o for o in wide.program if o.kind is Kind.matmul and o.module.startswith("blocks.")]
    assert sum(o.flops for o in products) == sum(o.flops for o in in_blocks)
    sent, expected = ([o.num_bytes for o in s.program if o.kind is Kind.gather] for s in (narrow, wide))
    assert sent == expected, "gathers send bfloat16"
    assert narrow.profile.peaks["device"]["total"] >= wide.profile.peaks["device"]["total"]
    recomputed = [*words, "precision=float8", "activation_checkpointing=selective"]
    again = forecast_step(config(*recomputed), 2, cuda=True, traced=True).program
    more = Counter(o.module for o in again if o.name == products[0].name) - Counter(o.module for o in products)
    assert {name.rpartition(".")[2] for name in more} == {"k_proj", "o_proj", "up_proj"}, "every second of seven"


def test_operators_of_compiled_blocks_are_known():
    """Of a compiled step those of the blocks; not what FSDP2 copies, nor the optimizer."""
    words = ["model=vit_tiny", "model.num_layers=1", "data=synthetic", "sharding=per_block"]
    eager, compiled = (
        forecast_step(config(*words, f"compile={c}"), 2, cuda=False, traced=True).program for c in ("false", "true")
    )
    assert not any(one.compiled for one in eager)
    assert {one.name for one in compiled if one.compiled} >= {FUSED, "aten.mm"}
    assert not any(one.compiled for one in compiled if one.phase == "optimizer" or one.kind.is_collective)
