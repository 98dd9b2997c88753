"""Pairs of a source and a target text, as the items of `task=seq2seq`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.examples.seq2seq.codec import PAD, build_codec
from fsdp_lab.workloads.tasks.seq2seq import IGNORED


class Pair(NamedTuple):
    """A source text and the target text to write for it."""

    source: str
    target: str


class Pairs(Dataset[dict[str, Tensor]]):
    """Pairs as items `{input_ids, attention_mask, labels}` of int64.

    `input_ids` and `attention_mask` are `(source_len,)`, `labels` is `(target_len,)`. Texts are cut to these lengths
    and encoded when they are requested; padding has the label -100.

    Args:
        source_len: the most tokens of a source.
        target_len: the most tokens of a target.
        tokenizer: a `tokenizer.json`; None: bytes, as in ByT5.

    Raises:
        UserError: a length is too short, or the tokenizer cannot be read.
    """

    input_kind = "pairs of texts"

    def __init__(self, pairs: Sequence[Pair], source_len: int, target_len: int, tokenizer: str | None) -> None:
        Pairs.check_files(source_len, target_len)
        self.pairs, self.source_len, self.target_len = pairs, source_len, target_len
        self.codec = build_codec(tokenizer)
        self.vocab_size = self.codec.vocab_size

    @staticmethod
    def least_vocab_size(tokenizer: str | None = None, **_: Any) -> int:
        return build_codec(tokenizer).vocab_size

    @staticmethod
    def check_files(source_len: int = 512, target_len: int = 150, **_: Any) -> None:
        """Check that a text has space for a token and its end. Raises UserError for less."""
        for name, length in (("source_len", source_len), ("target_len", target_len)):
            if not isinstance(length, int) or length < 2:
                raise UserError(f"data.{name}={length}: a text has at least one token and its end; use 2 or more.")

    @property
    def digest(self) -> str:
        """16 digits that differ if a text, a length or the vocabulary does."""
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
