"""Forecasts against numbers worked out by hand, and what they say when they cannot be made."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_lab.config import forecast_settings
from fsdp_lab.forecast import forecast as module
from fsdp_lab.forecast.capacity import CONTEXT_BYTES, GIB, NCCL_BYTES, communicators, pinned_rounding
from fsdp_lab.forecast.forecast import NeedsValuesError, forecast, forecast_profile
from fsdp_lab.forecast.run import Request
from fsdp_lab.training.profile import Event, Profile
from fsdp_lab.workloads.build import build_workload
from tests.ranks import config

# model=mlp: 1024 -> 1024 -> 10, so two weights and two biases
SHAPES = ((1024, 1024), (1024, 1), (10, 1024), (10, 1))
PARAMETERS = 1024 * 1024 + 1024 + 10 * 1024 + 10


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_an_even_shard_of_parameters_and_adams_state_by_hand(workers: int):
    """Rank 0 holds ceil(rows / workers) rows of each tensor, in float32, and Adam twice that and a step count each."""
    shares = [-(-rows // workers) * columns for rows, columns in SHAPES]
    peaks = forecast_profile(config("model=mlp", "training.global_batch_size=32"), workers, cuda=False).peaks["device"]
    assert peaks["param"] == 4 * sum(shares)
    assert peaks["optimizer"] == 2 * 4 * sum(shares) + 4 * len(shares)
    images = 32 // workers
    assert peaks["input"] == images * (32 * 32 * 4 + 8), "float32 pixels and an int64 label each"


def test_ddp_holds_everything_on_every_worker():
    peaks = forecast_profile(config("model=mlp", "sharding=ddp"), 4, cuda=False).peaks["device"]
    assert peaks["param"] == 4 * PARAMETERS
    assert peaks["optimizer"] == 2 * 4 * PARAMETERS + 4 * len(SHAPES)
    assert peaks["grad"] == 4 * PARAMETERS, "gradients are views of the buckets"
    assert peaks["activation"] < 4 * 1024 * 1024


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(
    "sharding", [["ddp"], ["root"], ["per_block"], ["size_based", "sharding.min_num_params=20000"]]
)
def test_a_timeline_ends_with_its_step(sharding: list[str], cuda: bool):
    """What is given up after it, the model and the optimizer's state, is no change of the step."""
    profile = forecast_profile(config("model=mlp", f"sharding={sharding[0]}", *sharding[1:]), 2, cuda)
    gc.collect()

    def held(events: list[Event]) -> dict[str, int]:
        last = {event.storage: event for event in events}
        return {c: sum(e.num_bytes for e in last.values() if e.category == c) for c in ("param", "optimizer")}

    assert held(profile.events) == held(profile.events[: profile.begun])
    assert held(profile.events)["optimizer"] > 4 * PARAMETERS


def test_what_a_step_makes_is_gone_at_its_end_also_the_shards_of_smaller_meshes():
    """But for the loss, a number: the recorder keeps nothing alive."""
    words = ("model=mlp", "sharding=per_layer", "reshard_after_forward=to_size", "reshard_after_forward.size=2")
    *_, (left, _) = forecast_profile(config(*words), 4, cuda=False).states()
    assert {name: size for name, size in left.items() if size and name not in ("param", "optimizer", "input")} == {
        "activation": 4
    }


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_sgd_without_momentum_has_no_state(momentum: float):
    profile = forecast_profile(config("model=mlp", "optimizer=sgd", f"optimizer.momentum={momentum}"), 2, cuda=False)
    assert ("optimizer" in {event.category for event in profile.events[: profile.begun]}) is (momentum > 0)


def test_offloaded_state_is_counted_on_the_host_and_categories_add_up_to_the_peak():
    kept = forecast_profile(config("model=mlp", "offload=none"), 2, cuda=True).peaks
    sent = forecast_profile(config("model=mlp", "offload=cpu"), 2, cuda=True).peaks
    assert sent["device"]["param"] == sent["device"]["optimizer"] == sent["device"]["grad"] == 0
    for category in ("param", "optimizer"):
        # the device counts in blocks of 512 bytes, the host to the byte
        assert 0 <= kept["device"][category] - sent["host"][category] < 512 * 12
    assert sent["host"]["grad"] == sent["host"]["param"]
    assert sent["device"]["total"] < kept["device"]["total"]
    for place in (*kept.values(), *sent.values()):
        assert sum(size for name, size in place.items() if name != "total") == place["total"]


