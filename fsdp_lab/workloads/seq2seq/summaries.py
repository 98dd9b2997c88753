"""Summaries that a trained model writes for validation articles, and its score on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.target import import_callable
from fsdp_lab.config.workload import DataConfig
from fsdp_lab.workloads.seq2seq.pairs import Pairs
from fsdp_lab.workloads.seq2seq.task import Seq2Seq

_TARGETS = ("fsdp_lab.workloads.seq2seq.pydoc.PydocSummaries", "fsdp_lab.workloads.seq2seq.wikihow.WikiHow")
_FILES = ("root", "tokenizer")  # arguments that are files: which ones, the user says
_BATCH = 32


def read_val(data: DataConfig, files: Mapping[str, str]) -> Pairs:
    """Return the validation split that a model was scored on.

    Args:
        files: `root` (the folder of the data) and `tokenizer`, if the data need them. Recorded paths are not used,
            because anyone may have chosen them.

    Raises:
        UserError: the data set is none of ours, or its files are missing.
    """
    if data.target not in _TARGETS:
        raise UserError(
            f"the model was trained on data._target_={data.target}, which is not called: it is a name from a file. "
            "Load the model with from_pretrained(<folder>) of its transformers class."
        )
    if data.arguments.get("tokenizer") is not None and "tokenizer" not in files:
        raise UserError("the model was trained with a tokenizer; give it: data.tokenizer=<its tokenizer.json>.")
    if "root" in data.arguments and "root" not in files:
        raise UserError("the model was trained on articles in a folder; give it: data.root=<folder of wikihowAll.csv>.")
    given = {name: files[name] for name in _FILES if data.arguments.get(name) is not None}
    pairs: Pairs = import_callable(data.target, "data._target_")(split="val", **{**data.arguments, **given})
    pairs.pairs = pairs.pairs[: data.num_val]
    return pairs


def summarise(model: Any, data: Pairs, count: int) -> list[tuple[str, str, str]]:
    """Return `(article, headline, summary)`: what the model read, the target, and what it writes greedily.

    Args:
        model: of transformers, on any device.
        count: the number of articles, spread over the whole split.
    """
    indices = torch.linspace(0, len(data) - 1, min(count, len(data))).long().tolist()
    batch = default_collate([data[i] for i in indices])
    sources = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        rows = model.generate(**sources, max_new_tokens=data.target_len, do_sample=False, num_beams=1).tolist()
    return [
        (data.codec.decode(source), data.pairs[i].target, data.codec.decode(written))
        for i, source, written in zip(indices, batch["input_ids"].tolist(), rows, strict=True)
    ]


def score(model: Any, data: Pairs) -> float:
    """Return the mean loss of the labels that count, in nats."""
    task, total, count = Seq2Seq(), 0.0, 0
    with torch.no_grad():
        for indices in torch.arange(len(data)).split(_BATCH):
            batch = default_collate([data[i] for i in indices.tolist()])
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            losses, labels = task.metrics(task.forward(model, batch), batch)["loss"]
            total, count = total + losses.item(), count + int(labels)
    return total / max(count, 1)
