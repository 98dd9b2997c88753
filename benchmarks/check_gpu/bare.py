"""What an engineer writes by hand for one setting: per-block FSDP2 of a ViT in bf16_mixed. Uses nothing of fsdp_lab."""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import EncoderBlock

_IMAGES = 64  # different ones


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Noise of the shape that the model takes, a whole batch an item."""

    def __init__(self, num_batches: int, batch_size: int, channels: int, size: int, num_classes: int) -> None:
        self.images = torch.randint(0, 256, (_IMAGES, channels, size, size), dtype=torch.uint8)
        self.labels = torch.randint(0, num_classes, (_IMAGES,))
        self.num_batches, self.batch_size = num_batches, batch_size

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(number * self.batch_size, (number + 1) * self.batch_size) % _IMAGES
        return self.images[index].float().div_(127.5).sub_(1.0), self.labels[index]


def step_times(vit: dict[str, int], channels: int, batch_size: int, steps: int, loader_workers: int) -> list[float]:
    """Train some steps.

    Args:
        vit: the arguments of torchvision's VisionTransformer.
        batch_size: of one rank.

    Returns:
        the seconds of every step, loading included.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dataset = Images(steps * dist.get_world_size(), batch_size, channels, vit["image_size"], vit["num_classes"])
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=DistributedSampler(dataset),
        num_workers=loader_workers,
        pin_memory=cuda,
        persistent_workers=loader_workers > 0,
    )
    model = build(vit, channels, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    marks = [mark(cuda)]
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        F.cross_entropy(model(images).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark(cuda))
    if cuda:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]  # type: ignore[union-attr,arg-type]
    return [b - a for a, b in itertools.pairwise(marks)]  # type: ignore[operator,misc]


def build(vit: dict[str, int], channels: int, device: torch.device) -> nn.Module:
    """The sharded model with its first weights."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = VisionTransformer(**vit)  # type: ignore[arg-type]
    if channels != 3:
        model.conv_proj = nn.Conv2d(channels, vit["hidden_dim"], vit["patch_size"], vit["patch_size"])
    model.to(device)
    for block in [module for module in model.modules() if isinstance(module, EncoderBlock)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.train()


def mark(cuda: bool) -> torch.cuda.Event | float:
    """Now, without waiting for the device."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
