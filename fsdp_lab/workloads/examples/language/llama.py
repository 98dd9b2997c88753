"""Llama 3 in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

"The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.2 and table 3. Rotary positions pair dimension i of a head
with i + head_dim / 2, as Hugging Face's checkpoints do. Meta's pair neighbours: this is the same model, with the rows
of the query and key projections in another order.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.workloads.examples.language.chunks import loss_in_chunks


class RotaryEmbedding(nn.Module):
    """The rotation of each position: tables of `(max_seq_len, head_dim / 2)` in float32, which are not saved.

    Args:
        head_dim: the size of a head, even.
        max_seq_len: the most tokens in a row.
        theta: the base of the frequencies.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), theta**-exponents)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(batch, heads, seq, head_dim)` rotated; computed in float32, returned in its own type.

        Raises:
            ValueError: there are more than `max_seq_len` tokens.
        """
        seq_len = x.shape[-2]
        if seq_len > self.max_seq_len:
            raise ValueError(f"{seq_len} tokens are more than max_seq_len={self.max_seq_len}")
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which `num_kv_heads` keys and values serve `num_heads` queries."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim, self.rotary = dim // num_heads, rotary
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention of `(batch, seq, dim)`, in the same shape."""
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        out = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(..., dim)` for `(..., dim)`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dim: int, attention: Attention, ffn_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.ffn = FeedForward(dim, ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(batch, seq, dim)` for `(batch, seq, dim)`."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """A decoder of `num_layers` blocks.

    Args:
        vocab_size: every token is less.
        dim: of the residual stream.
        num_heads: query heads; divides `dim`.
        num_kv_heads: heads of keys and values; divides `num_heads`.
        ffn_dim: the width of the feed-forward layers.
        max_seq_len: the most tokens in a row; the size of the tables of rotations.
        rope_theta: the base of the rotations' frequencies.
        norm_eps: of RMSNorm.
        tied: the head uses the embedding's weights.

    Raises:
        ValueError: the sizes do not divide each other.
    """

    input_kind = "tokens"
    _no_split_modules = ("Block",)
    _tp_divides = ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
    _tp_plan: ClassVar[dict[str, str]] = {
        "embedding": "rowwise",
        "blocks.*.attention_norm": "sequence",
        "blocks.*.attention.q_proj": "colwise",
        "blocks.*.attention.k_proj": "colwise",
        "blocks.*.attention.v_proj": "colwise",
        "blocks.*.attention.o_proj": "rowwise",
        "blocks.*.ffn_norm": "sequence",
        "blocks.*.ffn.gate_proj": "colwise",
        "blocks.*.ffn.up_proj": "colwise",
        "blocks.*.ffn.down_proj": "rowwise",
        "norm": "sequence",
        "head": "loss_parallel",
    }

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        ffn_dim: int,
        max_seq_len: int = 8192,
        rope_theta: float = 500000.0,
        norm_eps: float = 1e-5,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if dim % num_heads or dim // num_heads % 2 or num_heads % num_kv_heads:
            raise ValueError(
                f"dim={dim}, num_heads={num_heads}, num_kv_heads={num_kv_heads}: num_heads must divide dim into heads "
                "of an even size, and num_kv_heads must divide num_heads"
            )
        self.num_layers, self.num_heads, self.head_dim = num_layers, num_heads, dim // num_heads
        rotary = RotaryEmbedding(self.head_dim, max_seq_len, rope_theta)
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(
            Block(dim, Attention(dim, num_heads, num_kv_heads, rotary), ffn_dim, norm_eps) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights as GPT-2 does: smaller in the `2 * num_layers` layers that write to the residual stream."""
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                smaller = (2 * self.num_layers) ** 0.5 if name.endswith(("o_proj", "down_proj")) else 1.0
                nn.init.normal_(module.weight, std=0.02 / smaller)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, loss_chunks: int = 1
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits `(batch, seq, vocab_size)` of tokens `(batch, seq)`; with labels, see `loss_in_chunks`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if labels is None else loss_in_chunks(self.head, x, labels, loss_chunks)

    def flops_per_token(self, batch: Tensor) -> float:
        """Return the FLOPs of a training step per token of `(batch, seq + 1)`.

        6 for each parameter that multiplies a token, plus attention's products of all positions with all others.
        Recomputation counts once.
        """
        tied = self.head.weight is self.embedding.weight
        num_params = sum(p.numel() for p in self.parameters()) - (0 if tied else self.embedding.weight.numel())
        attention = 6 * self.num_layers * self.num_heads * 2 * self.head_dim * (batch.shape[1] - 1)
        return float(6 * num_params + attention)
