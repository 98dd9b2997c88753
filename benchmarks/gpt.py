"""A decoder in the shape of GPT-2, with learned positions, biases and tied embeddings: what the published rows of
`experiments/published_memory` were measured on."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.workloads.language.llama import loss_in_chunks


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


class Gpt(nn.Module):
    """With `loss_chunks` it computes the loss itself, as `task=language` asks: a fused loss holds no logits either."""

    _no_split_modules = ("Block",)

    def __init__(self, *, vocab_size: int, dim: int, num_layers: int, num_heads: int, max_seq_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(max_seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, loss_chunks: int = 1) -> object:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if labels is None:
            return self.head(x)
        return loss_in_chunks(self.head, x, labels, loss_chunks)