def test_a_tied_parameter_is_offloaded_once():
    words = ["task=language", "model=lm_tiny", "model.tied=true", "offload=cpu"]
    host = forecast_profile(config(*words), 2, cuda=True).peaks["host"]
    workload = build_workload(*(getattr(config(*words), part) for part in ("model", "data", "task")))
    shapes = [parameter.shape for parameter in workload.model.build().parameters()]
    assert host["param"] == 4 * sum(-(-shape[0] // 2) * math.prod(shape[1:]) for shape in shapes)


def test_tensors_are_counted_as_requested_and_what_is_reserved_in_whole_segments():
    config_ = config("model=mlp")
    assert any(event.num_bytes % 512 for event in forecast_profile(config_, 2, cuda=True).events)
    result = forecast(config_, 2, cuda=True)
    assert result.reserved_bytes is not None and result.reserved_bytes % 2**21 == 0
    assert result.needed_bytes == result.reserved_bytes + CONTEXT_BYTES + NCCL_BYTES
    assert result.active_bytes is not None and result.peak_bytes < result.active_bytes < result.reserved_bytes
    assert forecast(config_, 2, cuda=False).reserved_bytes is None


def test_pinned_buffers_are_rounded_up_to_a_power_of_two():
    sizes = [("param", 1000), ("grad", 4096), ("optimizer", 3000), ("param", 5)]
    events = [Event(i, "host", category, size, "", "forward") for i, (category, size) in enumerate(sizes)]
    assert pinned_rounding(Profile(events, begun=0), ("param", "grad")) == 24 + 0 + 3
    assert pinned_rounding(Profile(events, begun=0), ("optimizer",)) == 4096 - 3000


def test_what_is_pinned_is_the_batch_and_with_offload_the_shards():
    def rounding(*words: str) -> dict[str, int]:
        return forecast(config("model=mlp", *words), 2, cuda=True).host_allowances

    (batch,) = rounding("offload=none").values()
    assert batch == 0, "16 images of 4 KiB and 16 labels of 8 bytes are powers of two as they are"
    assert rounding("offload=cpu_unpinned") == rounding("offload=none")
    (shards,) = rounding("offload=cpu").values()
    odd = 5 * 1024 * 4  # of the four shards only the head's weight and bias are no power of two
    assert shards == 2 * ((32768 - odd) + (32 - 20)), "parameters and gradients"
    assert forecast(config("model=mlp"), 2, cuda=False).host_allowances == {}


def test_a_machine_with_a_gpu_forecasts_offload_too(monkeypatch: pytest.MonkeyPatch):
    there = forecast_profile(config("model=mlp", "offload=cpu"), 2, cuda=True).peaks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert forecast_profile(config("model=mlp", "offload=cpu"), 2, cuda=True).peaks == there


def test_what_is_allowed_for_is_named():
    assert forecast(config("model=mlp"), 8, cuda=False).allowances == {}
    assert set(forecast(config("model=mlp"), 8, cuda=True).allowances) == {
        "CUDA context", "NCCL buffers", "kernel workspaces", "fragmentation",
    }  # fmt: skip
    assert forecast(config("model=mlp"), 1, cuda=True).allowances["NCCL buffers"] == NCCL_BYTES


def test_compressed_gradients_are_allowed_for_and_no_reason_to_skip():
    """DDP's, of 16 bits, twice; and a GPU that is full does without the copy that NCCL still holds."""
    narrow = forecast(config("model=mlp", "sharding=ddp", "precision=bf16"), 2, cuda=True)
    assert narrow.allowances["compressed gradients"] == narrow.num_params[0] * 2 * 2
    held = narrow.peak_bytes + sum(narrow.allowances.values()) - narrow.reserved_bytes + narrow.active_bytes
    assert narrow.least_bytes == held - narrow.allowances["compressed gradients"]
    for words in (["sharding=ddp"], ["precision=bf16"]):
        assert "compressed gradients" not in forecast(config("model=mlp", *words), 2, cuda=True).allowances


@pytest.mark.parametrize(
    ("workers", "words", "expected"),
    [
        (1, [], 1),
        (8, [], 1),
        (8, ["sharding=ddp"], 1),
        (8, ["sharding.dp_replicate=2"], 3),
        (8, ["sharding.separate_reduce_scatter_group=true"], 2),
        (8, ["reshard_after_forward=to_size", "reshard_after_forward.size=2"], 2),
        (8, ["reshard_after_forward=to_size", "reshard_after_forward.size=8"], 1),
        (8, ["reshard_after_forward=to_size", "reshard_after_forward.size=2", "sharding.dp_replicate=2"], 4),
    ],
)
def test_every_communicator_is_counted(workers: int, words: list[str], expected: int):
    assert communicators(config(*words), workers) == expected


@pytest.mark.parametrize(
    ("cuda", "capacity"),
    [
        (False, 40 * 2**20),
        pytest.param(True, 2 * GIB, marks=pytest.mark.ci),
        pytest.param(False, 123_456_789, marks=pytest.mark.full),
    ],
)
def test_the_largest_microbatch_fits_and_the_next_does_not(cuda: bool, capacity: int):
    trial = config("model=mlp", "training.grad_accum_steps=2")
    most = forecast(trial, 2, cuda, capacity, largest=True).largest_microbatch
    assert most

    def needs(size: int) -> int:
        batch = replace(trial.training, global_batch_size=size * 2 * 2)
        return forecast(replace(trial, training=batch), 2, cuda).needed_bytes

    assert needs(most) <= capacity < needs(most + 1)


def test_no_microbatch_fits_where_the_parameters_do_not():
    assert forecast(config("model=mlp"), 2, False, 1000, largest=True).largest_microbatch == 0


class Curious(nn.Module):
    """Looks at what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(28 * 28, 10)  # vit_tiny's images

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.layer(images.flatten(1))
        return logits if logits.sum() > 0 else -logits


def test_a_model_that_needs_real_values_is_shown_the_operation(monkeypatch: pytest.MonkeyPatch):
    workload = module.build_workload(config().model, config().data)
    curious = replace(workload, model=replace(workload.model, build=Curious, block_classes=(nn.Linear,)))
    monkeypatch.setattr(module, "build_workload", lambda *_: curious)
    with pytest.raises(NeedsValuesError, match=r"_local_scalar_dense.* needs one in the forward pass") as raised:
        forecast_profile(config(), 2, cuda=False)
    asks = Path(__file__).read_text().splitlines().index("        return logits if logits.sum() > 0 else -logits") + 1
    assert f"of the model, at tests/forecast/test_forecast.py:{asks};" in str(raised.value)
    # and nothing is left over that would stop the next one
    monkeypatch.undo()
    assert forecast_profile(config("model=mlp"), 2, cuda=False).peaks


def test_an_optimizer_that_reads_a_value_has_no_forecast():
    own = "tests.workloads.user.optim"
    message = rf"in the step of optimizer={own}\.Cautious, at tests/.*/optim\.py:\d+;"
    with pytest.raises(NeedsValuesError, match=message):
        forecast_profile(config("model=mlp", f"optimizer._target_={own}.Cautious"), 2, cuda=False)
    assert forecast_profile(config("model=mlp", f"optimizer._target_={own}.Lion"), 2, cuda=True).peaks


def test_on_a_cpu_what_is_offloaded_and_what_is_not_share_a_forecast():
    """Their peaks are equal to the byte there, on a GPU they are not."""
    for cuda in (False, True):
        words = ["model=mlp", "sharding=per_block", "precision=fp16", *(["forecast.device=cuda"] if cuda else [])]
        trials = [config(*words, word) for word in ("offload=none", "offload=cpu", "offload=cpu_unpinned")]
        keys = [Request.of(trial, 2).key for trial in trials]
        peaks = [forecast_profile(trial, 2, cuda).peaks for trial in trials]
        assert (
            [key == keys[0] for key in keys] == [result == peaks[0] for result in peaks] == [True, not cuda, not cuda]
        )


def test_what_speed_counts_has_a_forecast_of_its_own():
    samples, tokens = (
        config("model=lm_tiny", "task=model_loss", f"task.unit={unit}") for unit in ("samples", "tokens")
    )
    assert Request.of(samples, 2).key != Request.of(tokens, 2).key


SHARED = ("optimizer.lr=0.1", "training.seed=7", "optimizer.beta1=0.5", "lr_schedule=cosine", "training.epochs=9")
OF_ITS_OWN = (
    "optimizer.weight_decay=0.1", "training.max_grad_norm=1", "precision=bf16", "training.global_batch_size=64",
    "activation_checkpointing=full", "activation_checkpointing=every_n", "optimizer=sgd", "sharding=root", "model=mlp",
    "offload=cpu", "reshard_after_forward=never", "training.grad_accum_steps=2", "optimizer.implementation=foreach",
    "optimizer.momentum=0.9", "precision.loss_scaling=true", "data=synthetic", "compile=true", "precision=float8",
)  # fmt: skip


def test_trials_share_a_forecast_where_no_figure_differs():
    plain = forecast_settings(config(), 2)
    alike = [word for word in (*SHARED, *OF_ITS_OWN) if forecast_settings(config(word), 2) == plain]
    assert alike == [*SHARED] and plain != forecast_settings(config(), 4)


@pytest.mark.parametrize("sharding", ["per_block", pytest.param("ddp", marks=pytest.mark.ci)])
def test_a_followed_step_leaves_no_model_behind(sharding: str):
    def blocks() -> int:
        gc.collect()
        return sum(type(thing).__name__.endswith("EncoderBlock") for thing in gc.get_objects())

    before = blocks()
    forecast_profile(config(f"sharding={sharding}", "model.num_layers=1", "training.grad_accum_steps=2"), 2, cuda=False)
    assert blocks() == before
