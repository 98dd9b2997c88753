"""The memory of a step: against hand-worked peaks, what the allocator reports, and measured steps, to the byte."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from fsdp_lab.config import ModelError
from fsdp_lab.forecast.capacity import COMPRESSED, CONTEXT_BYTES, GIB, NCCL_BYTES, Host, communicators, on_host
from fsdp_lab.forecast.forecast import NotFollowedError, forecast, forecast_profile
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.run import forecast_one
from fsdp_lab.machine.hardware import pytorch_version
from fsdp_lab.memory import timeline
from fsdp_lab.memory.allocator_profile import Change, allocator_changes
from fsdp_lab.memory.gloo import SynchronousGlooMode
from fsdp_lab.memory.profile import Profile
from fsdp_lab.training import loop
from fsdp_lab.training.train import train
from fsdp_lab.workloads.base import tensors_of
from tests.forecast.planted import num_bytes
from tests.parity import SHARDINGS, WORKLOADS, differences
from tests.parity_rows import every_four_axes, overrides
from tests.ranks import Memo, config, run_ranks

# model=mlp: 1024 -> 1024 -> 10, so two weights and two biases
SHAPES = ((1024, 1024), (1024, 1), (10, 1024), (10, 1))
BLOCK, HEAD = 4 * (1024 * 1024 + 1024), 4 * (10 * 1024 + 10)
WHOLE = BLOCK + HEAD
BATCH, HIDDEN = 16 * (32 * 32 * 4 + 8), 16 * 1024 * 4  # of a rank's 16 images; labels are int64


@pytest.mark.parametrize("workers", [1, 8])
def test_an_even_shard_of_parameters_and_adams_state_by_hand(workers: int):
    """Rank 0 holds ceil(rows / workers) rows of each tensor, in float32, and Adam twice that and a step count each."""
    shares = [-(-rows // workers) * columns for rows, columns in SHAPES]
    peaks = forecast_profile(config("model=mlp", "training.global_batch_size=32"), workers, cuda=False).peaks["device"]
    assert peaks["param"] == 4 * sum(shares)
    assert peaks["optimizer"] == 2 * 4 * sum(shares) + 4 * len(shares)
    assert peaks["input"] == 32 // workers * (32 * 32 * 4 + 8), "float32 pixels and an int64 label each"


SGD = "optimizer=sgd optimizer.momentum=0 optimizer.weight_decay=0"
# Beside the parameters, the optimizer's state and the batch: see the test.
BY_HAND = {
    f"sharding=ddp {SGD}": WHOLE + WHOLE + BATCH + (BLOCK + HIDDEN) + 3 * 4,
    "sharding=per_block optimizer=adamw": (
        WHOLE // 2 + (WHOLE + 4 * 4) + BATCH + WHOLE + BLOCK + HEAD + 2 * HIDDEN + 3 * 4
    ),
    f"sharding=root {SGD}": WHOLE // 2 + BATCH + WHOLE + WHOLE + 2 * HIDDEN + 4,
}


def held(state: Any, microbatches: Any) -> int:
    """Bytes of what a step finds: parameters, gradients, the optimizer's state and the batch."""
    tensors = [*state.model.parameters(), *tensors_of(microbatches)]
    tensors += [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    states = [values for optimizer in state.optimizers.values() for values in optimizer.state.values()]
    tensors += [value for values in states for value in values.values() if value is not None]
    return num_bytes([tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors])


def most_bytes(changes: Sequence[Change]) -> int:
    now, most = dict[int, int](), 0
    for change in (each for each in changes if each.device is not None):
        if change.num_bytes > 0:
            now[change.address] = change.num_bytes
        else:
            now.pop(change.address, None)
        most = max(most, sum(now.values()))
    return most


def train_two_steps(words: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(config("training.max_steps=2", *words), Path(folder), Memo())


def allocated(cases: list[list[str]]) -> list[int]:
    """On one rank: the most bytes that PyTorch's allocator had given in the second step of each trial."""
    plain, peaks = loop.train_step, list[int]()

    def followed(state: Any, task: Any, batches: Any, *more: Any, **named: Any) -> Any:
        before, changes = held(state, batches), list[Change]()
        with SynchronousGlooMode(), allocator_changes(changes):  # else gloo's threads hold tensors for a while
            result = plain(state, task, batches, *more, **named)
        peaks.append(before + most_bytes(changes))
        return result

    loop.train_step = followed
    for words in cases:
        train_two_steps(["memory_profile=off", *words])
    return peaks[1::2]


def test_three_peaks_by_hand_and_by_the_allocator_are_forecast():
    """By PyTorch's profiler (`profile_memory`), which sees allocations, not tensors or categories. A peak is

    - with DDP in the backward pass of the block: parameters, as many bytes of buckets, the batch, and gradients of
      the block's output and of its parameters, which are not in their bucket yet. Of 3 numbers: the sum of losses,
      the loss, and the loss of the microbatch;
    - with `per_block` there, too, where the block is gathered again: half of the parameters, Adam's two averages and 4
      counts of steps, the batch. All parameters are there, and once more the block's, in the buffer that it was
      gathered into. Then the gradients of the head, the block's output and its gradient, and 3 numbers;
    - with `root` in the forward pass: half of the parameters, the batch, all parameters and their buffer, which FSDP2
      keeps until the next gather. Then the outputs of the linear layer and of its ReLU, and the sum of losses.
    """
    cases = [["model=mlp", *words.split()] for words in BY_HAND]
    forecasts = [forecast_profile(config(*words), 2, cuda=False).peaks["device"]["total"] for words in cases]
    assert forecasts == [*BY_HAND.values()]
    assert run_ranks(2, allocated, cases) == [forecasts] * 2


MODELS = ["data._target_=tests.forecast.models.Rows", "training.global_batch_size=16", "sharding=root"]


def of_model(name: str, *words: str) -> list[str]:
    task = [] if any(word.startswith("task.loss") for word in words) else ["task=classification"]
    return [f"model._target_=tests.forecast.models.{name}", *MODELS, *task, *words]


def test_tensors_that_are_no_parameters_are_followed():
    """A module that holds one, and a loss with weights of classes: both take as much more as by the allocator."""
    cases = [of_model("Mean"), of_model("Held"), of_model("Mean", "task.loss=tests.forecast.models.weighted")]
    plain, *forecasts = [forecast_profile(config(*words), 2, cuda=False).peaks["device"]["total"] for words in cases]
    for without, *measured in run_ranks(2, allocated, cases):
        assert [one - without for one in measured] == [one - plain for one in forecasts]
    for words in cases:
        assert forecast_profile(config(*words), 2, cuda=True).peaks, "the tensors go to the GPU"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "step"),
    [
        ("model=mlp model.num_layers=2 training.global_batch_size=32", 1),
        ("model=vit_tiny training.global_batch_size=32", 1),
        ("model=vit_b_16 training.global_batch_size=4", 25),
    ],
)
def test_every_cell_of_the_four_axes_is_forecast_to_the_byte(model: str, step: int) -> None:
    cases = [[*model.split(), *overrides(cell)] for cell in every_four_axes()[::step]]
    # an overflow skips a step: then the optimizer holds nothing
    cases = [[*words, *["precision.init_scale=256"] * ("precision=fp16" in " ".join(words))] for words in cases]
    assert differences(cases) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "shardings"),
    [
        pytest.param("vit", ["root"], marks=pytest.mark.ci),
        *(pytest.param(model, [*SHARDINGS], marks=pytest.mark.full) for model in ("language", "vit", "hf gpt2")),
    ],
)
def test_a_compiled_step_is_forecast_within_3_percent(model: str, shardings: list[str]) -> None:
    """By what the allocator reports: to the byte for our Llama, per block a row of tests/training/test_parity.py, and
    for GPT-2. A compiled block of a ViT returns a transposed tensor, of which the kernel of the last LayerNorm makes a
    copy: one activation more, which is 2.3 % of this tiny one."""
    if model.startswith("hf"):
        pytest.importorskip("transformers")
    cases = [[*WORKLOADS[model].words, "compile=true", *SHARDINGS[sharding]] for sharding in shardings]
    assert differences(cases) == []


