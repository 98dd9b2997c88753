"""Tiny models of transformers: what is typed, and what a plain script makes of the same file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.workloads.examples.language.pydoc import PydocTokens
from tests.training.reference import Digits, Script
from tests.workloads.user.odd import Ragged

CONFIGS = Path(__file__).parent / "configs"
LEARN = ("optimizer=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
SMALL = ("data=pydoc", "data.seq_len=16", "data.num_train=128", "data.num_val=30")
LANGUAGE = ("task=language", "model=hf_causal_lm", *SMALL)
WORDS: dict[str, list[str]] = {
    **{name: [*LANGUAGE, f"model.config={CONFIGS}/{name}.json"] for name in ("gpt2", "llama", "qwen3")},
    "t5": ["model=hf_seq2seq", f"model.config={CONFIGS}/t5.json", "task=seq2seq",
           "data._target_=tests.workloads.user.odd.Ragged", "training.global_batch_size=8"],
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
        "t5": (Ragged, target_loss), "vit": (partial(Digits, size=8), classified),
    }  # fmt: skip
    split, loss = parts.get(name, (partial(PydocTokens, seq_len=16), next_token))
    return Script(partial(plain_model, name), split, loss)
