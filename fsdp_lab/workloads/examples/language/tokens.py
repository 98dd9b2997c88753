"""Rows of tokens: a text packed into rows, and random tokens."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

SplitName = Literal["train", "val"]
_ROWS = 2**20  # of random tokens


class PackedTokens(Dataset[Tensor]):
    """One long text cut into rows: item i is int64 `(seq_len + 1,)`, and its last token is the first of item i + 1.

    So each token except the first is predicted once, and only a rest shorter than a row is left out.

    Args:
        tokens: bytes, of any integer type, `(N,)`.
        seq_len: tokens of a row, without the last label.
    """

    vocab_size, bytes_per_token, input_kind = 256, 1.0, "tokens"

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    @staticmethod
    def least_vocab_size(**_: Any) -> int:
        """Return the number of tokens that a model must know: 256 for bytes."""
        return 256

    @property
    def digest(self) -> str:
        """16 digits that differ if a token does."""
        return hashlib.sha256(self.tokens.numpy().data).hexdigest()[:16]

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = index * self.seq_len
        return self.tokens[start : start + self.seq_len + 1].long()


def byte_tokens(text: bytes) -> Tensor:
    """Return the bytes of a text as uint8 `(N,)`."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


class SyntheticTokens(Dataset[Tensor]):
    """Random tokens of equal probability, for measurements of memory and speed: there is nothing to learn.

    Items are int64 `(seq_len + 1,)`, a million in each split, drawn on request from the split and their index.

    Args:
        vocab_size: every token is less.
        seq_len: tokens of a row, without the last label.
    """

    input_kind = "tokens"

    def __init__(self, split: SplitName, *, vocab_size: int, seq_len: int) -> None:
        self.split, self.vocab_size, self.seq_len = split, vocab_size, seq_len

    @staticmethod
    def least_vocab_size(vocab_size: int, **_: Any) -> int:
        return vocab_size

    @property
    def digest(self) -> str:
        """The arguments that decide the items; nothing is read."""
        return f"{self.vocab_size}/{self.seq_len}"

    def __len__(self) -> int:
        return _ROWS

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < _ROWS:
            raise IndexError(f"row {index} of {_ROWS}")
        generator = torch.Generator().manual_seed(zlib.crc32(f"0/{self.split}/{index}".encode()))
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
