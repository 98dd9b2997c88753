"""Pairs of a source and a target text, as the items of `task=seq2seq`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.seq2seq.codec import PAD, build_codec
from fsdp_lab.workloads.seq2seq.task import IGNORED


class Pair(NamedTuple):
    source: str
    target: str


class Pairs(Dataset[dict[str, Tensor]]):
    """Item i is `{input_ids, attention_mask}` of int64 `(source_len,)` and `{labels}` of `(target_len,)`.

    Texts are cut to these lengths and encoded when they are asked for; padding has the label -100.

    Args:
        tokenizer: a `tokenizer.json`; None: bytes, as ByT5 has them.

    Raises:
        UserError: a length that leaves no room, or a tokenizer that cannot be read.
    """

    def __init__(self, pairs: Sequence[Pair], source_len: int, target_len: int, tokenizer: str | None) -> None:
        check_lengths(source_len, target_len)
        self.pairs, self.source_len, self.target_len = pairs, source_len, target_len
        self.codec = build_codec(tokenizer)
        self.vocab_size = self.codec.vocab_size

    @staticmethod
    def least_vocab_size(tokenizer: str | None = None, **_: Any) -> int:
        """Return how many tokens a model must know."""
        return build_codec(tokenizer).vocab_size

    @property
    def digest(self) -> str:
        """16 digits that differ when a text, a length or a token does."""
        sha = hashlib.sha256(f"{self.source_len}/{self.target_len}/{self.vocab_size}".encode())
        for pair in self.pairs:
            sha.update("\0".join((*pair, "")).encode())
        return sha.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pair = self.pairs[index]
        source = self.codec.encode(pair.source, self.source_len)
        target = self.codec.encode(pair.target, self.target_len)
        return {
            "input_ids": _filled(source, self.source_len, PAD),
            "attention_mask": _filled([1] * len(source), self.source_len, 0),
            "labels": _filled(target, self.target_len, IGNORED),
        }


def _filled(ids: list[int], length: int, padding: int) -> Tensor:
    return torch.tensor(ids + [padding] * (length - len(ids)), dtype=torch.int64)


def check_lengths(source_len: int, target_len: int) -> None:
    """
    Raises:
        UserError: one of them has no room for a token and the end of a text.
    """
    for name, length in (("source_len", source_len), ("target_len", target_len)):
        if not isinstance(length, int) or length < 2:
            raise UserError(f"data.{name}={length}: a text has one token and its end at least; use 2 or more.")
