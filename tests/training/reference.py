"""One unsharded process in plain PyTorch: what the sharded runs are compared with.

Shares with the package only the models' builders. The images come from scikit-learn's own reader, and the batches are
worked out again from seed and epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from fsdp_lab.config import TrialConfig
from fsdp_lab.config.target import import_callable
from fsdp_lab.workloads.build import build_model_spec


@dataclass
class Run:
    """What a training learned. `val_accuracy`: where the script has a measure of it."""

    losses: list[float]  # of every step, over the global batch
    norms: list[float]  # of the gradients of every step, before they are clipped
    weights: dict[str, Tensor]
    val_loss: float
    val_accuracy: float | None


@dataclass(frozen=True)
class Script:
    """A plain script that trains a workload.

    Attributes:
        build: the model.
        split: the items of `train` or `val`.
        loss: the mean loss of a batch.
        accuracy: the accuracy on a batch; None: it has none.
    """

    build: Callable[[], nn.Module]
    split: Callable[[str], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    accuracy: Callable[[nn.Module, Any], float] | None = None

    def train(self, trial: TrialConfig, device: str = "cpu") -> Run:
        """Train on one process in float32, or in the type of `precision.storage_dtype` throughout.

        Args:
            trial: its optimizer, and which batches of the data are trained; the rest does not count.
            device: where the model computes. Its first weights are drawn on the CPU.
        """
        items = self.split("train")
        torch.manual_seed(trial.training.seed)
        dtype = getattr(torch, trial.precision.storage_dtype.name)
        narrow = {} if dtype is torch.float32 else {"dtype": dtype}
        model, losses, norms = self.build().to(device, **narrow), list[float](), list[float]()
        optimizer = build_optimizer(model, trial)
        for indices in batches(trial, len(items)):
            optimizer.zero_grad()
            loss = self.loss(model, _batch(items, indices, device, **narrow))
            loss.backward()
            losses.append(loss.item())
            most = trial.training.max_grad_norm or math.inf
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), most).item())
            optimizer.step()
        state = model.state_dict().items()
        weights = {name: value.detach() for name, value in state if isinstance(value, Tensor)}  # no extra state
        items, model = self.split("val"), model.eval()
        batch = _batch(items, range(min(len(items), trial.data.num_val or len(items))), device, **narrow)
        with torch.no_grad():
            accuracy = self.accuracy(model, batch) if self.accuracy else None
            return Run(losses, norms, weights, self.loss(model, batch).item(), accuracy)


def _batch(items: Any, indices: Iterable[int], device: str, dtype: torch.dtype | None = None) -> Any:
    """`dtype`: of what is no whole number; None: as it is."""

    def moved(x: Tensor) -> Tensor:
        return x.to(device, dtype) if dtype and x.is_floating_point() else x.to(device)

    return tree_map(moved, default_collate([items[i] for i in indices]))


def batches(trial: TrialConfig, count: int) -> list[list[int]]:
    """Return the items of each step, from seed and epoch."""
    count, size, steps = min(count, trial.data.num_train or count), trial.training.global_batch_size, []
    for epoch in range(trial.training.epochs):
        generator = torch.Generator().manual_seed(trial.training.seed * 1_000_003 + epoch)
        order = torch.randperm(count, generator=generator)[: count // size * size]
        steps += [indices.tolist() for indices in order.split(size)]
    return steps[: trial.training.max_steps]


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


class Digits:
    """The digits of a split, as large as a model takes them."""

    def __init__(self, split: str, size: int) -> None:
        (self.images, self.labels), self.size = digits()[split == "val"], size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return resize(self.images[i : i + 1], self.size)[0], self.labels[i]


def first_model(config: TrialConfig) -> nn.Module:
    """What a plain script starts with."""
    torch.manual_seed(config.training.seed)
    return build_model_spec(config.model).build()


def first_weights(config: TrialConfig) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in first_model(config).state_dict().items()}


def names_of(model: nn.Module, units: Iterable[nn.Module]) -> list[str]:
    """The names that modules have in a model."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(unit)] for unit in units]


def build_optimizer(model: nn.Module, config: TrialConfig) -> torch.optim.Optimizer:
    o = config.optimizer
    if o.target is not None:
        kind = import_callable(o.target, "optimizer._target_")
        return kind(model.parameters(), lr=o.lr, **o.arguments)  # type: ignore[no-any-return]
    if o.name.name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.name.name]
    return kind(model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay)


def image_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def _share_of_right_answers(model: nn.Module, batch: list[Tensor]) -> float:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean().item()


def train_unsharded(config: TrialConfig, device: str = "cpu") -> Run:
    """Train one of our image classifiers on one process in float32; see `Script.train`."""
    build, split = build_model_spec(config.model).build, partial(Digits, size=config.model.sizes()["image_size"])
    return Script(build, split, image_loss, _share_of_right_answers).train(config, device)


def apart(a: list[float], b: list[float]) -> float:
    """The largest difference between two rows of losses."""
    assert len(a) == len(b) > 0, f"{len(a)} steps against {len(b)}"
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
