"""The script of a setting trains a model of transformers as its trial did, from its weights too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.ranks import run_ranks
from tests.takehome.scripts import train_and_run
from tests.workloads.hf.cases import LEARN, WORDS, plain_model


@pytest.mark.ci
def test_the_script_gives_the_losses_of_the_trial(tmp_path: Path) -> None:
    torch.manual_seed(3)  # not the seed of a trial
    plain_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    cases = [
        [*WORDS["gpt2"], *LEARN, "sharding=per_block"],
        [*WORDS["llama"], *LEARN, "sharding=root", f"model.config={tmp_path}", "model.pretrained=true"],
        [*WORDS["t5"], *LEARN, "sharding=per_block"],
        [*WORDS["vit"], *LEARN, "sharding=ddp"],
    ]
    for result in run_ranks(2, train_and_run, cases)[0]:
        script, trial = result["last"], result["trial"]
        assert trial[-len(script) :] == pytest.approx(script, abs=1e-5), result["script"]
