"""The order of the samples depends on seed and epoch only, and all ranks load their data together."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from fsdp_lab.config import UserError
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.training.data import TrainOrder, build_loader, val_order
from fsdp_lab.training.distributed import ParallelDims
from fsdp_lab.workloads.user.data import Collated
from fsdp_lab.workloads.vision.digits import Digits
from fsdp_lab.workloads.vision.images import expand_channels

HOST = torch.device("cpu")


def dims_of(world_size: int) -> list[ParallelDims]:
    return [ParallelDims(dp_shard=world_size, rank=rank) for rank in range(world_size)]


def test_grey_images_for_a_model_of_three_channels_can_be_pinned() -> None:
    """Pinning allocates the same strides and copies into them, which PyTorch refuses for a stride of 0. The loader
    itself skips pinning where there is no accelerator, so the same two steps are taken here."""
    train = Collated(Digits("train", image_size=28), default_collate, None)
    (dims,) = dims_of(1)
    order = TrainOrder(len(train), TrainingConfig(global_batch_size=16), dims)
    images, labels = next(iter(build_loader(train, order, None, HOST)))
    for tensor in (images, labels):
        torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    assert expand_channels(images, 3).shape == (16, 3, 28, 28)


def global_batches(world_size: int, accumulate: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    """The images of every optimizer step, all ranks and microbatches together."""
    training = TrainingConfig(global_batch_size=24, grad_accum_steps=accumulate, seed=seed)
    steps: list[list[int]] = [[] for _ in range(100 // 24)]
    for dims in dims_of(world_size):
        order = TrainOrder(100, training, dims)
        order.epoch = epoch
        microbatches = list(order)
        assert len(microbatches) == len(order) == 4 * accumulate
        assert all(len(m) == 24 // world_size // accumulate for m in microbatches)
        for i, microbatch in enumerate(microbatches):
            steps[i // accumulate] += microbatch.tolist()
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_sees_the_same_images_on_any_number_of_workers(world_size: int, accumulate: int) -> None:
    steps = global_batches(world_size, accumulate, seed=3, epoch=2)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3 * 1_000_003 + 2)).tolist()
    assert steps == [sorted(order[i * 24 : (i + 1) * 24]) for i in range(4)]
    assert len({image for step in steps for image in step}) == 96  # none twice in an epoch


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = [global_batches(2, 1, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert orders[0] == global_batches(2, 1, 0, 0)


def test_a_batch_larger_than_the_data_is_reported() -> None:
    with pytest.raises(UserError, match=r"global_batch_size=64 .* 50 training samples; use at most 50"):
        TrainOrder(50, TrainingConfig(global_batch_size=64), dims_of(1)[0])


@pytest.mark.parametrize(("count", "world_size", "batch"), [(10, 1, 4), (10, 4, 2), (3, 4, 8), (12, 3, 4), (360, 2, 7)])
def test_validation_counts_each_image_once(count: int, world_size: int, batch: int) -> None:
    orders = [list(val_order(count, batch, dims)) for dims in dims_of(world_size)]
    assert len({len(order) for order in orders}) == 1  # all ranks step together
    seen = [i for order in orders for microbatch in order for i in microbatch.tolist() if i >= 0]
    assert sorted(seen) == list(range(count))
    assert all(len(microbatch) <= batch for order in orders for microbatch in order)


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_ranks_share_their_samples(tp: int) -> None:
    every = [ParallelDims(dp_replicate=2, dp_shard=2, tp=tp, rank=rank) for rank in range(4 * tp)]
    training = TrainingConfig(global_batch_size=24)
    orders = [torch.stack(list(TrainOrder(100, training, dims))) for dims in every]
    assert all(torch.equal(orders[rank], orders[rank // tp * tp]) for rank in range(4 * tp))
    assert len(torch.cat(orders[::tp], 1).unique()) == 96, "no sample is in two parts"
