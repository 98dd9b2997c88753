"""No rule reads a sentence: with every one replaced by `x`, sweeps and forecasts end as they do with words."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
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
from fsdp_lab.sweep.sweep import Sweep
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
    page = (tmp_path / "out/report.html").read_text()
    assert re.findall(r'<tr class="chosen" [^>]*><td[^>]*data-value="(\d+)"', page) == ["0"]


def swept(
    plan: Sweep, reasons: Sequence[Reason | None], forecasts: Forecasts | None = None
) -> tuple[ExitCode, list[Code | None]]:
    """The exit status of a sweep, and the code of each trial's end; `results.csv` has no other words than `x`."""
    with other_words(), answered_here():
        code = run_sweep(plan, Acts(reasons), Hears(plan, forecasts, writes=True))
    ends = [read_trial(state.trial.folder).outcome for state in plan.trials]
    codes = [end.reason.code if end and end.reason else None for end in ends]
    assert [row["error"] for row in SweepFolder(plan.folder).rows] == ["x" if code else "" for code in codes]
    return code, codes


NET = "tests.workloads.user.my_project.net"


@pytest.mark.usefixtures("no_gpus")
def test_a_model_that_cannot_train_does_not_start_but_others_do(compose_trial: Compose, tmp_path: Path):
    """Two losses are no mean, and the last model refuses. By their texts all three would be the same here."""
    common = ["task=custom", "model=custom", "data=example", "+model.width=8", "cluster.num_workers=2"]
    cells = [("Net", "loss", 0.1), ("Net", "of_each_item", 0.1), ("Net", "of_each_item", 0.2), ("Refuses", "loss", 0.1)]
    words = [[f"+model._target_={NET}.{m}", f"task.loss={NET}.{loss}", f"optimizer.lr={lr}"] for m, loss, lr in cells]
    plan = plan_of(compose_trial, tmp_path, words, common)
    expected = [None, Code.forecast_failed, Code.same_as, Code.forecast_failed]
    assert swept(plan, [None], Forecasts(plan)) == (ExitCode.failed, expected)
    assert heard(plan).begun == [0]


# Values that a reason may have, whatever its code.
VALUES = {
    "rank": 1, "text": "x", "error": "x", "trial": 0, "limit_s": 1.0, "signal": "x", "log": "x", "node": "x",
    "folder": "x", "num_workers": 2, "each": {"CPU": 1.0}, "wait_timeout_s": 1.0,
}  # fmt: skip


def test_a_trials_end_is_recorded_and_counted_by_its_code(compose_trial: Compose, tmp_path: Path):
    """Also for those that only Ray has: a worker that is killed, a node that is lost, no place."""
    reasons = [Reason.of(code, **VALUES) for code in Code]
    plan = plan_of(compose_trial, tmp_path, [[f"training.seed={number}"] for number in range(len(reasons))])
    assert swept(plan, reasons) == (ExitCode.failed, list(Code))
    others = {Code.out_of_memory: "oom", Code.host_out_of_memory: "oom", Code.diverged: "diverged"}
    assert SweepFolder(plan.folder).statuses == [others.get(code, "failed") for code in Code]
