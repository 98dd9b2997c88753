"""Data sets of tokens: nothing is told twice, nothing is in both splits, and each item is the same every time."""

from __future__ import annotations

import collections
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.language import pydoc
from fsdp_lab.workloads.language.pydoc import PydocTokens
from fsdp_lab.workloads.language.text import TextTokens, encode, part_of
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
    for other in (make()[4], make(split="val")[3], make(seed=1)[3]):
        assert not torch.equal(row, other)
    every = torch.cat([make(vocab_size=7)[i] for i in range(100)])
    assert every.unique().tolist() == list(range(7))
    assert len({make().digest, make(seed=1).digest, make(vocab_size=7).digest, make(seq_len=51).digest}) == 4
    with pytest.raises(IndexError):
        make(num_rows=9)[9]


def write_folder(root: Path) -> None:
    (root / "b").mkdir(parents=True)
    (root / "a.txt").write_text("first" * 20)
    (root / "b" / "c.md").write_text("zweite Zeile \u00fc" * 20)
    (root / "d.csv").write_text("not read")
    (root / "e.txt").write_text("")
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.table({"text": ["third " * 20, None, "", "fourth " * 20], "id": [1, 2, 3, 4]}), root / "f.parquet")


def test_a_folder_of_text_is_read_by_name_and_cut_in_nine_tenths_and_one(tmp_path: Path):
    write_folder(tmp_path)
    train, val = (TextTokens(split, root=str(tmp_path), seq_len=8) for split in ("train", "val"))
    documents = ["first" * 20, "zweite Zeile \u00fc" * 20, "third " * 20, "fourth " * 20]
    cut = sum(map(len, documents)) * 9 // 10 - sum(map(len, documents[:3]))
    assert text_of(train) == "\n\n".join([*documents[:3], documents[3][:cut]])
    assert text_of(val) == documents[3][cut:]
    assert train.bytes_per_token == 1.0 and train.vocab_size == 256


@pytest.mark.parametrize("lengths", [[10], [9, 1], [1] * 10, [100, 1, 1], [1, 100]])
def test_a_split_has_nine_tenths_of_the_characters(lengths: list[int]):
    documents = [chr(97 + i) * length for i, length in enumerate(lengths)]
    train, val = part_of(documents, "train"), part_of(documents, "val")
    assert "".join(train + val) == "".join(documents) and all(train + val)
    assert len("".join(train)) == sum(lengths) * 9 // 10


def test_a_tokenizer_says_how_many_bytes_a_token_stands_for(tmp_path: Path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"red": 0, "blue": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("red blue " * 50)
    train = TextTokens("train", root=str(tmp_path), seq_len=8, tokenizer=str(tmp_path / "tokenizer.json"))
    assert train[0].tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0] and train.vocab_size == 3
    assert train.bytes_per_token == pytest.approx(405 / 90)


def test_a_tokenizer_neither_cuts_nor_fills_up_a_document(tmp_path: Path):
    """As the files of many models ask for."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"red": 0, "blue": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(4)
    made.enable_padding(pad_id=2, pad_token="?")
    made.save(str(tmp_path / "tokenizer.json"))
    assert encode(["red blue " * 5, "red"], str(tmp_path / "tokenizer.json"))[0].tolist() == [0, 1] * 5 + [0]


def test_bad_folders_and_tokenizers_are_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refusal(**kwargs: Any) -> str:
        with pytest.raises(UserError) as caught:
            TextTokens("train", **{"root": str(tmp_path), **kwargs})
        return str(caught.value)

    files = "with .txt, .md, .parquet files"
    assert refusal() == f"data.root={tmp_path} has no text; point it at a folder {files}."
    assert refusal(root="/nowhere") == f"data.root=/nowhere is not a folder; point it at a folder {files}."
    (tmp_path / "a.txt").write_text("x" * 100)
    assert "its train split has 90 tokens, and a row needs data.seq_len=90 plus 1" in refusal(seq_len=90)
    (tmp_path / "b.parquet").write_bytes(b"no")
    assert f"{tmp_path}/b.parquet is not a Parquet file" in refusal()
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    assert refusal() == f"{tmp_path}/b.parquet has no column text, only body; rename its text column to text."
    (tmp_path / "b.parquet").unlink()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "data.tokenizer=t.json needs the package tokenizers: pip install tokenizers" in refusal(tokenizer="t.json")


def test_a_tokenizer_that_is_none_is_one_message(tmp_path: Path):
    (tmp_path / "a.txt").write_text("{}")
    for file, message in (
        ("no.json", "is not a file; give the path of a tokenizer.json"),
        ("a.txt", "is not a tokenizer"),
    ):
        with pytest.raises(UserError, match=message):
            TextTokens("train", root=str(tmp_path), seq_len=1, tokenizer=str(tmp_path / file))