Step = tuple[str, str, int, str, str]


def timelines(cases: list[list[str]]) -> list[list[Step]]:
    """On one rank: what the page of the second step of each case is made of."""
    pages: list[list[Step]] = []
    timeline.write_timeline = lambda profile, *_: pages.append(steps(profile))
    for words in cases:
        train_two_steps(["memory_profile=timeline", *words])
    return pages[1::2]


def steps(profile: Profile) -> list[Step]:
    """Each event, with the bytes that it adds."""
    sizes, found = Counter[int](), []
    for event in profile.events:
        found.append((event.place, event.category, event.num_bytes - sizes[event.storage], event.phase, event.module))
        sizes[event.storage] = event.num_bytes
    return found


MLP = WORKLOADS["mlp"].words
INTO_UNITS = ("root", "per_layer", "size_based")  # DDP with autocast frees copies in the order of their addresses
INVOLVED = ("precision=bf16_mixed", "training.grad_accum_steps=2", "training.max_grad_norm=1")


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([[*MLP, *SHARDINGS["per_block"], *INVOLVED]], id="per_block"),
        pytest.param([[*MLP, *SHARDINGS[name], *INVOLVED] for name in INTO_UNITS], id="involved", marks=pytest.mark.ci),
        pytest.param([["sharding=per_block", *INVOLVED], ["sharding=ddp"]], id="vit_tiny", marks=pytest.mark.ci),
    ],
)
def test_every_single_change_of_a_step_is_forecast_in_its_order(cases: list[list[str]]) -> None:
    """Of the page itself, on both ranks: nothing is added to it after the step."""
    for rank, measured in enumerate(run_ranks(2, timelines, cases)):
        for words, seen in zip(cases, measured, strict=True):
            observed = steps(forecast_profile(config(*words), 2, cuda=False, rank=rank))
            assert len(seen) > 50
            assert observed == seen, f"rank {rank} {' '.join(words)}"


