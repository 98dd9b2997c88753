"""The same training with no platform around it: what an engineer writes by hand for one setting.

torchrun --nproc-per-node 2 benchmarks/bare.py <epochs> [fp32 | fp16] [copies of the training samples] [file]

vit_tiny on digits, per-block FSDP2, Adam 1e-3, global batch 64, a validation after each epoch; first weights, samples
and their order are a trial's. Uses nothing of fsdp_lab. Prints the samples per second of each epoch but the first,
validation left out. Once a second it writes into the file which step it has reached, and when.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import EncoderBlock

BATCH = 64


def parallelize(model, precision):
    """Return the model, sharded in place, and its optimizer."""
    fp16 = precision == "fp16"
    mesh, dtype = init_device_mesh("cpu", (dist.get_world_size(),)), torch.float16 if fp16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in [m for m in model.modules() if isinstance(m, EncoderBlock)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, **({"foreach": True} if fp16 else {"fused": True}))


def compute_loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


def train_step(model, optimizer, scaler, batch):
    scaler.scale(compute_loss(model, batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def load_splits():
    """Return training and validation samples, each `(images float (N, 1, 28, 28), labels (N,))`."""
    digits = load_digits()
    pixels = (torch.from_numpy(digits.images) * 255 / 16).round().float().unsqueeze(1) / 127.5 - 1
    images = F.interpolate(pixels, size=(28, 28), mode="bilinear", align_corners=False)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    labels = torch.from_numpy(digits.target).long()
    return [(images[part], labels[part]) for part in (order[:1437], order[1437:])]


def build_model():
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=28, patch_size=7, num_layers=4, num_heads=2, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    model.conv_proj = torch.nn.Conv2d(1, 64, kernel_size=7, stride=7)
    return model


def batches(dataset, epoch, accum=1):
    """Return the batches of this rank in an epoch; with `accum`, each in so many parts."""
    steps = len(dataset) // BATCH
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))[: steps * BATCH]
    mine = order.view(steps * accum, dist.get_world_size(), -1)[:, dist.get_rank()]
    return DataLoader(dataset, batch_sampler=mine.tolist())


def main(epochs: int, precision: str = "fp32", copies: str = "1", progress: str = "") -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (images, labels), validation = load_splits()
    dataset = TensorDataset(images.repeat(int(copies), 1, 1, 1), labels.repeat(int(copies)))
    val_images, val_labels = (part[rank::world_size] for part in validation)
    model, optimizer = parallelize(build_model(), precision)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

    speeds, written = [], time.time()
    for epoch in range(epochs):
        loader = batches(dataset, epoch)
        begun, steps = time.perf_counter(), 0
        for batch in loader:
            train_step(model, optimizer, scaler, batch)
            steps += 1
            if progress and rank == 0 and time.time() - written >= 1:
                written = time.time()
                Path(progress).write_text(json.dumps({"step": epoch * len(loader) + steps, "time": written}))
        speeds.append(steps * BATCH / (time.perf_counter() - begun))
        with torch.no_grad():
            model.eval()
            for batch in zip(val_images.split(32), val_labels.split(32), strict=True):
                compute_loss(model, batch)
            model.train()
    if rank == 0:
        print(json.dumps(speeds[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
