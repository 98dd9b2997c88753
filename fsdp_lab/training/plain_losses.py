"""The losses of the tasks, written a second time: for `plain.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import TrialConfig
from fsdp_lab.config.target import import_callable
from fsdp_lab.training.plain_data import Part, moved
from fsdp_lab.training.plain_limits import Stopped

Loss = tuple[Tensor, Tensor | None]  # a sum over labels that count, and their number; or a mean, and None


def loss_of(config: TrialConfig, model: nn.Module, batch: Any) -> Loss:
    """Return the loss of a batch, which is copied to the model's device."""
    batch = moved(batch, next(model.parameters()).device)
    match config.task.name:
        case "classification":
            inputs, labels = batch
            channels = config.model.sizes().get("num_channels")
            logits = _logits(model(inputs if channels is None else inputs.expand(-1, channels, -1, -1)))
            return _cross_entropy(logits, labels.clamp(min=-1), ignored=-1)
        case "language":
            return _cross_entropy(_logits(model(batch[:, :-1].clamp(min=0))), batch[:, 1:], ignored=-1)
        case "seq2seq":
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
            return _cross_entropy(_logits(model(**inputs)), batch["labels"], ignored=-100)
        case "model_loss":
            outputs = model(**batch)
            return outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss, None
    if config.task.loss is None:
        raise Stopped(f"task={config.task.name} has no loss that a plain loop knows")
    loss = import_callable(config.task.loss, "task.loss")(given(config, model), batch)
    return loss if isinstance(loss, tuple) else (loss, None)


def given(config: TrialConfig, model: nn.Module) -> Any:
    """Return what the user's functions get: the model, or with `task.step` its parts."""
    return dict(model.named_children()) if config.task.step else model


def count_of(config: TrialConfig, batch: list[list[Part]]) -> float:
    """Return what the losses of a step are summed over: labels that count, or microbatches. At least 1.

    What a user's loss counts is not known before it is computed.
    """
    inputs = [each for microbatches in batch for each, _ in microbatches]
    match config.task.name:
        case "classification":
            return max(1, sum(int((labels >= 0).sum()) for _, labels in inputs))
        case "language":
            return max(1, sum(int((tokens[:, 1:] != -1).sum()) for tokens in inputs))
        case "seq2seq":
            return max(1, sum(int((each["labels"] != -100).sum()) for each in inputs))
    return len(inputs)


def val_loss_of(config: TrialConfig, model: nn.Module, batch: Any) -> Loss:
    """Return the loss of a batch of a validation: `task.metrics` may have another."""
    if config.task.metrics is not None:
        on_device = moved(batch, next(model.parameters()).device)
        named = import_callable(config.task.metrics, "task.metrics")(given(config, model), on_device)
        if "loss" in named:
            return named["loss"]  # type: ignore[no-any-return]
    return loss_of(config, model, batch)


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, Mapping):
        return outputs["logits"]  # type: ignore[no-any-return]
    return outputs[0] if isinstance(outputs, tuple | list) else getattr(outputs, "logits", outputs)


def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Loss:
    logits, labels = logits.flatten(0, -2).float(), labels.flatten()
    return F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum"), (labels != ignored).sum()
