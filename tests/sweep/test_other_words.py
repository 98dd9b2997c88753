"""No rule reads a sentence: with every one replaced by `x`, sweeps and forecasts end as they do with words."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jinja2
import pytest

from fsdp_lab.config import UserError
from fsdp_lab.config.status import ExitCode
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_json import read_trial
from fsdp_lab.sweep.forecasts import Forecasts
from fsdp_lab.sweep.outputs.console import Console
from fsdp_lab.sweep.runner import run_sweep
from fsdp_lab.tracking.tags import ANSWER_TAG, RECOMMENDED_TAG
from fsdp_lab.training.divergence import DivergedError
from tests import forked
from tests.conftest import HERE, PLAIN, ROOT, SIZES
from tests.folders import Store, SweepFolder
from tests.forecast.command import answered_here
from tests.servers import lay_store
from tests.sweep import fates
from tests.sweep.planted import Acts, Compose, Hears, heard, plan_of

pytestmark = pytest.mark.timeout(300)


class Words:
    """Stands for the macros of a template."""

    def __getattr__(self, name: str) -> object:
        return lambda *values: "x"


def other_words() -> ExitStack:
    """Replace the sentences of errors, reasons, answers and the terminal, until the stack is closed."""
    log, get_template, replaced = Console.log, jinja2.Environment.get_template, ExitStack()

    def template(environment: jinja2.Environment, name: str, *given: Any, **more: Any) -> Any:
        # a page that imports the words of its own heads names itself
        is_of_sentences = name in ("words.j2", "reasons.j2", "forecast_words.j2") and not given
        return SimpleNamespace(module=Words()) if is_of_sentences else get_template(environment, name, *given, **more)

    for patch in (
        mock.patch.object(Console, "log", lambda console, text: log(console, "x")),
        mock.patch.object(UserError, "__str__", return_value="x"),
        mock.patch.object(DivergedError, "__str__", return_value="x"),
        mock.patch.object(jinja2.Environment, "get_template", template),
    ):
        replaced.enter_context(patch)
    return replaced


SCRIPT = f"""
import sys
sys.path.append({str(ROOT)!r})
from fsdp_lab.commands.main import main
from tests.sweep.test_other_words import other_words
replaced = other_words()
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
    "-m", "engine=inline", "model._target_=fates.Fate", "model.mark=x", f"model.fate={','.join(ENDS)}", *PLAIN, *SIZES,
    "training.epochs=2", *HERE,
)  # fmt: skip


def ends(folder: Path) -> dict[str, tuple[str, str | None, bool]]:
    trials = dict(zip(ENDS, SweepFolder(folder / "out").trials, strict=True))
    outcomes = {fate: trial.outcome or {} for fate, trial in trials.items()}
    codes = {fate: (outcome["reason"] or {}).get("code") for fate, outcome in outcomes.items()}
    again = {fate: trial.earlier_failures != [] for fate, trial in trials.items()}
    return {fate: (outcomes[fate]["status"], codes[fate], again[fate]) for fate in ENDS}


@pytest.mark.ci
def test_other_words_change_nothing_but_what_people_read(tmp_path: Path):
    shutil.copy(Path(fates.__file__), tmp_path)
    lay_store(tmp_path)
    first = forked.run(tmp_path, "-c", SCRIPT, *SWEEP, seconds=200)
    assert first.returncode == 1, first.stdout + first.stderr
    tried_once = {fate: (status, code, False) for fate, (status, code, _) in ENDS.items()}
    assert ends(tmp_path) == tried_once
    assert forked.run(tmp_path, "-c", SCRIPT, "resume=out", seconds=200).returncode == 1
    assert ends(tmp_path) == tried_once, "nobody asked to try again what failed"
    resumed = forked.run(tmp_path, "-c", SCRIPT, "resume=out", "resume_failed=true", seconds=200)
    assert resumed.returncode == 1, resumed.stdout + resumed.stderr
    assert ends(tmp_path) == ENDS
    assert [row["error"] for row in SweepFolder(tmp_path / "out").rows] == ["", "x", "x", "x", "x"]
    (parent,), children = Store(tmp_path).parents, Store(tmp_path).trials
    tags = [run.data.tags for run in children]
    assert [(t["status"], t.get("reason")) for t in tags] == [(status, code) for status, code, _ in ENDS.values()]
    assert [t.get("error") for t in tags] == [None, "x", "x", "x", "x"]
    assert parent.data.tags[RECOMMENDED_TAG] == "0" and parent.data.tags[ANSWER_TAG] == "x"
    page = (tmp_path / "out/report.html").read_text()
    assert re.findall(r'<tr class="chosen" [^>]*><td[^>]*data-value="(\d+)"', page) == ["0"]


NET = "tests.workloads.user.my_project.net"


@pytest.mark.usefixtures("no_gpus")
def test_a_model_that_cannot_train_does_not_start_but_others_do(compose_trial: Compose, tmp_path: Path):
    """Two losses are no mean, and the last model refuses. By their texts all three would be the same here."""
    common = ["task=custom", "model=custom", "data=example", "+model.width=8", "cluster.num_workers=2"]
    cells = [("Net", "loss", 0.1), ("Net", "of_each_item", 0.1), ("Net", "of_each_item", 0.2), ("Refuses", "loss", 0.1)]
    words = [[f"+model._target_={NET}.{m}", f"task.loss={NET}.{loss}", f"optimizer.lr={lr}"] for m, loss, lr in cells]
    plan = plan_of(compose_trial, tmp_path, words, common)
    with other_words(), answered_here():
        assert run_sweep(plan, Acts([None]), Hears(plan, Forecasts(plan), writes=True)) == ExitCode.failed
    reasons = [outcome.reason for state in plan.trials if (outcome := read_trial(state.trial.folder).outcome)]
    codes = [reason and reason.code for reason in reasons]
    assert codes == [None, Code.forecast_failed, Code.same_as, Code.forecast_failed]
    assert [reason and "may_train" in reason.values for reason in reasons] == [None, False, False, False]
    assert [row["error"] for row in SweepFolder(plan.folder).rows] == ["", "x", "x", "x"]
    assert heard(plan).begun == [0]
    traced = [state.trial.folder / "error.txt" for state in plan.trials]
    assert [path.exists() for path in traced] == [False, False, False, True]
    assert 'raise ValueError("these are too many")' in traced[-1].read_text()


def test_a_status_follows_from_the_code_alone():
    others = {Code.out_of_memory: "oom", Code.host_out_of_memory: "oom", Code.diverged: "diverged"}
    assert [Reason(code).status for code in Code] == [others.get(code, "failed") for code in Code]
