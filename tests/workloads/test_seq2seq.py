"""Pairs of texts: tokens, WikiHow's CSV dialect, sections of Python's documentation, and a model of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch

pytest.importorskip("transformers")

import transformers

from fsdp_lab.workloads.examples.seq2seq.codec import Bytes, build_codec
from fsdp_lab.workloads.examples.seq2seq.pairs import Pair, Pairs
from fsdp_lab.workloads.examples.seq2seq.pydoc import PydocSummaries, read
from fsdp_lab.workloads.examples.seq2seq.wikihow import WikiHow
from tests.conftest import STORE, python_blocks, run_cli


def test_bytes_are_those_of_transformers() -> None:
    theirs, codec = transformers.ByT5Tokenizer(), Bytes()
    for text in ("Life is like a box of chocolates.", "Grüße\n\t你 <b>", "", "é" * 9):
        assert codec.encode(text, 100) == theirs(text).input_ids
        assert codec.encode(text, 6) == theirs(text, truncation=True, max_length=6).input_ids
    assert theirs.pad_token_id == 0 and theirs.eos_token_id == 1 and len(theirs) == codec.vocab_size


def test_an_item_has_fixed_lengths_and_labels_that_do_not_count() -> None:
    """A letter is its byte and 3, the end is 1."""
    item = Pairs([Pair("abc", "x" * 9)], source_len=6, target_len=5, tokenizer=None)[0]
    assert item["input_ids"].tolist() == [100, 101, 102, 1, 0, 0]
    assert item["attention_mask"].tolist() == [1, 1, 1, 1, 0, 0]
    assert item["labels"].tolist() == [123, 123, 123, 123, 1]
    assert Pairs([Pair("", "x")], 3, 5, None)[0]["labels"].tolist() == [123, 1, -100, -100, -100]


def test_a_tokenizers_end_is_kept_when_a_text_is_cut(tmp_path: Path) -> None:
    words = {"<pad>": 0, "</s>": 1, "?": 2, "red": 3, "blue": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<pad>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.save(str(tmp_path / "t.json"))
    codec = build_codec(str(tmp_path / "t.json"))
    assert codec.encode("red blue green", 9) == [3, 4, 2, 1] and codec.encode("red blue green", 3) == [3, 4, 1]
    assert codec.vocab_size == 5


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


def write_csv(folder: Path, rows: list[tuple[str, ...]]) -> str:
    """Written by hand, each cell in quotes: what the `csv` module is to read is not written by it."""
    folder.mkdir(parents=True, exist_ok=True)
    quoted = (",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)
    (folder / "wikihowAll.csv").write_text("\n".join(["headline,title,text", *quoted, ""]), encoding="utf-8")
    return str(folder)


def test_rows_in_the_published_dialect(tmp_path: Path) -> None:
    root = write_csv(tmp_path, [*ROWS, ("Unquoted.", VALIDATION, "x" * 200_000)])
    text = 'If you\'re "new", buy paper., Draw, every day. Then draw more.'
    assert WikiHow("train", root=root).pairs == [
        Pair(" ".join([text] * 3), "Buy paper. Draw every day. Draw more."),
        Pair('One says ""yes"" and then, after a while, "yes" again.', 'Say "yes", twice.'),
    ]
    assert WikiHow("val", root=root).pairs == [Pair("x" * 200_000, "Unquoted.")]


def test_one_file_is_split_by_title_and_parts_stay_together(tmp_path: Path) -> None:
    rows = [(f"Do {i}.", f"How to {i // 3} x{i % 3}", f"This is how to do {i} at home.") for i in range(600)]
    splits = WikiHow("train", root=write_csv(tmp_path, rows)), WikiHow("val", root=str(tmp_path))
    train, val = ({int(pair.target[3:-1]) for pair in split.pairs} for split in splits)
    assert not train & val and len(train | val) == 600 and 10 <= len(val) <= 60
    assert not {i // 3 for i in train} & {i // 3 for i in val}


def test_no_section_of_pydoc_is_in_both_splits() -> None:
    train, val = read("train"), read("val")
    assert not {p.target for p in train} & {p.target for p in val}
    assert not {p.source for p in train} & {p.source for p in val}
    assert len({p.source for p in train}) == len(train) > 800 and len(val) > 50


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.documents("python -m fsdp_lab experiment=t5_wikihow")
def test_the_preset_trains_keeps_the_best_epoch_and_summarises(tmp_path: Path) -> None:
    """A learning rate that grows makes the last epoch worse than the one before."""
    words = ["data.num_train=160", "data.num_val=40", "training.epochs=4", "lr_schedule.gamma=6"]
    done = run_cli(tmp_path, "experiment=t5_wikihow", *words, STORE, "hydra.run.dir=out", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["val/loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert min(losses) < losses[0] < 5.95, "it learns: a guess among 384 tokens has 5.95"
    assert min(losses) < losses[-1] - 0.05, "the last epoch is not the best"
    read = PydocSummaries("val", source_len=128, target_len=32)
    items = torch.utils.data.default_collate([read[i] for i in range(40)])
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out" / "model")
    with torch.no_grad():
        loss = float(model(**items).loss)
    assert loss == pytest.approx(min(losses), abs=0.02), "of the best epoch; in float32, where the trial has bf16"
    (code,) = python_blocks("docs/summaries.md", "out")
    written = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(written.stdout.splitlines()) == 1 and written.stdout.strip()
