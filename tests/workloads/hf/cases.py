"""Tiny models of transformers: what is typed, and what a plain script makes of the same file; pairs of texts for T5."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.workloads.language.pydoc import PydocTokens
from tests.training.reference import Digits, Script

CONFIGS = Path(__file__).parent / "configs"
LEARN = ("optimizer=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
SMALL = ("data=pydoc", "data.seq_len=16", "data.num_train=128", "data.num_val=30")
LANGUAGE = ("task=language", "model=hf_causal_lm", *SMALL)
WORDS: dict[str, list[str]] = {
    **{name: [*LANGUAGE, f"model.config={CONFIGS}/{name}.json"] for name in ("gpt2", "llama", "qwen3")},
    "t5": ["model=hf_seq2seq", f"model.config={CONFIGS}/t5.json", "data._target_=tests.workloads.hf.cases.Pairs",
           "task.loss=tests.workloads.hf.cases.pairs_loss"],
    "vit": ["model=hf_image_classification", f"model.config={CONFIGS}/vit.json"],
}  # fmt: skip


def plain_model(name: str) -> nn.Module:
    """By transformers alone, in float32."""
    import transformers

    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "vit": transformers.AutoModelForImageClassification}
    config = transformers.AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    return auto.get(name, transformers.AutoModelForCausalLM).from_config(config, dtype=torch.float32)


def next_token(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())


def classified(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


def target_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss."""
    return model(**batch).loss


def script(name: str) -> Script:
    parts: dict[str, tuple[Callable[[str], Any], Callable[..., Tensor]]] = {
        "t5": (Pairs, target_loss), "vit": (partial(Digits, size=8), classified),
    }  # fmt: skip
    split, loss = parts.get(name, (partial(PydocTokens, seq_len=16), next_token))
    return Script(partial(plain_model, name), split, loss)


VOCABULARY, LONGEST, TARGET, TOLD = 64, 12, 6, 4


class Pairs:
    """The first tokens of a row of random ones are to be told. Rows have different lengths, what is to be told has one:
    a mean over the labels of a rank is then one over all."""

    def __init__(self, split: str, least: int = TARGET) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        count = 128 if split == "train" else 30
        self.tokens = torch.randint(2, VOCABULARY, (count, LONGEST), generator=generator)
        self.lengths = torch.randint(least, LONGEST + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = int(self.lengths[index])
        mask = (torch.arange(LONGEST) < length).long()
        labels = torch.full((TARGET,), -100)
        labels[:TOLD] = self.tokens[index, :TOLD]
        return {"input_ids": self.tokens[index] * mask, "attention_mask": mask, "labels": labels}


def pairs_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100)