@pytest.mark.parametrize("sharding", ["per_block", pytest.param("ddp", marks=pytest.mark.ci)])
def test_a_followed_step_leaves_no_model_behind(sharding: str):
    def blocks() -> int:
        gc.collect()
        return sum(type(thing).__name__.endswith("EncoderBlock") for thing in gc.get_objects())

    before = blocks()
    forecast_profile(config(f"sharding={sharding}", "model.num_layers=1", "training.grad_accum_steps=2"), 2, cuda=False)
    assert blocks() == before
    words = ("model=mlp", "sharding=per_layer", "reshard_after_forward=to_size", "reshard_after_forward.size=2")
    *_, (left, _) = forecast_profile(config(*words), 4, cuda=False).states()  # also of the shards of smaller meshes
    assert {name for name, size in left.items() if size} == {"param", "optimizer", "input", "activation"}
    assert left["activation"] == 4, "the loss"


def test_offloaded_state_is_counted_on_the_host():
    kept, sent = (forecast_profile(config("model=mlp", f"offload={o}"), 2, cuda=True).peaks for o in ("none", "cpu"))
    assert sent["device"]["param"] == sent["device"]["optimizer"] == sent["device"]["grad"] == 0
    assert sent["host"]["param"] == sent["host"]["grad"] == kept["device"]["param"] == WHOLE // 2
    assert sent["host"]["optimizer"] == kept["device"]["optimizer"] == WHOLE + 4 * 4
    for place in (*kept.values(), *sent.values()):
        assert sum(size for name, size in place.items() if name != "total") == place["total"]


