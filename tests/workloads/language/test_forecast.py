"""Forecasts of language models, against arithmetic on their published sizes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.__main__ import read_config
from tests import forked

LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096  # queries, output; keys, values; SwiGLU; norms
REST = 2 * 128256 * 4096 + 4096  # embedding, head, norm


def peaks(*words: str, num_workers: int = 2, cuda: bool = False) -> dict[str, int]:
    return forecast_profile(read_config(None, words), num_workers, cuda=cuda).peaks["device"]


@pytest.mark.parametrize("sharding", ["root", "per_block"])
def test_a_rank_of_eight_holds_an_eighth_of_llama3_8b_and_of_its_adamw_states(sharding: str) -> None:
    """The whole model takes twenty times as long and repeats its layer: two of 32 here, every size divides by eight."""
    assert 32 * LAYER + REST == 8_030_261_248, "as published"
    words = ["model=llama3_8b", "model.num_layers=2", "data.seq_len=64", "optimizer=adamw", "precision=bf16_mixed"]
    result = peaks(*words, f"sharding={sharding}", num_workers=8, cuda=True)
    sharded = 4 * (2 * LAYER + REST) // 8
    num_tensors = 2 * 9 + 3
    assert result["param"] == sharded
    assert result["optimizer"] == 2 * sharded + 4 * num_tensors, "two moments, and the number of steps of each tensor"
    assert result["buffer"] == 2 * 8192 * 64 * 4, "the tables of rotations are neither sharded nor cast"


@pytest.mark.ci
def test_of_a_loss_in_parts_the_logits_of_one_part_are_held() -> None:
    """16 rows of 64 tokens on a rank, 32,000 logits of 4 bytes for each. In the backward pass of a part there are three
    such tensors: logits, logarithms of their softmax, and the gradient. Of the whole there are more."""
    words = ["task=language", "data=synthetic_tokens", "data.seq_len=64", "training.global_batch_size=32"]
    whole, *parts = [
        peaks(*words, "model.vocab_size=32000", f"task.loss_chunks={chunks}")["total"] for chunks in (1, 2, 4, 8)
    ]
    logits = 16 * 64 * 32_000 * 4
    assert [more - less for more, less in pairwise(parts)] == [3 * logits // 4, 3 * logits // 8]
    assert whole - parts[0] > 2 * logits


def test_what_an_option_says_is_not_repeated(tmp_path: Path) -> None:
    words = ["model=lm_tiny", "model.num_layers=1", "sharding=root", "forecast.device=cuda", "cluster.num_workers=2"]
    done = forked.run(tmp_path, "fsdp_lab.forecast", *words)
    assert done.returncode == 0, done.stderr
    output = " ".join(done.stdout.split()).partition("for GPUs")[0]
    assert output.startswith("1 setting: model=lm_tiny sharding=root")
    assert output.endswith(
        "optimizer=adam model.num_layers=1 data=pydoc data.seq_len=64, 32 items per worker and step "
    )
