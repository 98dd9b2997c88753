"""Data sets of pairs: ByT5's ids, WikiHow's CSV dialect, and sections of Python's documentation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tokenizers
import torch

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.seq2seq.codec import Bytes, build_codec
from fsdp_lab.workloads.seq2seq.pairs import Pair, Pairs
from fsdp_lab.workloads.seq2seq.pydoc import passages, read, sections
from fsdp_lab.workloads.seq2seq.task import Seq2Seq
from fsdp_lab.workloads.seq2seq.wikihow import WikiHow
from tests.workloads.user.odd import Summariser

# "Life is like a box of chocolates.", as the documentation of transformers' ByT5 gives it by hand: each byte plus 3.
LIFE = "Life is like a box of chocolates."


def test_bytes_are_byt5s() -> None:
    codec = Bytes()
    assert codec.encode(LIFE, 100) == [byte + 3 for byte in b"Life is like a box of chocolates."] + [1]
    assert codec.encode("é", 100) == [0xC3 + 3, 0xA9 + 3, 1] and codec.vocab_size == 384
    assert codec.encode("", 9) == [1] and codec.encode(LIFE, 4) == [ord("L") + 3, ord("i") + 3, ord("f") + 3, 1]
    assert codec.encode("é" * 9, 4) == [0xC3 + 3, 0xA9 + 3, 0xC3 + 3, 1], "the cut may lie inside a character"
    assert codec.decode([0, *codec.encode("Grüße, 你", 100), 383]) == "Grüße, 你"


def test_bytes_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.ByT5Tokenizer()
    for text in (LIFE, "Grüße\n\t你 <b>", ""):
        assert Bytes().encode(text, 100) == theirs(text).input_ids
        assert Bytes().encode(text, 7) == theirs(text, truncation=True, max_length=7).input_ids
    assert theirs.pad_token_id == 0 and theirs.eos_token_id == 1 and len(theirs) == Bytes.vocab_size


def test_an_item_has_fixed_lengths_and_labels_that_do_not_count() -> None:
    item = Pairs([Pair("abc", "x" * 9)], source_len=6, target_len=5, tokenizer=None)[0]
    assert {name: tensor.tolist() for name, tensor in item.items()} == {
        "input_ids": [100, 101, 102, 1, 0, 0],
        "attention_mask": [1, 1, 1, 1, 0, 0],
        "labels": [123, 123, 123, 123, 1],
    }
    assert {tensor.dtype for tensor in item.values()} == {torch.int64}
    assert Pairs([Pair("", "x")], 3, 5, None)[0]["labels"].tolist() == [123, 1, -100, -100, -100]


def word_tokenizer(file: Path) -> str:
    words = {"<pad>": 0, "</s>": 1, "?": 2, "red": 3, "blue": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<pad>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.save(str(file))
    return str(file)


def test_a_tokenizers_end_is_kept_when_a_text_is_cut(tmp_path: Path) -> None:
    codec = build_codec(word_tokenizer(tmp_path / "t.json"))
    assert codec.encode("red blue green", 9) == [3, 4, 2, 1] and codec.encode("red blue green", 3) == [3, 4, 1]
    assert (codec.vocab_size, codec.decode([3, 4, 1, 0])) == (5, "red blue")


def test_a_tokenizer_that_is_none_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("{}")
    for file, message in (
        ("no.json", "is not a file; give the path of a tokenizer.json"),
        ("a.txt", "is not a tokenizer"),
    ):
        with pytest.raises(UserError, match=message):
            build_codec(str(tmp_path / file))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        UserError, match=r"data\.tokenizer=t\.json needs the package tokenizers: pip install tokenizers"
    ):
        build_codec("t.json")


def test_the_digest_differs_when_a_text_or_a_length_does(tmp_path: Path) -> None:
    def digest(*pairs: Pair, source_len: int = 9, tokenizer: str | None = None) -> str:
        return Pairs(pairs, source_len, 4, tokenizer).digest

    first = Pair("a", "b")
    others = [digest(Pair("a", "c")), digest(Pair("c", "b")), digest(Pair("ab", "")), digest(first, source_len=8)]
    others.append(digest(first, tokenizer=word_tokenizer(tmp_path / "t.json")))
    assert digest(first) == digest(first) and len({digest(first), *others}) == 6


# As in the published file: a headline of several lines with a comma before each line break, quotes that are doubled.
ARTICLE = '\n\n\nIf you\'re "new", buy paper.,\n\n Draw, every day.\n\n\n, Then draw more.'
HEADLINE = "\nBuy paper.,\nDraw every day.,\nDraw more."
ROWS = [
    (HEADLINE, "How to Draw1", ARTICLE * 3),
    ("", "How to Say Nothing", "There is no headline."),
    ("There is no text.", "How to Hide", ""),
    ("A headline that is longer than its text.", "How to Boast", "Short."),
    ('Say "yes", twice.', "How to Agree", 'One says ""yes"" and then, after a while, "yes" again.'),
]


VALIDATION = "How to Cook"  # one of the twentieth of titles that are in the validation split, by `zlib.crc32`


def write_csv(file: Path, rows: list[tuple[str, ...]], header: tuple[str, ...] = ("headline", "title", "text")) -> None:
    """Written by hand, each cell in quotes: what the `csv` module is to read is not written by it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cells = [header, *(tuple('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)]
    file.write_text("".join(",".join(row) + "\n" for row in cells), encoding="utf-8")


def test_rows_in_the_published_dialect(tmp_path: Path) -> None:
    long = ("Unquoted.", VALIDATION, "x" * 200_000)
    write_csv(tmp_path / "wikihowAll.csv", [*ROWS, long])
    result = WikiHow("train", root=str(tmp_path)).pairs
    text = 'If you\'re "new", buy paper., Draw, every day. Then draw more.'
    assert result == [
        Pair(" ".join([text] * 3), "Buy paper. Draw every day. Draw more."),
        Pair('One says ""yes"" and then, after a while, "yes" again.', 'Say "yes", twice.'),
    ]
    assert WikiHow("val", root=str(tmp_path)).pairs == [Pair("x" * 200_000, "Unquoted.")]


def test_one_file_is_split_by_title_and_parts_stay_together(tmp_path: Path) -> None:
    rows = [(f"Do {i}.", f"How to {i // 3} x{i % 3}", f"This is how to do {i} at home.") for i in range(600)]
    write_csv(tmp_path / "wikihowAll.csv", rows)
    write_csv(tmp_path / "wikihowSep.csv", [("other",)], ("sectionLabel",))
    train, val = ({p.target for p in WikiHow(split, root=str(tmp_path)).pairs} for split in ("train", "val"))  # type: ignore[arg-type]
    assert not train & val and len(train | val) == 600 and 10 <= len(val) <= 60
    of = {f"Do {i}.": i // 3 for i in range(600)}
    assert not {of[target] for target in train} & {of[target] for target in val}


def test_sections_end_where_the_next_title_is() -> None:
    topic = "Top\n***\n\nfirst\n\nInner\n=====\n\nsecond\n   =====\n\nthird\n"
    assert [(title, text.split()) for title, text in sections(topic)] == [
        ("Top", ["first"]),
        ("Inner", ["second", "=====", "third"]),
    ]
    assert list(passages("a" * 100 + "\n\n" + "b" * 30 + "\n\nc")) == ["a" * 100 + " " + "b" * 30]


def test_no_section_of_pydoc_is_in_both_splits() -> None:
    train, val = read("train"), read("val")
    assert not {p.target for p in train} & {p.target for p in val}
    assert not {p.source for p in train} & {p.source for p in val}
    assert len({p.source for p in train}) == len(train) > 800 and len(val) > 50
    assert any(p.target == 'The "assert" statement' and "debugging assertions" in p.source for p in train)


def test_another_batch_or_output_is_one_message() -> None:
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(UserError, match=r"got \{input_ids: 2x3 int64, labels: 2x3 int64\}; let data.collate_fn"):
        Seq2Seq().forward(Summariser(), batch)
    with pytest.raises(UserError, match="the model returns a Linear without logits"):
        Seq2Seq().forward(lambda **_: torch.nn.Linear(1, 1), {**batch, "attention_mask": 0})  # type: ignore[arg-type]
