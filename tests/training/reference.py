"""One unsharded process in plain PyTorch: what the sharded runs are compared with.

Shares with the package only the model's builder. The images come from
scikit-learn's own reader, and the batches are worked out again from seed and epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import TrialConfig
from fsdp_lab.workloads.build import build_model_spec


@dataclass
class Run:
    losses: list[float]  # of every step, over the global batch
    weights: dict[str, Tensor]
    val_loss: float
    val_accuracy: float


@lru_cache(maxsize=1)
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`(train, val)`, each `(images float (N, 1, 8, 8) in [-1, 1], labels)`: four fifths of a seeded shuffle."""
    from sklearn.datasets import load_digits  # here: it is slow, and ranks that import this file do not need it

    bunch = load_digits()
    pixels = (torch.from_numpy(bunch.images) * 255 / 16).round().float()
    images, labels = pixels.unsqueeze(1) / 127.5 - 1, torch.from_numpy(bunch.target).long()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    return tuple((images[part], labels[part]) for part in (order[:1437], order[1437:]))  # type: ignore[return-value]


def resize(images: Tensor, size: int) -> Tensor:
    return F.interpolate(images, size=(size, size), mode="bilinear")


def first_model(config: TrialConfig) -> nn.Module:
    """What a plain script starts with."""
    torch.manual_seed(config.training.seed)
    return build_model_spec(config.model).build()


def first_weights(config: TrialConfig) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in first_model(config).state_dict().items()}


def build_optimizer(model: nn.Module, config: TrialConfig) -> torch.optim.Optimizer:
    o = config.optimizer
    if o.name.name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.name.name]
    return kind(model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay)


def train_unsharded(config: TrialConfig, wrong: str = "") -> Run:
    """The trial on one process in float32.

    Args:
        wrong: a mistake to make on purpose: `sum` adds the gradients of two ranks up where they are to be
            averaged, `one_rank` takes those of the first of two ranks alone, `last_microbatch` those of the
            second half of the batch alone, `no_clip` leaves out the clipping.
    """
    (train_x, train_y), (val_x, val_y) = digits()
    count, batch, size = config.data.num_train or 1437, config.training.global_batch_size, config.model.image_size
    model = first_model(config)
    optimizer = build_optimizer(model, config)
    losses: list[float] = []
    for epoch in range(config.training.epochs):
        generator = torch.Generator().manual_seed(config.training.seed * 1_000_003 + epoch)
        order = torch.randperm(count, generator=generator)
        for step in range(count // batch):
            if len(losses) == config.training.max_steps:
                break
            index = order[step * batch : (step + 1) * batch]
            logits, labels = model(resize(train_x[index], size)), train_y[index]
            each = F.cross_entropy(logits, labels, reduction="none")
            half = batch // 2
            counted = {"one_rank": each[:half].mean(), "last_microbatch": each[half:].mean(), "sum": 2 * each.mean()}
            optimizer.zero_grad()
            counted.get(wrong, each.mean()).backward()
            if config.training.max_grad_norm is not None and wrong != "no_clip":
                nn.utils.clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
            optimizer.step()
            losses.append(each.mean().item())
    model.eval()
    with torch.no_grad():
        labels = val_y[: config.data.num_val]
        logits = model(resize(val_x[: config.data.num_val], size))
        val_loss = F.cross_entropy(logits, labels).item()
        val_accuracy = (logits.argmax(1) == labels).float().mean().item()
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    return Run(losses, weights, val_loss, val_accuracy)


def apart(a: list[float], b: list[float]) -> float:
    """The largest difference between two rows of losses."""
    assert len(a) == len(b) > 0, f"{len(a)} steps against {len(b)}"
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
