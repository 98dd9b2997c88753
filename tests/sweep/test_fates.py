"""One sweep on Ray whose trials end in every way: each is recorded, takes no other down and leaves nothing behind.

The trials have two ranks each, and run two at a time. `fates.py` has the model that decides how each ends. Rarer fates
have a sweep of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from mlflow.entities import Run

from fsdp_lab.config import NightlyConfig, from_dict
from fsdp_lab.config.metrics import METRICS, declared
from fsdp_lab.sweep.sweep_data import sweep_in
from tests import forked
from tests.conftest import PLAIN, TINY
from tests.folders import Store, SweepFolder, TrialFolder
from tests.processes import marked, still_running
from tests.ranks import Memo, run_ranks
from tests.servers import lay_store
from tests.sweep import fates
from tests.sweep.outside import registering

pytestmark = pytest.mark.timeout(1200)

MARK = "FSDP_LAB_FATES"  # in the environment of the sweep's processes
EPOCHS, STEPS = 3, 4
TIMEOUT_S = 20
COMMON = {
    "finishes": "finished", "hangs": "failed", "raises": "failed", "killed": "finished", "falls_behind": "stopped",
}  # fmt: skip
RARE = {
    "killed_again": "failed", "runs_out_of_memory": "oom", "refused": "failed", "crashes": "failed",
    "diverges": "diverged", "exits": "failed",
}  # fmt: skip
STATUS = COMMON | RARE
SWEEP = (
    "-m", "model._target_=fates.Fate", f"model.mark={MARK}", *PLAIN, *TINY, f"training.epochs={EPOCHS}",
    "cluster.cpus_per_worker=0.5", "cluster.max_failures=1", f"trial_timeout_s={TIMEOUT_S}", "scheduler.name=strict",
    "scheduler.metric=train/loss:min", "forecast.enabled=false",
)  # fmt: skip
SCRIPT = registering("scheduler.name", "strict")
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


class Swept(NamedTuple):
    """The sweep when it has ended. `temporary`: the folder for temporary files that it was given."""

    fates: list[str]
    folder: Path
    temporary: Path
    code: int
    out: str
    err: str
    left: list[str]

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.folder / "out")

    def trial(self, fate: str) -> TrialFolder:
        return self.sweep.trials[self.fates.index(fate)]

    def row(self, fate: str) -> dict[str, str]:
        return self.sweep.rows[self.fates.index(fate)]

    @property
    def runs(self) -> dict[str, Run]:
        """The run of each fate, in order."""
        by_folder = {Path(run.data.tags["fsdp_lab.folder"]).name: run for run in Store(self.folder).trials}
        assert len(by_folder) == len(self.fates)
        return {fate: by_folder[str(number)] for number, fate in enumerate(self.fates)}


@pytest.fixture(scope="module")
def sweep_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Iterable[str]], Swept]]:
    """Runs a sweep of these fates, once."""
    known: dict[tuple[str, bool], Swept] = {}

    def sweep(fates_: Iterable[str], public: bool = False) -> Swept:
        names = ",".join(fates_)
        if (names, public) not in known:
            folder = tmp_path_factory.mktemp("fates")
            temporary = tempfile.mkdtemp(prefix="t")  # Ray's sockets are in it, and their paths have to be short
            shutil.copy(Path(fates.__file__), folder)
            lay_store(folder)
            environment = {
                **os.environ,
                MARK: str(folder),
                "TMPDIR": temporary,
                **({"FSDP_LAB_PUBLIC_RAY": "1"} if public else {}),
            }
            words = (*SWEEP, f"model.fate={names}")
            done = forked.run(folder, "-c", SCRIPT, *words, seconds=800, environment=environment)
            left = still_running(marked(MARK, str(folder)), 15)
            of = (names.split(","), folder, Path(temporary), done.returncode, done.stdout, done.stderr, left)
            known[names, public] = Swept(*of)
        return known[names, public]

    yield sweep
    for swept in known.values():
        shutil.rmtree(swept.temporary, ignore_errors=True)


@pytest.fixture
def swept(sweep_of: Callable[[Iterable[str]], Swept]) -> Swept:
    return sweep_of(COMMON)


@pytest.fixture(
    params=[
        pytest.param((COMMON, False), id="common"),
        pytest.param((RARE, False), id="rare", marks=pytest.mark.ci),
        pytest.param((STATUS, True), id="without the shortcut", marks=pytest.mark.ci),
    ]
)
def each(sweep_of: Callable[..., Swept], request: pytest.FixtureRequest) -> Swept:
    return sweep_of(*request.param)


def test_every_trial_has_the_status_of_its_fate(each: Swept):
    expected = {fate: STATUS[fate] for fate in each.fates}
    assert dict(zip(each.fates, each.sweep.statuses, strict=True)) == expected, each.out + each.err
    for fate, status in expected.items():
        outcome = each.trial(fate).outcome
        assert outcome is not None and outcome["status"] == status, fate


def test_when_trials_ran_is_known_from_the_folder(swept: Swept):
    """Two at a time: by the clock of the trial's own process or the driver's."""
    data, _, _ = sweep_in(swept.folder / "out")
    spans = [trial.span for trial in data.trials]
    assert all(span is not None and 0 < span[1] - span[0] < 390 for span in spans)
    assert sum(data.frame()["beside"] > 0) >= 2


def test_a_failed_trial_makes_the_exit_status_1_and_prints_no_traceback(swept: Swept):
    assert swept.code == 1
    assert "Traceback" not in swept.out + swept.err
    assert "A worker died" not in swept.out + swept.err, "Ray has a paragraph for each"
    for number, fate in enumerate(swept.fates):
        assert f"trial {number} {STATUS[fate]}" in swept.out


MESSAGES = {
    "hangs": (f"no progress for trial_timeout_s={TIMEOUT_S} s since step", "rank 1 is at", "fates.py", " in hangs"),
    "raises": ("rank 0", "RuntimeError: the first step fails", "fates.py"),
    "killed_again": ("rank 1", "its process", "as if killed"),
    "runs_out_of_memory": ("rank 1", "OutOfMemoryError: CUDA out of memory"),
    "refused": ("model.fate=refused is refused",),
    "crashes": ("rank 0", "its process", "Segmentation fault"),
    "diverges": ("rank", "the loss of step 1 is nan"),
    "exits": ("rank", "its process ended"),
    "finishes": (), "killed": (), "falls_behind": (),
}  # fmt: skip


@pytest.mark.parametrize("fate", [*COMMON, *(pytest.param(fate, marks=pytest.mark.ci) for fate in RARE)])
def test_the_error_names_what_happened_and_where(sweep_of: Callable[[Iterable[str]], Swept], fate: str):
    swept = sweep_of(COMMON if fate in COMMON else RARE)
    error = swept.row(fate)["error"]
    assert [words for words in MESSAGES[fate] if words not in error] == [], error
    assert bool(error) == (STATUS[fate] not in ("finished", "stopped"))
    assert "\n" not in error and error in swept.out.replace("\n", " ")
    assert swept.runs[fate].data.tags.get("error", "")[:40] == error[:40]


@pytest.mark.ci
def test_a_crash_in_native_code_has_its_stack_in_the_log(sweep_of: Callable[[Iterable[str]], Swept]):
    log = (sweep_of(RARE).trial("crashes").path / "logs" / "rank0.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log and "fates.py" in log


def test_only_what_another_attempt_may_mend_is_tried_again(each: Swept):
    """Once: `cluster.max_failures=1`. The failures of the first attempt are set aside."""
    attempts = {fate: 1 + len(each.trial(fate).earlier_failures) for fate in each.fates}
    again = ("raises", "killed", "killed_again", "crashes", "exits")
    assert attempts == {fate: 2 if fate in again else 1 for fate in each.fates}


def test_a_killed_trial_resumes_from_its_checkpoint_and_learns_the_same(swept: Swept):
    undisturbed, killed = swept.trial("finishes"), swept.trial("killed")
    assert [epoch for epoch, *_ in killed.losses] == list(range(1, EPOCHS + 1))
    assert killed.losses == undisturbed.losses
    assert killed.facts["resumed_from"] and not undisturbed.facts["resumed_from"]
    models = [torch.load(trial.path / "model.pt", weights_only=True)["state_dict"] for trial in (undisturbed, killed)]
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=0)


def test_a_trial_has_the_epochs_that_it_reported_and_a_model_if_it_finished(each: Swept):
    epochs = {fate: len(each.trial(fate).epochs) for fate in each.fates}
    if "killed_again" in epochs:  # a report just before a kill may be lost; its checkpoint has the epoch
        assert epochs.pop("killed_again") in (1, 2)
    some = {"finishes": EPOCHS, "killed": EPOCHS, "hangs": 1, "runs_out_of_memory": 1, "falls_behind": 1}
    assert epochs == {fate: some.get(fate, 0) for fate in epochs}
    for fate in epochs:
        assert (each.trial(fate).path / "model.pt").exists() == (STATUS[fate] == "finished"), fate
        assert int(each.row(fate)["epoch"] or 0) == epochs[fate]


def test_nothing_runs_on_and_no_temporary_file_is_left(swept: Swept):
    """Neither a process of Ray's nor what a killed rank had started."""
    assert (swept.folder / "killed").exists() and swept.left == []
    assert list(swept.temporary.glob("fsdp_lab_*")) == list(swept.temporary.glob("ray/session_2*")) == []


