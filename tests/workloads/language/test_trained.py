"""The options of the command line, end to end on two ranks: what is learned, and what was forecast."""

from __future__ import annotations

import pytest

from tests.forecast.test_equality import differences
from tests.ranks import run_ranks, train_all
from tests.training.reference import apart

WORDS = ["task=language", "data.seq_len=64", "data.num_train=640", "data.num_val=64", "training.global_batch_size=8",
         "training.max_steps=60", "optimizer.lr=0.005"]  # fmt: skip
SHARDINGS = (["sharding=ddp"], ["sharding=per_block"], ["sharding=root", "task.loss_chunks=4"])


def test_real_text_is_learned_whatever_the_sharding() -> None:
    """How often each byte stands there is worth 4.7 bits: `test_tokens` counts them."""
    results = run_ranks(2, train_all, [[*WORDS, *sharding] for sharding in SHARDINGS])[0]
    first = results[0][0]
    for sharding, (losses, reported) in zip(SHARDINGS, results, strict=True):
        assert apart(losses[:20], first[:20]) < 1e-5, sharding
        assert apart(losses, first) < 1e-2, "differences of rounding grow"
        assert reported[-1]["val/bits_per_byte"] < 4.4
        assert reported[-1]["train/grad_norm"] == pytest.approx(results[0][1][-1]["train/grad_norm"], rel=1e-2)
        assert reported[-1]["train/grad_norm"] > 0
        assert reported[-1]["val/perplexity"] == pytest.approx(2 ** reported[-1]["val/bits_per_byte"]), (
            "a token is a byte"
        )
        assert reported[-1]["perf/tokens_per_s"] == pytest.approx(64 * reported[-1]["perf/samples_per_s"])
        assert 0 < reported[-1]["perf/data_wait_share"] < 1


SMALL = ["task=language", "data.seq_len=64", "training.global_batch_size=8"]
MEMORY = [
    ["sharding=per_block", "task.loss_chunks=4"],
    ["sharding=per_layer", "reshard_after_forward=always", "task.loss_chunks=4"],
    ["sharding=root", "precision=bf16_mixed", "activation_checkpointing=full", "task.loss_chunks=3"],
    ["sharding=ddp", "precision=bf16_mixed", "training.max_grad_norm=1", "model.tied=true"],
]


def test_their_memory_is_forecast_to_the_byte() -> None:
    assert differences([[*SMALL, *words] for words in MEMORY]) == []
