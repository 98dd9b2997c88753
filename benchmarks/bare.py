"""The same training with no platform around it: what an engineer writes by hand for one setting.

torchrun --nproc-per-node 2 benchmarks/bare.py <epochs> [fp32 | fp16] [copies of the training samples] [file]

vit_tiny on digits, per-block FSDP2, Adam 1e-3, global batch 64, a validation after each epoch. Uses nothing of
fsdp_lab. Prints the samples per second of each epoch but the first, validation left out. Once a second it writes into
the file which step it has reached, and when.
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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import EncoderBlock


def main(epochs: int, precision: str = "fp32", copies: str = "1", progress: str = "") -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(digits.target).long()
    dataset = TensorDataset(images[:1437].repeat(int(copies), 1, 1, 1), labels[:1437].repeat(int(copies)))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    val_images, val_labels = images[1437 + rank :: world_size], labels[1437 + rank :: world_size]
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler, drop_last=True)

    fp16 = precision == "fp16"
    dtype = torch.float16 if fp16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=28, patch_size=7, num_layers=4, num_heads=2, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    model.conv_proj = torch.nn.Conv2d(1, 64, kernel_size=7, stride=7)
    for block in [m for m in model.modules() if isinstance(m, EncoderBlock)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **({"foreach": True} if fp16 else {"fused": True}))
    scaler = torch.amp.GradScaler("cpu", enabled=fp16)

    speeds, written = [], time.time()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        begun, steps = time.perf_counter(), 0
        for batch, targets in loader:
            loss = F.cross_entropy(model(batch).float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            steps += 1
            if progress and rank == 0 and time.time() - written >= 1:
                written = time.time()
                Path(progress).write_text(json.dumps({"step": epoch * len(loader) + steps, "time": written}))
        speeds.append(steps * 64 / (time.perf_counter() - begun))
        with torch.no_grad():
            model.eval()
            for batch, targets in zip(val_images.split(32), val_labels.split(32), strict=True):
                F.cross_entropy(model(batch).float(), targets)
            model.train()
    if dist.get_rank() == 0:
        print(json.dumps(speeds[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
