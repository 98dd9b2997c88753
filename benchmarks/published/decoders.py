"""The models of published runs, one for the memory and the speed of each, with what their code did besides ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

from fsdp_lab.workloads.examples.language.llama import Attention, Llama

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


class Torchtitan(Llama):
    """Llama as torchtitan trains it: rotations are complex products, which PyTorch's compiler does not fuse, and keys
    and values are repeated for their queries.

    Args:
        fused_norm: RMSNorm is one kernel, as torchtitan's in Triton.
    """

    def __init__(self, *, fused_norm: bool = False, **sizes: Any) -> None:
        super().__init__(**sizes)
        rotary = _ComplexRotary(self.head_dim, sizes["max_seq_len"])
        for block in self.blocks:
            block.attention = _RepeatedAttention(sizes["dim"], self.num_heads, sizes["num_kv_heads"], rotary)
            if not fused_norm:
                block.attention_norm, block.ffn_norm = _Norm(sizes["dim"]), _Norm(sizes["dim"])
        if not fused_norm:
            self.norm = _Norm(sizes["dim"])


class EarlyTorchtitan(Torchtitan):
    """The same in March 2024: it returned logits in float32, and its loop held them through the backward pass and the
    next forward pass."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.pred: Tensor | None = None

    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        """Return the logits."""
        logits = super().forward(tokens).float()
        self.pred = logits.detach()
        return logits


class LitGpt(Llama):
    """Llama as LitGPT's benchmark trains it: norms of single operators, and logits that live until the next ones."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.norm = _Norm(sizes["dim"])
        for block in self.blocks:
            block.attention_norm, block.ffn_norm = _Norm(sizes["dim"]), _Norm(sizes["dim"])
        self.logits: Tensor | None = None

    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        """Return the logits."""
        logits = super().forward(tokens)
        self.logits = logits.detach()
        return logits


def loss_in_bfloat16(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss as LitGPT's benchmark computes it, of logits that nothing has made float32."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-1)


class _ComplexRotary(nn.Module):
    def __init__(self, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_seq_len), 500000.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotations[: x.shape[-2]]).flatten(-2).to(x.dtype)


class _RepeatedAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        queries = q.shape[1] // k.shape[1]
        k, v = (t.transpose(1, 2).repeat_interleave(queries, 2).transpose(1, 2) for t in (self.rotary(k), v))
        out = F.scaled_dot_product_attention(self.rotary(q), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _Norm(nn.RMSNorm):
    """RMSNorm from single operators, as it was until PyTorch had a kernel for it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight
