"""One unsharded process in plain PyTorch, in float32 on the CPU: what the sharded runs are compared with.

Shares with the package the model's builder and the synthetic images. First weights, batches, optimizer, clipping and
losses are written again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_lab.config import TrialConfig
from fsdp_lab.workloads.build import build_model_spec
from fsdp_lab.workloads.vision.images import preprocess
from fsdp_lab.workloads.vision.synthetic import synthetic


@dataclass(frozen=True)
class Run:
    """The loss of every step over the global batch, and the validation loss after the last one."""

    losses: list[float]
    val_loss: float


def train_unsharded(config: TrialConfig, wrong: str = "") -> Run:
    """Train the trial's one epoch.

    Args:
        wrong: a mistake to make on purpose: `sum` adds up the gradients of two ranks instead of averaging them,
            `one_rank` takes those of the first of two ranks alone.
    """
    model = build(config)
    o = config.optimizer
    optimizer = torch.optim.Adam(model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay)
    assert config.data.num_train is not None and config.data.num_val is not None and config.training.epochs == 1
    train = synthetic(config.data.num_train, config.model, 0)
    batch = config.training.global_batch_size
    generator = torch.Generator().manual_seed(config.training.seed * 1_000_003)
    losses = []
    for index in torch.randperm(len(train), generator=generator)[: len(train) // batch * batch].split(batch):
        images = preprocess(train.images[index % len(train.images)], config.model)
        each = F.cross_entropy(model(images), train.labels[index], reduction="none")
        optimizer.zero_grad()
        {"sum": 2 * each.mean(), "one_rank": each[: batch // 2].mean()}.get(wrong, each.mean()).backward()
        if config.training.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
        optimizer.step()
        losses.append(each.mean().item())
    val = synthetic(config.data.num_val, config.model, 1)
    with torch.no_grad():
        index = torch.arange(len(val)) % len(val.images)
        logits = model.eval()(preprocess(val.images[index], config.model))
    return Run(losses, F.cross_entropy(logits, val.labels).item())


def build(config: TrialConfig) -> nn.Module:
    """The model with its first weights."""
    torch.manual_seed(config.training.seed)
    return build_model_spec(config.model).build()