# lm_tiny in bfloat16, by token and block: its input, that of both norms' layers, q and k after rotation, v, attention's
# output by heads and by tokens, the sum before the second norm; four of the feed-forward's width; 4 bytes a head of
# attention's sums and for each norm.
SAVED = 2 * (64 + 64 + 64 + 64 + 32 + 32 + 64 + 64 + 64 + 4 * 192) + 4 * (4 + 2)


@pytest.mark.parametrize("words", ["sharding=per_block", "sharding=root", "sharding.api=fsdp1 sharding=per_layer"])
def test_what_blocks_save_waits_on_the_host(words: str):
    """All of it, once, and no weights. Where long sequences hold the peak it is lower by just that, where weights,
    gradients and the optimizer's states do by nothing."""

    def peaks(length: int, checkpointing: str) -> list[dict[str, dict[str, int]]]:
        lm = ("model=lm_tiny", "task=language", "data=synthetic_tokens", "training.global_batch_size=2",
              "precision=bf16_mixed", f"data.seq_len={length}", f"model.max_seq_len={length}",
              "reshard_after_forward=always", f"activation_checkpointing={checkpointing}", *words.split())  # fmt: skip
        return [forecast_profile(config(*lm, f"activation_offload={o}"), 2, cuda=True).peaks for o in ("none", "cpu")]

    kept, moved = peaks(2048, "none")
    assert moved["host"]["activation"] == 2 * 2048 * SAVED and kept["host"]["activation"] == 0
    assert kept["device"]["total"] - moved["device"]["total"] == 2 * 2048 * SAVED > kept["device"]["total"] / 2
    if "per_layer" not in words and pytorch_version() >= (2, 15):  # whose units a recomputation would count
        kept, moved = peaks(2048, "selective")
        # the inputs, every second of seven products, and attention with its sums
        assert moved["host"]["activation"] == 2 * 2048 * (2 * (64 + 64 + 32 + 192 + 64 + 64) + 4 * 4)
    kept, moved = peaks(32, "full")
    assert moved["host"]["activation"] == 2 * 32 * 64 * 2, "the input of each of two blocks"
    if words == "sharding=per_block":
        assert moved["device"]["total"] == kept["device"]["total"]


def test_what_a_gpu_needs_beside_its_tensors_is_named():
    """DDP's gradients of 16 bits are held twice; a GPU that is full does without the copy that NCCL still holds."""
    assert forecast(config("model=mlp"), 8, cuda=False).allowances == {}
    plain = forecast(config("model=mlp"), 8, cuda=True)
    assert [*plain.allowances] == ["CUDA context", "NCCL buffers", "kernel workspaces", "fragmentation"]
    assert plain.reserved_bytes is not None and plain.reserved_bytes % 2**21 == 0, "whole segments"
    assert plain.needed_bytes == plain.reserved_bytes + CONTEXT_BYTES + NCCL_BYTES
    narrow = forecast(config("model=mlp", "sharding=ddp", "precision=bf16"), 2, cuda=True)
    assert narrow.allowances["compressed gradients"] == WHOLE // 4 * 2 * 2
    frozen = ("model.frozen=true", "sharding=ddp", "precision=bf16", "optimizer=sgd")
    head = forecast(config(*of_model("Tuned", *frozen)), 2, cuda=True)
    assert head.allowances["compressed gradients"] == (64 * 10 + 10) * 2 * 2, "not the frozen weights"
    assert narrow.reserved_bytes and narrow.active_bytes and narrow.peak_bytes < narrow.active_bytes
    beside = narrow.needed_bytes - narrow.reserved_bytes - narrow.allowances["compressed gradients"]
    assert narrow.least_bytes == beside + narrow.active_bytes < narrow.needed_bytes
    # pinned buffers are powers of two, as the batch is; parameters and gradients: the head's weight and bias
    pinned = forecast(config("model=mlp", "offload=cpu"), 2, cuda=True).host_allowances.values()
    assert [*pinned] == [2 * ((32768 - 5 * 1024 * 4) + (32 - 20))]
    # and what a block saves: 16 rows of 1000 numbers, beside as many pixels as are a power of two
    moved = forecast(config("model=mlp", "model.hidden_dim=1000", "activation_offload=cpu"), 2, cuda=True)
    assert [*moved.host_allowances.values()] == [65536 - 16 * 1000 * 4]
    # a communicator of all, two of hybrid sharding, and one of a smaller mesh
    smaller = ("reshard_after_forward=to_size", "reshard_after_forward.size=2", "sharding.dp_replicate=2")
    assert (communicators(config(), 8), communicators(config(*smaller), 8)) == (1, 4)
    # of the parts of a batch, and of tensor parallelism
    assert (communicators(config("sharding.tp=2"), 8), communicators(config(*smaller[2:], "sharding.tp=2"), 8)) == (
        3,
        5,
    )


