"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What people type for it in other trainers -> the last part of our key.
_SYNONYMS = {
    "batch_size": "global_batch_size",
    "train_batch_size": "global_batch_size",
    "per_device_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "grad_accum_steps",
    "gradient_accumulation": "grad_accum_steps",
    "accumulate_grad_batches": "grad_accum_steps",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "learning_rate": "lr",
    "rate": "lr",
    "wd": "weight_decay",
    "gpus": "num_workers",
    "num_gpus": "num_workers",
    "world_size": "num_workers",
    "nproc_per_node": "num_workers",
    "num_samples": "num_trials",
    "n_trials": "num_trials",
    "steps": "max_steps",
    "path": "root",
    "dir": "root",
}


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` most likely means; None if nothing is close.

    The first that goes on from it with an underscore is meant. Else the last parts of dotted names are compared: by the
    names that other trainers use, then letter by letter.
    """
    names = list(known)
    if longer := [each for each in names if each.startswith(f"{name}_")]:
        return longer[0]
    leaf = _leaf(name)
    letters = difflib.get_close_matches(leaf, [_leaf(each) for each in names], n=1)
    meant = [each for each in names if _leaf(each) in (leaf, _SYNONYMS.get(leaf))]
    matches = meant or [each for each in names if _leaf(each) in letters]
    return max(matches, key=lambda each: difflib.SequenceMatcher(a=name, b=each).ratio(), default=None)


def _leaf(name: str) -> str:
    return name.lstrip("+~").rpartition(".")[2]
