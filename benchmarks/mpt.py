"""What the published rows of `experiments/published_speed` trained: a GPT-2-shaped decoder with a fused loss, beside
which Composer computed two metrics of each microbatch's logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpt import Gpt

_NUM_METRICS = 2  # llm-foundry's `LanguageCrossEntropy` and `LanguagePerplexity`


class Mpt(Gpt):
    """It computes the loss itself, as `task=language` asks with `task.loss_chunks`, and all of it at once."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None, loss_chunks: int = 1) -> object:
        logits = super().forward(tokens)
        if labels is None:
            return logits
        assert isinstance(logits, Tensor)
        logits, labels = logits.flatten(0, 1), labels.flatten()
        with torch.no_grad():
            for _ in range(_NUM_METRICS):  # in float32, which autocast makes of a cross entropy
                F.cross_entropy(logits.float(), labels, reduction="sum")
        return _FusedLoss.apply(logits, labels).sum(), torch.tensor(labels.numel(), device=labels.device)


class _FusedLoss(torch.autograd.Function):
    """What each row of logits costs: one pass forwards and one backwards, which puts gradients in their place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        ctx.kept = logits, labels  # not by `save_for_backward`, which refuses what is overwritten
        return _cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        logits, labels = ctx.kept
        _cross_entropy_backward(logits, labels, grad.contiguous())
        del ctx.kept
        return logits, None


@torch.library.custom_op("benchmarks::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.logsumexp(logits.float(), -1) - logits.gather(-1, labels[:, None])[:, 0].float()


@_cross_entropy.register_fake
def _(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.new_empty(labels.shape, dtype=torch.float32)


@torch.library.custom_op("benchmarks::cross_entropy_backward", mutates_args={"logits"})
def _cross_entropy_backward(logits: Tensor, labels: Tensor, grad: Tensor) -> None:
    gradients = torch.softmax(logits.float(), -1)
    gradients.scatter_add_(-1, labels[:, None], torch.full_like(gradients[:, :1], -1.0))
    logits.copy_(gradients * grad[:, None])


@_cross_entropy_backward.register_fake
def _(logits: Tensor, labels: Tensor, grad: Tensor) -> None:
    return None
