"""A decoder in the shape of Llama, as plain modules: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    seq_len: int

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.num_heads


SMALL = LlamaConfig(32000, 768, 12, 12, 4, 2048, 1024)  # 124 million parameters
TINY = LlamaConfig(256, 64, 2, 4, 2, 128, 32)


class Attention(nn.Module):
    """Causal attention; `num_kv_heads` keys and values serve `num_heads` queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) -> the same."""
        q, k, v = (
            projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_dim, config.mlp_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.mlp_dim, bias=False)
        self.down_proj = nn.Linear(config.mlp_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_dim, eps=1e-5)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, vocabulary). The head is not tied to the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_dim, eps=1e-5)
        self.head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(config.seq_len, config.head_dim), persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill parameters and the table of rotations, after `to_empty`."""
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
        half = torch.arange(0, self.config.head_dim, 2, device=self.cos.device) / self.config.head_dim
        angles = torch.outer(torch.arange(self.config.seq_len, device=self.cos.device), 10000.0**-half)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions for (batch, heads, seq, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), dim=-1) * sin.to(x.dtype)
