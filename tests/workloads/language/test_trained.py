"""The options of the command line, end to end on two ranks: what is learned, and what was forecast."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks, train_all
from tests.training.reference import apart

pytestmark = pytest.mark.ci

WORDS = ["task=language", "data.seq_len=64", "data.num_train=640", "data.num_val=64", "training.global_batch_size=8",
         "optimizer.lr=0.005"]  # fmt: skip
CASES = (
    ["sharding=per_block", "training.max_steps=60"],
    ["sharding=ddp", "training.max_steps=20"],
    ["sharding=root", "task.loss_chunks=4", "training.max_steps=20"],
)


def test_real_text_is_learned_whatever_the_sharding() -> None:
    """How often each byte stands there is worth 4.7 bits: `test_tokens` counts them."""
    (losses, reported), (whole, of_whole), (parted, of_parted) = run_ranks(2, train_all, [[*WORDS, *c] for c in CASES])[
        0
    ]
    assert apart(whole, losses[:20]) < 1e-5 and apart(parted, losses[:20]) < 1e-5
    last = reported[-1]
    assert last["val/bits_per_byte"] < 4.4
    assert last["val/perplexity"] == pytest.approx(2 ** last["val/bits_per_byte"]), "a token is a byte"
    assert last["perf/tokens_per_s"] == pytest.approx(64 * last["perf/samples_per_s"])
    assert 0 < last["perf/data_wait_share"] < 1
    assert of_parted[-1]["train/grad_norm"] == pytest.approx(of_whole[-1]["train/grad_norm"], rel=1e-2)
    assert of_parted[-1]["train/grad_norm"] > 0
