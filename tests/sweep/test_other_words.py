"""No rule reads a sentence: with every one replaced by `x`, a sweep and its resume end as they do with words."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from fsdp_lab.tracking.tags import ANSWER_TAG, RECOMMENDED_TAG
from tests import forked
from tests.conftest import ROOT, STORE
from tests.folders import Store, SweepFolder
from tests.servers import lay_store
from tests.sweep import fates
from tests.sweep.conftest import PLAIN

pytestmark = pytest.mark.timeout(300)

SCRIPT = f"""
import sys
sys.path.append({str(ROOT)!r})
from fsdp_lab.__main__ import main
from fsdp_lab.config import UserError
from fsdp_lab.report import answer, reason_texts
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.training.divergence import DivergedError

class Words:
    def __getattr__(self, name):
        return lambda *values: "x"

log = Console.log
Console.log = lambda console, text: log(console, "x")
UserError.__str__ = DivergedError.__str__ = lambda error: "x"
reason_texts.TEXTS.update(dict.fromkeys(reason_texts.TEXTS, lambda values: "x"))
answer.words_of_a_report = Words
main()
"""
# How each trial ends, why, and whether `resume_failed=true` tries it again.
ENDS = {
    "finishes": ("finished", None, False),
    "raises": ("failed", "error", True),
    "refused": ("failed", "user_error", True),
    "runs_out_of_memory": ("oom", "out_of_memory", False),
    "diverges": ("diverged", "diverged", False),
}
SWEEP = (
    "-m", "engine=inline", "model._target_=fates.Fate", "model.mark=x", f"model.fate={','.join(ENDS)}", *PLAIN,
    "training.epochs=2", "data.num_train=128", "data.num_val=32", "training.global_batch_size=32",
    "training.timing_warmup_steps=1", "report.others_cpu=1", "hydra.sweep.dir=out", STORE,
)  # fmt: skip


def ends(folder: Path) -> dict[str, tuple[str, str | None, bool]]:
    trials = dict(zip(ENDS, SweepFolder(folder / "out").trials, strict=True))
    outcomes = {fate: trial.outcome or {} for fate, trial in trials.items()}
    codes = {fate: (outcome["reason"] or {}).get("code") for fate, outcome in outcomes.items()}
    again = {fate: (trial.path / "failures.1").exists() for fate, trial in trials.items()}
    return {fate: (outcomes[fate]["status"], codes[fate], again[fate]) for fate in ENDS}


def test_other_words_change_nothing_but_what_people_read(tmp_path: Path):
    shutil.copy(Path(fates.__file__), tmp_path)
    lay_store(tmp_path)
    first = forked.run(tmp_path, "-c", SCRIPT, *SWEEP, seconds=200)
    assert first.returncode == 1, first.stdout + first.stderr
    assert ends(tmp_path) == {fate: (status, code, False) for fate, (status, code, _) in ENDS.items()}
    resumed = forked.run(tmp_path, "-c", SCRIPT, "resume=out", "resume_failed=true", seconds=200)
    assert resumed.returncode == 1, resumed.stdout + resumed.stderr
    assert ends(tmp_path) == ENDS
    assert [row["error"] for row in SweepFolder(tmp_path / "out").rows] == ["", "x", "x", "x", "x"]
    (parent,), children = Store(tmp_path).parents, Store(tmp_path).trials
    tags = [run.data.tags for run in children]
    assert [(t["status"], t.get("reason")) for t in tags] == [(status, code) for status, code, _ in ENDS.values()]
    assert [t.get("error") for t in tags] == [None, "x", "x", "x", "x"]
    assert parent.data.tags[RECOMMENDED_TAG] == "0" and parent.data.tags[ANSWER_TAG] == "x"
    with (tmp_path / "out/report.csv").open(newline="") as file:
        rows = {row["trial"]: row["recommended"] for row in csv.DictReader(file)}
    assert [number for number, recommended in rows.items() if recommended] == ["0"]
