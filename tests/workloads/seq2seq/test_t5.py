"""T5 of transformers on pairs of texts: it learns what a plain script of transformers learns, and writes greedily."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.seq2seq.pydoc import PydocSummaries
from tests.forecast.test_equality import differences
from tests.ranks import config, run_ranks, train_all
from tests.takehome.scripts import train_and_run
from tests.training.reference import apart
from tests.workloads.hf.cases import LEARN, target_loss
from tests.workloads.test_every_workload import Script

SIZES = {"d_model": 16, "d_kv": 4, "d_ff": 24, "dropout_rate": 0.0}
WORDS = [
    "task=seq2seq", "data.source_len=24", "data.target_len=12", "data.num_train=64", "training.global_batch_size=16",
    *(f"model.{name}={value}" for name, value in SIZES.items()),
]  # fmt: skip
CELLS = ("sharding=ddp", "sharding=root", "sharding=per_block", "sharding=per_block training.grad_accum_steps=2")


def t5() -> transformers.T5ForConditionalGeneration:
    """The model of `t5_tiny` at these sizes, its values written down again."""
    plain = transformers.T5Config(
        vocab_size=384, num_layers=2, num_decoder_layers=2, num_heads=4, feed_forward_proj="gated-gelu", pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0, tie_word_embeddings=True, **SIZES,
    )  # fmt: skip
    return transformers.AutoModelForSeq2SeqLM.from_config(plain, dtype=torch.float32)


def test_it_learns_what_a_plain_script_of_transformers_learns() -> None:
    """Whose own loss is the mean over the labels of the batch."""
    torch.set_num_threads(1)
    losses, val_loss = Script(t5, partial(PydocSummaries, source_len=24, target_len=12), target_loss).train(
        *WORDS, *LEARN
    )
    results = run_ranks(2, train_all, [[*WORDS, *LEARN, *cell.split()] for cell in CELLS])[0]
    for cell, (got, metrics) in zip(CELLS, results, strict=True):
        assert apart(got, losses) <= 1e-5, (cell, got, losses)
        assert abs(metrics[-1]["val/loss"] - val_loss) <= 1e-5, cell


@pytest.mark.full
def test_it_holds_what_was_forecast_to_the_byte() -> None:
    assert differences([[*WORDS, cell] for cell in CELLS[:3]], ranks=1) == []


def test_what_the_configuration_lacks_is_reported() -> None:
    with pytest.raises(UserError, match=r"but model\.config has the values of a configuration; use"):
        config("task=seq2seq", "model.pretrained=true").check_files()
    with pytest.raises(UserError, match=r"the configuration below model\.config \(t5\) has no key d_modl\. Did you"):
        config("task=seq2seq", "model.d_modl=32").check(2)


@pytest.mark.full
def test_the_script_that_is_taken_home_has_the_trials_losses() -> None:
    """Its units are the blocks; the embedding that encoder, decoder and head share is in the root."""
    (result,) = run_ranks(2, train_and_run, [[*WORDS, "sharding=per_block", "training.grad_accum_steps=2"]])[0]
    assert apart(result["last"], result["trial"]) <= 1e-6, result["script"]
    layout = result["setup"].layout
    assert [path.rpartition(":")[2] for path in layout.unit_classes] == ["T5Block"], layout
    assert layout.units and all(".block." in name for name in layout.units), layout
