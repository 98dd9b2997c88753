"""`experiment=t5_wikihow` from the command to the summaries."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import STORE, run_cli

pytest.importorskip("transformers")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.documents(
    "python -m fsdp_lab experiment=t5_wikihow",
    "python -m fsdp_lab.predict run=<run_id in results.csv>",
)
def test_it_trains_keeps_the_best_epoch_and_summarises(tmp_path: Path) -> None:
    """A learning rate that grows makes the last epoch worse than the one before."""
    words = ["data.num_train=160", "data.num_val=40", "training.epochs=4", "lr_schedule.gamma=6"]
    done = run_cli(tmp_path, "experiment=t5_wikihow", *words, STORE, "hydra.run.dir=out", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out" / "results.csv").open() as lines:
        (row,) = csv.DictReader(lines)
    losses = [json.loads(line)["val/loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert min(losses) < losses[0] < 5.95, "it learns: a guess among 384 tokens has 5.95"
    assert min(losses) < losses[-1] - 0.05, "the last epoch is not the best"
    for argument in ("file=out/model", f"run={row['run_id']}"):
        observed = forked.run(tmp_path, "fsdp_lab.predict", argument, STORE, seconds=200)
        assert observed.returncode == 0, observed.stderr
        assert observed.stdout.count("article:") == observed.stdout.count("summary:") == 3
        loss = float(re.findall(r"40 validation pairs: loss ([0-9.]+)", observed.stdout)[0])
        assert loss == pytest.approx(min(losses), abs=0.02), "of the best epoch; in float32, where the trial has bf16"
