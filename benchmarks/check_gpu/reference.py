"""One unsharded process in plain PyTorch, in float32 on the CPU: what the sharded runs are compared with.

Shares with the package the model's builder, the synthetic images and the random tokens. First weights, batches,
optimizer, clipping and losses are written again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import TrialConfig
from fsdp_lab.workloads.build import build_model_spec
from fsdp_lab.workloads.language.tokens import SyntheticTokens
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
    losses_of = token_losses if config.task.name == "language" else image_losses
    batch, num_train = config.training.global_batch_size, config.data.num_train
    generator = torch.Generator().manual_seed(config.training.seed * 1_000_003)
    losses = []
    for index in torch.randperm(num_train, generator=generator)[: num_train // batch * batch].split(batch):
        each = losses_of(model, config, "train", index)
        optimizer.zero_grad()
        {"sum": 2 * each.mean(), "one_rank": each[: batch // 2].mean()}.get(wrong, each.mean()).backward()
        if config.training.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
        optimizer.step()
        losses.append(each.mean().item())
    with torch.no_grad():
        each = losses_of(model.eval(), config, "val", torch.arange(config.data.num_val))
    return Run(losses, each.mean().item())


def image_losses(model: nn.Module, config: TrialConfig, split: str, index: Tensor) -> Tensor:
    """The loss of each image."""
    count, seed = (config.data.num_train, 0) if split == "train" else (config.data.num_val, 1)
    items = synthetic(count, config.model, seed)
    images = preprocess(items.images[index % len(items.images)], config.model)
    return F.cross_entropy(model(images), items.labels[index], reduction="none")


def token_losses(model: nn.Module, config: TrialConfig, split: str, index: Tensor) -> Tensor:
    """The mean loss of each row of tokens, all of the same length."""
    arguments = {name: config.data.arguments[name] for name in ("vocab_size", "seq_len")}
    rows = torch.stack([SyntheticTokens(split, **arguments)[i] for i in index.tolist()])
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1).mean(1)


def build(config: TrialConfig) -> nn.Module:
    """The model with its first weights."""
    torch.manual_seed(config.training.seed)
    return build_model_spec(config.model).build()
