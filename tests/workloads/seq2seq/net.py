"""An encoder and a decoder as a user would write them: plain PyTorch, one table for both and for the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Output:
    logits: Tensor


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, to: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = self.q(x), self.k(to), self.v(to)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal))


class EncoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention, self.layer = nn.LayerNorm(width), Attention(width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, mask)
        return x + torch.tanh(self.layer(x))


class DecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention, self.cross = nn.LayerNorm(width), Attention(width), Attention(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, read: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, causal=True)
        x = x + self.cross(x, read, mask)
        return x + torch.tanh(self.layer(x))


class Summariser(nn.Module):
    """`as_dict`: it returns a dictionary, else a dataclass."""

    _no_split_modules = ("EncoderBlock", "DecoderBlock")

    def __init__(self, vocab_size: int = 384, width: int = 16, num_layers: int = 2, as_dict: bool = False) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(512, width)
        self.encoder = nn.ModuleList(EncoderBlock(width) for _ in range(num_layers))
        self.decoder = nn.ModuleList(DecoderBlock(width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.shared.weight
        self.as_dict = as_dict

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output | dict[str, Tensor]:
        mask = attention_mask[:, None, :].bool()
        x = self.embed(input_ids)
        for block in self.encoder:
            x = block(x, mask)
        before = F.pad(labels.clamp(min=0), (1, 0))[:, :-1]
        y = self.embed(before)
        for block in self.decoder:
            y = block(y, x, mask)
        logits = self.head(y)
        return {"logits": logits} if self.as_dict else Output(logits)

    def embed(self, ids: Tensor) -> Tensor:
        return self.shared(ids) + self.positions.weight[: ids.shape[1]]


class Ragged:
    """Rows of random tokens, whose sources and targets have other lengths; some have no label at all."""

    vocab_size = 20

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.rows = []
        for i in range(48 if split == "train" else 13):
            source, target = (int(torch.randint(1, most, (), generator=generator)) for most in (9, 7))
            ids = torch.randint(1, self.vocab_size, (8,), generator=generator)
            labels = torch.randint(self.vocab_size, (6,), generator=generator)
            mask = (torch.arange(8) < source).long()
            labels[0 if i % 8 == 0 else target :] = -100
            self.rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]