def test_the_largest_batch_is_the_users_own_example():
    """8 items of 99 rows of 16 numbers and a label on a rank, also beside a collate_fn of the same package."""
    for words in ([], ["data.collate_fn=tests.forecast.models.padded"]):
        worst = of_model("Mean", *words, "data._target_=tests.forecast.models.Worst")
        assert forecast_profile(config(*worst), 2, cuda=False).peaks["device"]["input"] == 8 * (99 * 16 * 4 + 8)
    other = of_model("Mean", "data.collate_fn=torch.utils.data.default_collate")
    other.append("data._target_=tests.forecast.models.Worst")
    assert forecast_profile(config(*other), 2, cuda=False).peaks["device"]["input"] == 8 * (16 * 16 * 4 + 8)


def test_what_a_trial_holds_on_its_host_beside_its_steps_is_counted():
    """Two batches for each process of the loader, an asynchronous checkpoint's copy, and the model that rank 0 exports.

    The mlp's rank has half of the parameters and of two averages, and 4 counts of steps, on its GPU.
    """
    plain = forecast(config("model=mlp"), 2, cuda=True)
    words = ("data.loader_workers=3", "checkpoint.mode=async", "export=true")
    held = on_host(plain, config("model=mlp", *words))
    assert held.host_bytes - plain.host_bytes == 2 * 3 * BATCH + 3 * WHOLE // 2 + 4 * 4
    two = replace(held, host=Host(GIB, 2))
    assert two.host_needed_bytes == 2 * held.host_bytes + WHOLE and not two.host_is_short
    assert replace(two, host=Host(two.host_needed_bytes - 1, 2)).fits is False
    assert (
        on_host(plain, config("model=mlp", "export=false", "checkpoint.mode=sync")).host_needed_bytes
        == plain.host_bytes
    )
    assert Request(config("model=mlp", *words), 2, True, None).weigh(plain).host_once == {"exported model": WHOLE}