def test_the_process_that_trains_is_a_worker_of_rays(swept: Swept):
    """So Ray's dashboard, its logs and its memory monitor see the training."""
    assert json.loads((swept.folder / "seen.json").read_text())["name"].startswith("ray::")


def test_nobody_listens_beyond_the_loopback_but_the_store_of_rank_0(swept: Swept):
    """Neither Ray's servers nor ranks with gloo. Two trials train side by side."""
    seen = json.loads((swept.folder / "seen.json").read_text())
    listeners = seen["listeners"]
    ranks = [name for name, _ in listeners if name.startswith("ray::")]
    assert {"raylet", "gcs_server"} <= {name for name, _ in listeners} and ranks
    beyond = [name for name, address in listeners if address not in LOOPBACK]
    assert len(beyond) <= 2 and set(beyond) <= set(ranks), listeners


# What a finished trial leaves.


def plain_run(values: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    from fsdp_lab.training.train import train

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    memo = Memo()
    train(from_dict(NightlyConfig, values), folder / "plain", memo)
    return memo.reported


def test_the_losses_are_those_of_a_run_without_ray(swept: Swept):
    config = swept.trial("finishes").config
    config["scheduler"]["name"] = "fifo"  # which stops nothing either
    plain = run_ranks(2, plain_run, config, swept.folder)[0]
    store = Store(swept.folder)
    for key in ("train/loss", "val/loss", "val/accuracy"):
        expected = [metrics[key] for metrics in plain]
        assert [value for _, value in store.history(swept.runs["finishes"], key)] == pytest.approx(expected, abs=1e-6)


def test_the_folder_is_as_hydra_leaves_one(swept: Swept):
    out = swept.folder / "out"
    multirun = yaml.safe_load((out / "multirun.yaml").read_text())
    assert {a for a in SWEEP if a != "-m" and "hydra." not in a} <= set(multirun["hydra"]["overrides"]["task"])
    assert {d.name for d in out.iterdir() if d.name.isdigit()} == {str(number) for number in range(len(swept.fates))}
    for number, fate in enumerate(swept.fates):
        trial = swept.trial(fate)
        assert trial.config["model"]["fate"] == fate and "hydra" not in trial.config
        hydra = yaml.safe_load((trial.path / ".hydra" / "hydra.yaml").read_text())["hydra"]
        assert hydra["job"]["num"] == number and hydra["runtime"]["choices"]["sharding"] == "per_block"
        overrides = yaml.safe_load((trial.path / ".hydra" / "overrides.yaml").read_text())
        assert f"model.fate={fate}" in overrides and "sharding=per_block" in overrides
        assert {log.name for log in (trial.path / "logs").glob("*.log")} == {"rank0.log", "rank1.log"}
        stuck = [file.name for file in (trial.path / "logs").glob("stuck*") if file.stat().st_size]
        assert sorted(stuck) == (["stuck.rank0.txt", "stuck.rank1.txt"] if fate == "hangs" else [])


def test_results_csv_has_a_row_a_trial(swept: Swept):
    for number, (row, (fate, run)) in enumerate(zip(swept.sweep.rows, swept.runs.items(), strict=True)):
        assert (row["trial"], row["model.fate"], row["run_id"]) == (str(number), fate, run.info.run_id)
        assert Path(row["folder"]) == swept.folder / "out" / str(number)
        if row["status"] == "finished":
            assert float(row["val/loss"]) == pytest.approx(run.data.metrics["val/loss"])
            assert float(row["seconds"]) > 0 and float(row["perf/samples_per_s"]) > 0


def test_mlflow_has_one_parent_and_a_run_a_trial(swept: Swept):
    store = Store(swept.folder)
    (parent,), children = store.parents, list(swept.runs.values())
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert (parent.info.status, parent.data.tags["num_trials"]) == ("FAILED", str(len(swept.fates)))
    assert "model.fate=finishes,hangs" in parent.data.tags["fsdp_lab.command"]
    ended = {"finished": "FINISHED", "stopped": "KILLED"}
    assert [run.data.tags["status"] for run in children] == list(COMMON.values())
    assert [run.info.status for run in children] == [ended.get(status, "FAILED") for status in COMMON.values()]
    assert store.artifacts(parent) == [
        "multirun.yaml", "report.html", "results.csv",
        "use_pytorch.py",
    ]  # fmt: skip


@pytest.mark.parametrize("fate", ["finishes", "killed"])
def test_mlflow_has_every_epoch_once(swept: Swept, fate: str):
    store, run = Store(swept.folder), swept.runs[fate]
    for key in ("train/loss", "val/loss", "val/accuracy", "perf/samples_per_s", "memory/peak_bytes"):
        assert [step for step, _ in store.history(run, key)] == list(range(1, EPOCHS + 1)), key
    assert store.history(run, "train/step") == [(epoch, STEPS * epoch) for epoch in range(1, EPOCHS + 1)]
    assert {"memory/rank0/peak_bytes", "memory/rank1/peak_bytes", "checkpoint/save_s"} <= run.data.metrics.keys()
    in_mib = {metric.mib_key for metric in METRICS}
    assert [key for key in run.data.metrics if not (key in in_mib or declared(key))] == []


def test_mlflow_has_parameters_tags_and_the_data(swept: Swept):
    for run in (swept.runs["finishes"], swept.runs["killed"]):
        given = {"sharding": "per_block", "offload": "none", "precision": "fp32", "reshard_after_forward": "always"}
        others = {"model._target_": "fates.Fate", "data": "digits", "data.num_train": "128", "optimizer.lr": "0.001"}
        assert {**given, **others}.items() <= run.data.params.items()
        tags = run.data.tags
        assert {"host", "device", "version.torch", "version.ray", "version.mlflow"} <= tags.keys()
        assert tags["world_size"] == "2"
        assert tags["data_digest"]


def test_mlflow_has_the_files_of_trials(swept: Swept):
    store = Store(swept.folder)
    finished, failed = store.artifacts(swept.runs["finishes"]), store.artifacts(swept.runs["raises"])
    assert {"config/config.yaml", "config/overrides.yaml", "model/model.pt"} <= set(finished)
    assert {"trial.json", "error.txt", "config/config.yaml"} <= set(failed)
