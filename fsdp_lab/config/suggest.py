"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Names in other trainers -> the last part of our key, or our option.
_SYNONYMS = {
    "batch_size": "global_batch_size", "train_batch_size": "global_batch_size",
    "per_device_batch_size": "global_batch_size", "epoch": "epochs",
    "gradient_accumulation_steps": "grad_accum_steps", "gradient_accumulation": "grad_accum_steps",
    "accumulate_grad_batches": "grad_accum_steps",
    "clip_grad_norm": "max_grad_norm", "gradient_clip": "max_grad_norm", "gradient_clipping": "max_grad_norm",
    "learning_rate": "lr", "rate": "lr", "wd": "weight_decay", "steps": "max_steps", "path": "root", "dir": "root",
    "gpus": "num_workers", "num_gpus": "num_workers", "world_size": "num_workers", "nproc_per_node": "num_workers",
    "largest_microbatch": "solve", "num_samples": "num_trials", "n_trials": "num_trials",
    "bfloat16": "bf16", "bf16_true": "bf16_pure", "float16": "fp16", "half": "fp16", "16_mixed": "fp16_mixed",
    "float32": "fp32", "full": "fp32", "32_true": "fp32", "fp8": "float8",
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32",
    "a100": "a100_80gb", "h100": "h100_sxm", "h100_80gb": "h100_sxm",
}  # fmt: skip


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` most likely means; None if nothing is close.

    Compares the last parts of dotted names, ignoring case. First come the names of other trainers, then names that
    continue with an underscore, or after a number with anything. The nearest number and similar spelling come last.
    """
    names = list(known)
    leaf = _leaf(name)
    if meant := [each for each in names if _leaf(each) in (leaf, _SYNONYMS.get(leaf))]:
        return _most_alike(name, meant)
    if longer := [each for each in names if each.startswith(name if name[-1:].isdigit() else f"{name}_")]:
        return min(longer, key=len)
    if numbered := [each for each in names if _shape(_leaf(each)) == _shape(leaf) != leaf]:
        return min(numbered, key=lambda each: _apart(_leaf(each), leaf))
    letters = difflib.get_close_matches(leaf, [_leaf(each) for each in names], n=1)
    return _most_alike(name, [each for each in names if _leaf(each) in letters])


def did_you_mean(key: str, known: list[str]) -> str:
    """Return a question that ends with a space, or an empty text if nothing is close."""
    meant = closest(key, known)
    return f"Did you mean {meant}? " if meant else ""


def _most_alike(name: str, names: Iterable[str]) -> str | None:
    return max(names, key=lambda each: difflib.SequenceMatcher(a=name, b=each).ratio(), default=None)


def _leaf(name: str) -> str:
    return name.lstrip("+~").rpartition(".")[2].lower().replace("-", "_")


def _shape(leaf: str) -> str:
    return re.sub(r"\d+", "0", leaf)


def _apart(one: str, other: str) -> int:
    return sum(abs(int(a) - int(b)) for a, b in zip(*(re.findall(r"\d+", each) for each in (one, other)), strict=True))
