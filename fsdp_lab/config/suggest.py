"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_SHORTEST_PREFIX = 3  # of a word that is written in full: `grad` of `gradient`
# What people type for it in other trainers -> the last part of our key.
_SYNONYMS = {
    "batch_size": "global_batch_size",
    "train_batch_size": "global_batch_size",
    "per_device_batch_size": "global_batch_size",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "rate": "lr",
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

    Compares the last parts of dotted names, in this order:

    - by the names that other trainers use
    - by initials: `learning_rate` is `lr`
    - by words: `gradient_accumulation_steps` is `grad_accum_steps`
    - letter by letter
    """
    names = list(known)
    leaf = _leaf(name)
    letters = difflib.get_close_matches(leaf, [_leaf(each) for each in names], n=1)
    for matches in (
        [each for each in names if _leaf(each) in (leaf, _SYNONYMS.get(leaf))],
        [each for each in names if _leaf(each) == _initials(leaf) or _initials(_leaf(each)) == leaf],
        _by_words(leaf, names),
        [each for each in names if _leaf(each) in letters],
    ):
        if matches:
            return max(matches, key=lambda each: _likeness(name, each))
    return None


def _by_words(leaf: str, names: list[str]) -> list[str]:
    """Return the names whose words are, more or less written out, those of `leaf`, some more or some fewer."""
    words = _words(leaf)

    def share(each: str) -> float:
        other = _words(_leaf(each))
        alike = sum(any(_same_word(word, its) for its in other) for word in words)
        return alike / max(len(words), len(other))

    shares = {each: share(each) for each in names}
    best = max(shares.values(), default=0.0)
    return [each for each in names if shares[each] == best] if best >= 0.5 else []


def _same_word(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return one == other or (len(short) >= _SHORTEST_PREFIX and long.startswith(short))


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(a=one, b=other).ratio()


def _leaf(name: str) -> str:
    return name.lstrip("+~").rpartition(".")[2]


def _words(leaf: str) -> list[str]:
    return [word for word in re.split(r"[_/-]", leaf) if word]


def _initials(leaf: str) -> str | None:
    words = _words(leaf)
    return "".join(word[0] for word in words) if len(words) > 1 else None
