"""The models of published runs, one for the memory and the speed of each, with what their code did besides ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

from fsdp_lab.workloads.language.llama import Llama

_NUM_METRICS = 2  # llm-foundry's `LanguageCrossEntropy` and `LanguagePerplexity`


class Block(nn.Module):
    """Attention, then a feed-forward layer of four times the width, each behind a LayerNorm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).split(x.shape[-1], -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mpt(nn.Module):
    """MPT as llm-foundry trained it with Composer: learned positions, biases, tied embeddings, a fused loss.

    Its loss is one kernel forwards and one backwards, and keeps the logits. After the backward pass Composer computes
    two metrics of them, in float32, as autocast makes of a cross entropy. It holds the logits until the next ones.
    """

    _no_split_modules = ("Block",)

    def __init__(self, *, vocab_size: int, dim: int, num_layers: int, num_heads: int, max_seq_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(max_seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.outputs: Tensor | None = None

    def forward(self, tokens: Tensor, labels: Tensor | None = None, loss_chunks: int = 1) -> object:
        """Return the logits; with labels the sum of the losses and their number, as `task.loss_chunks` asks."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        logits, labels = logits.flatten(0, 1), labels.flatten()
        self.outputs = logits.detach()
        return _FusedLoss.apply(logits, labels).sum(), torch.tensor(labels.numel(), device=labels.device)


class _FusedLoss(torch.autograd.Function):
    """What each row of logits costs: one pass forwards and one backwards; and the metrics after the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(logits, labels)
        return _cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        logits, labels = ctx.saved_tensors
        Variable._execution_engine.queue_callback(lambda: _metrics(logits, labels))
        return _cross_entropy_backward(logits, labels, grad.contiguous()), None


def _metrics(logits: Tensor, labels: Tensor) -> None:
    with torch.no_grad():
        for _ in range(_NUM_METRICS):
            F.cross_entropy(logits.float(), labels, reduction="sum")


@torch.library.custom_op("benchmarks::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.logsumexp(logits.float(), -1) - logits.gather(-1, labels[:, None])[:, 0].float()


@_cross_entropy.register_fake
def _(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.new_empty(labels.shape, dtype=torch.float32)


@torch.library.custom_op("benchmarks::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(logits: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    gradients = torch.softmax(logits.float(), -1)
    gradients.scatter_add_(-1, labels[:, None], torch.full_like(gradients[:, :1], -1.0))
    return (gradients * grad[:, None]).to(logits.dtype)


@_cross_entropy_backward.register_fake
def _(logits: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(logits)


class EarlyTorchtitan(Llama):
    """Llama as torchtitan trained it in March 2024: it returned logits in float32, and its loop held them through the
    backward pass and the next forward pass."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.pred: Tensor | None = None

    def forward(self, tokens: Tensor, labels: Tensor | None = None, loss_chunks: int = 1) -> Any:
        """Return the logits."""
        logits = super().forward(tokens).float()  # type: ignore[union-attr]
        self.pred = logits.detach()
        return logits
