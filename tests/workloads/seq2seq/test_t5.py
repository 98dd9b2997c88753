"""The T5 of `t5_tiny`: its refusals, and its script. What it learns: `tests/training/test_parity.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from fsdp_lab.config.errors import UserError
from tests.parity import WORKLOADS
from tests.ranks import config, run_ranks
from tests.takehome.scripts import train_and_run
from tests.training.reference import apart

WORDS = WORKLOADS["t5_tiny"].words


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
