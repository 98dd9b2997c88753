"""`python -m fsdp_lab.predict` of a folder: what the model writes is each time the likeliest token, and its loss is the
mean over all labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

from fsdp_lab.commands import predict
from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.seq2seq.pydoc import PydocSummaries
from tests.parity import t5
from tests.workloads.seq2seq.test_pairs import ROWS, VALIDATION, word_tokenizer, write_csv

PYDOC = {"_target_": "fsdp_lab.workloads.seq2seq.pydoc.PydocSummaries", "source_len": 24, "target_len": 12}
WIKIHOW = {**PYDOC, "_target_": "fsdp_lab.workloads.seq2seq.wikihow.WikiHow", "root": "/home/somebody/.ssh"}


def export(folder: Path, data: dict[str, Any]) -> Any:
    """As a trial exports it; returns the model."""
    torch.manual_seed(0)
    model = t5().eval()
    model.save_pretrained(folder)
    (folder / "fsdp_lab.json").write_text(json.dumps({"format": 1, "data": data}))
    return model


def greedy(model: Any, item: dict[str, Tensor], length: int) -> list[int]:
    """By one forward pass for each token, without a cache."""
    written = [0]
    while len(written) <= length and written[-1] != 1:
        logits = model(
            input_ids=item["input_ids"][None],
            attention_mask=item["attention_mask"][None],
            decoder_input_ids=torch.tensor([written]),
        ).logits
        written.append(int(logits[0, -1].argmax()))
    return written


def test_three_articles_are_summarised_greedily(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = export(tmp_path, {**PYDOC, "num_val": 30})
    predict.summarise(tmp_path, {"device": "cpu"})
    output = capsys.readouterr().out
    data = PydocSummaries("val", source_len=24, target_len=12)
    with torch.no_grad():
        for i in (0, 14, 29):
            article = data.pairs[i].source.encode()[:23].decode(errors="replace")
            summary = data.codec.decode(greedy(model, data[i], 12))
            assert f"article:  {article}\nheadline: {data.pairs[i].target}\nsummary:  {summary}\n\n" in output
        total, count = torch.zeros(()), 0
        for i in range(30):
            logits = model(**{name: tensor[None] for name, tensor in data[i].items()}).logits[0]
            labels = data[i]["labels"]
            total += F.cross_entropy(logits[labels >= 0], labels[labels >= 0], reduction="sum")
            count += int((labels >= 0).sum())
    assert output.count("article:") == 3
    assert output.splitlines()[-1].startswith(f"30 validation pairs: loss {total / count:.4f}, perplexity ")


def test_only_files_that_are_typed_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder may be anybody's."""
    export(tmp_path / "model", WIKIHOW)
    with pytest.raises(
        UserError, match=r"trained on articles in a folder; give it: data\.root=<folder of wikihowAll.csv>"
    ):
        predict.summarise(tmp_path / "model", {})
    write_csv(tmp_path / "mine" / "wikihowAll.csv", [*ROWS, (ROWS[0][0], VALIDATION, ROWS[0][2])])
    predict.summarise(tmp_path / "model", {"data.root": f"{tmp_path}/mine"})
    assert capsys.readouterr().out.count("headline: Buy paper. Draw every day. Draw more.") == 1
    export(tmp_path / "model", {**PYDOC, "tokenizer": "/home/somebody/t.json"})
    with pytest.raises(
        UserError, match=r"was trained with a tokenizer; give it: data\.tokenizer=<its tokenizer\.json>"
    ):
        predict.summarise(tmp_path / "model", {})
    predict.summarise(tmp_path / "model", {"data.tokenizer": word_tokenizer(tmp_path / "t.json")})


def test_what_a_file_names_is_not_called(tmp_path: Path) -> None:
    export(tmp_path, {"_target_": "os.system", "command": "true"})
    with pytest.raises(UserError, match=r"_target_=os\.system, which is not called: it is a name from a file"):
        predict.summarise(tmp_path, {})