def test_a_model_in_bfloat16_holds_half_of_everything():
    """Parameters, gradients, averages and the exported file. DDP has no copies of gradients: they are as narrow."""
    words = ("model=mlp", "sharding=ddp", "precision=bf16", "export=true", "reshard_after_forward=default")
    mixed, pure = (
        on_host(forecast(config(*words, *more), 2, cuda=True), config(*words, *more))
        for more in ([], ["precision=bf16_pure"])
    )
    held = {name: pure.peaks["device"][name] for name in ("param", "grad", "optimizer")}
    assert held == {"param": WHOLE // 2, "grad": WHOLE // 2, "optimizer": WHOLE + 4 * 4}
    assert mixed.peaks["device"]["param"] == WHOLE and pure.host_once == {"exported model": WHOLE // 2}
    assert COMPRESSED in mixed.allowances and COMPRESSED not in pure.allowances


def test_ddp_leaves_the_types_of_a_model_in_bfloat16_alone():
    """Autocast would keep the results of its layer norms and softmax in float32."""
    sizes = []
    for words in (["sharding=ddp"], ["sharding=root", "reshard_after_forward=never"]):
        step = forecast_profile(config("model=vit_tiny", "precision=bf16_pure", *words), 2, cuda=True)
        sizes.append(step.peaks["device"]["activation"])
    assert 0.9 < sizes[0] / sizes[1] < 1


@pytest.mark.parametrize(
    ("words", "workers", "cuda", "capacity"),
    [
        ("model=mlp", 2, False, 40 * 2**20),
        pytest.param("model=mlp", 2, True, 2 * 2**30, marks=pytest.mark.ci),
        pytest.param(  # two pairs of workers
            "task=language model=lm_tiny model.num_layers=1 data=pydoc sharding.tp=2", 4, False, 6 * 2**20,
            marks=pytest.mark.ci,
        ),
    ],
)  # fmt: skip
def test_the_largest_microbatch_fits_and_the_next_does_not(words: str, workers: int, cuda: bool, capacity: int):
    trial = config(*words.split(), "training.grad_accum_steps=2", "forecast.solve=batch")

    def largest(capacity: int) -> int:
        solved = forecast_one(Request(trial, workers, cuda, capacity)).solved
        assert solved is not None
        return solved.value

    most = largest(capacity)
    assert most

    def fits(size: int) -> bool:
        """Of a GPU 10 % are left without what the allocator caches."""
        batch = replace(trial.training, global_batch_size=size * 2 * 2)
        made = forecast(replace(trial, training=batch), workers, cuda)
        return made.needed_bytes <= capacity and made.least_bytes <= (0.9 if cuda else 1) * capacity

    assert fits(most) and not fits(most + 1)
    assert largest(1000) == 0, "not even the parameters fit"


def test_fsdp1_recomputes_the_attention_of_a_gpu():
    """It failed where only the forward pass had a mode of ours around it: the kernels kept other tensors."""
    words = "task=language model=lm_tiny model.num_layers=1 data=pydoc precision=bf16_mixed sharding=per_block"
    once, twice = (
        forecast_profile(config(*words.split(), "sharding.api=fsdp1", f"activation_checkpointing={each}"), 2, cuda=True)
        for each in ("none", "full")
    )
    assert twice.peaks["device"]["activation"] < once.peaks["device"]["activation"]


def test_an_optimizer_that_reads_a_value_has_no_forecast():
    own = "tests.workloads.user.optim"
    message = rf"in the step of optimizer={own}\.Cautious, at tests/.*/optim\.py:\d+;"
    with pytest.raises(NotFollowedError, match=message):
        forecast_profile(config("model=mlp", f"optimizer._target_={own}.Cautious"), 2, cuda=False)
    assert forecast_profile(config("model=mlp", f"optimizer._target_={own}.Lion"), 2, cuda=True).peaks


def test_what_only_training_does_has_no_forecast():
    holds = ["model._target_=tests.training.test_constructor.Clamps", "task.loss=tests.training.test_constructor.loss"]
    holds.append("data._target_=tests.training.test_constructor.Rows")
    with pytest.raises(NotFollowedError, match=r"cannot follow the model's clipped, which holds .* head\.weight"):
        forecast_profile(config(*holds, "sharding=ddp"), 2, cuda=False)
    for words in (["sharding.limit_all_gathers=false"], ["offload=cpu"]):
        with pytest.raises(NotFollowedError, match="has no forecast for a GPU"):
            forecast_profile(config("model=mlp", "sharding.api=fsdp1", *words), 2, cuda=True)
    with pytest.raises(NotFollowedError, match=r"flex_attention has no forecast: on a CPU.*; measure this trial"):
        forecast_profile(config(*of_model("Flex")), 2, cuda=True)
    with pytest.raises(NotFollowedError, match=r"a tensor on the CPU meets one on the GPU, at .*models.py:\d+, which"):
        forecast_profile(config(*of_model("Mask")), 2, cuda=True)
    with pytest.raises(ModelError, match=r"the model's clipped holds the parameter head\.weight, but FSDP2 puts"):
        forecast_profile(config(*holds, "sharding=root"), 2, cuda=False)
