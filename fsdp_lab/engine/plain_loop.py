"""A plain loop of the user's own code in its own process, and a smaller trial to compare with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_lab.config import TrialConfig, from_dict
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.source_code import loaded_files

# What a smaller trial leaves out.
_SHORT = {
    "training": {"max_steps": 3, "epochs": 1}, "checkpoint": {"mode": "off"}, "export": False, "profile_trace": False,
    "memory_profile": "off",
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """The input of a plain loop.

    Attributes:
        config: plain values of a `TrialConfig`.
        num_workers: the ranks of the trial.
        limit_s: seconds that it may take.
        log: the file that gets what it prints.
        keys: overrides for a smaller model, which is then also trained on `num_workers` ranks; empty: the trial's own
            model.
    """

    config: dict[str, Any]
    num_workers: int
    limit_s: float
    log: str
    keys: Sequence[str] = ()


def run_plain_loop(question: Question) -> dict[str, Any]:
    """Return the result of `fsdp_lab.training.plain.run`, with the digests of the user's `files` that it imported.

    With `keys`, also return `found`: the metrics of the ranks' steps.
    """
    log = os.open(question.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other cores are for the start of Ray
    from fsdp_lab.training.plain import run  # which imports PyTorch

    values = question.config
    try:
        for word in question.keys:
            _set(values, *word.partition("=")[::2])
        config = from_dict(TrialConfig, _merged(values, _SHORT) if question.keys else values)
    except (ValueError, TypeError, AttributeError) as error:
        return {"missing": f"check.keys: {error}".rstrip(".")}
    answer = run(config, Ranks.of(config.sharding, question.num_workers).dp, question.limit_s)
    if not question.keys or answer["missing"]:
        return {**answer, "files": loaded_files()}
    try:
        from fsdp_lab.training.spawned import train_on_ranks

        return {**answer, "found": train_on_ranks(config, question.num_workers)}
    except Exception as error:  # noqa: BLE001 - an error of any rank, with its traceback
        print(error)
        return {"missing": f"check.keys: the smaller model was not trained ({str(error).strip().splitlines()[-1]})"}


def _set(values: dict[str, Any], key: str, text: str) -> None:
    import yaml

    *groups, name = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    values[name] = yaml.safe_load(text)


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {**values, **{k: {**values[k], **v} if isinstance(v, dict) else v for k, v in changes.items()}}
