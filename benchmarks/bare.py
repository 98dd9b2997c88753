"""The same training with no platform around it: what an engineer writes by hand for one setting.

torchrun --nproc-per-node 2 benchmarks/bare.py <epochs>

vit_tiny on digits, per-block FSDP2 in fp32, Adam 1e-3, global batch 64. Uses nothing of fsdp_lab. Prints
the samples per second of each epoch but the first.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import EncoderBlock


def main(epochs: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)[:1437]
    dataset = TensorDataset(images, torch.from_numpy(digits.target).long()[:1437])
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=28, patch_size=7, num_layers=4, num_heads=2, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    model.conv_proj = torch.nn.Conv2d(1, 64, kernel_size=7, stride=7)
    for block in [m for m in model.modules() if isinstance(m, EncoderBlock)]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    speeds = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        begun, steps = time.perf_counter(), 0
        for batch, labels in loader:
            loss = F.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        speeds.append(steps * 64 / (time.perf_counter() - begun))
    if dist.get_rank() == 0:
        print(json.dumps(speeds[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
