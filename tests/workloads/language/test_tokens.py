"""Data sets of tokens: nothing is told twice, nothing is in both splits, and each item is the same every time."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_lab.workloads.language import pydoc
from fsdp_lab.workloads.language.pydoc import PydocTokens
from fsdp_lab.workloads.language.tokens import PackedTokens, SyntheticTokens


def test_every_token_but_the_first_is_reported_once():
    rows = PackedTokens(torch.arange(22, dtype=torch.uint8), seq_len=5)
    assert [row.tolist() for row in rows] == [
        [0, 1, 2, 3, 4, 5],
        [5, 6, 7, 8, 9, 10],
        [10, 11, 12, 13, 14, 15],
        [15, 16, 17, 18, 19, 20],
    ]
    assert rows[0].dtype is torch.int64
    assert len(PackedTokens(torch.arange(5), 5)) == 0 and len(PackedTokens(torch.arange(6), 5)) == 1


def test_the_digest_differs_when_a_token_does() -> None:
    tokens = torch.arange(100, dtype=torch.uint8)
    other = tokens.clone()
    other[50] = 0
    assert PackedTokens(tokens, 5).digest == PackedTokens(tokens.clone(), 9).digest != PackedTokens(other, 5).digest


def text_of(rows: PackedTokens) -> str:
    return bytes(rows.tokens.tolist()).decode()


def test_pydoc_is_english_and_large_enough_to_learn_from():
    train, val = PydocTokens("train"), PydocTokens("val")
    assert train[0].shape == (257,) and int(train.tokens.max()) < 256
    assert len(train) > 1000 and 0.05 < len(val) / len(train) < 0.2
    assert '"assert" statement' in text_of(train) and " the " in text_of(val)


def test_no_paragraph_of_pydoc_is_in_both_splits():
    train, val = (pydoc.read(split).split("\n\n") for split in ("train", "val"))
    assert not set(train) & set(val)
    assert len(set(train)) == len(train)


def entropy_bits(text: bytes) -> float:
    counts = collections.Counter(text)
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())


def test_unigram_entropy_of_pydoc_is_what_the_readme_states():
    """4.7 bits per byte: a model below it has learned more than how often each letter stands there."""
    for split in ("train", "val"):
        assert entropy_bits(pydoc.read(split).encode()) == pytest.approx(4.7, abs=0.15)


def test_random_tokens_are_the_same_each_time_and_others_elsewhere():
    make: Any = lambda **kwargs: SyntheticTokens(**{"split": "train", "vocab_size": 1000, "seq_len": 50, **kwargs})  # noqa: E731
    row: Tensor = make()[3]
    assert row.shape == (51,) and row.dtype is torch.int64
    assert torch.equal(row, make()[3])
    for other in (make()[4], make(split="val")[3]):
        assert not torch.equal(row, other)
    every = torch.cat([make(vocab_size=7)[i] for i in range(100)])
    assert every.unique().tolist() == list(range(7))
    assert len({make().digest, make(vocab_size=7).digest, make(seq_len=51).digest}) == 3
    with pytest.raises(IndexError):
        make()[2**20]
