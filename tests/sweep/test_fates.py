"""One sweep on Ray whose trials end in every way: each is recorded, takes no other down and leaves nothing behind.

The trials have two ranks each, and run two at a time. `fates.py` has the model that decides how each ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mlflow.entities import Run

from fsdp_lab.config.metrics import METRICS, declared
from fsdp_lab.sweep.record import record_of, sweep_in
from tests import forked
from tests.conftest import PLAIN, TINY
from tests.folders import Store, SweepFolder, TrialFolder
from tests.processes import marked, still_running
from tests.ranks import run_ranks
from tests.servers import lay_store
from tests.sweep import fates
from tests.sweep.conftest import train_alone
from tests.sweep.planted import registering

pytestmark = pytest.mark.timeout(1200)

MARK = "FSDP_LAB_FATES"  # in the environment of the sweep's processes
EPOCHS, STEPS = 3, 4
TIMEOUT_S = 45  # of a hang; each rank imports PyTorch and starts within that time
PATIENT_S = 90  # on a busy machine


class End(NamedTuple):
    """How a trial ends: its status, its attempts, the epochs that it has, and what its error says."""

    status: str
    attempts: int
    epochs: int
    error: tuple[str, ...] = ()


def hangs(timeout_s: int) -> End:
    return End("failed", 1, 1, (
        f"no progress for trial_timeout_s={timeout_s} s since step", "rank 1 is at", "fates.py", " in hangs",
    ))  # fmt: skip


# Another attempt is made once (`cluster.max_failures=1`), and only of what it may mend.
COMMON = {
    "hangs": hangs(TIMEOUT_S),
    "killed": End("finished", 2, EPOCHS),
    "finishes": End("finished", 1, EPOCHS),
}
RARE = {
    "raises": End("failed", 2, 0, ("rank 0", "RuntimeError: the first step fails", "fates.py")),
    "falls_behind": End("stopped", 1, 1),
    "runs_out_of_memory": End("oom", 1, 1, ("rank 1", "OutOfMemoryError: CUDA out of memory")),
    "refused": End("failed", 1, 0, ("model.fate=refused is refused",)),
    "crashes": End("failed", 2, 0, ("rank 0", "its process", "Segmentation fault")),
    "diverges": End("diverged", 1, 0, ("rank", "the loss of step 1 is nan")),
    "exits": End("failed", 2, 0, ("rank", "its process ended")),
}
SWEEP = (
    "-m", "model._target_=fates.Fate", f"model.mark={MARK}", *PLAIN, *TINY, f"training.epochs={EPOCHS}",
    "cluster.cpus_per_worker=0.5", "cluster.max_failures=1", "scheduler.name=strict", "scheduler.metric=train/loss:min",
    "forecast.enabled=false",
)  # fmt: skip
SCRIPT = registering("scheduler.name", "strict")
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
Ends = Mapping[str, End]


class Swept(NamedTuple):
    """The sweep when it has ended. `temporary`: the folder for temporary files that it was given."""

    ends: Ends
    folder: Path
    temporary: Path
    done: subprocess.CompletedProcess[str]
    left: list[str]

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.folder / "out")

    def trial(self, fate: str) -> TrialFolder:
        return self.sweep.trials[list(self.ends).index(fate)]

    @property
    def runs(self) -> dict[str, Run]:
        """The run of each fate, in order."""
        by_folder = {Path(run.data.tags["fsdp_lab.folder"]).name: run for run in Store(self.folder).trials}
        return {fate: by_folder[str(number)] for number, fate in enumerate(self.ends)}


@pytest.fixture(scope="module")
def sweep_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Swept]]:
    """Runs a sweep of trials with these ends."""
    folders = []

    def sweep(ends: Ends, timeout_s: int = TIMEOUT_S, public: str = "") -> Swept:
        folder = tmp_path_factory.mktemp("fates")
        temporary = Path(tempfile.mkdtemp(prefix="t"))  # Ray's sockets are in it, and their paths have to be short
        folders.append(temporary)
        shutil.copy(Path(fates.__file__), folder)
        lay_store(folder)
        environment = {**os.environ, MARK: str(folder), "TMPDIR": str(temporary), "FSDP_LAB_PUBLIC_RAY": public}
        words = (*SWEEP, f"trial_timeout_s={timeout_s}", f"model.fate={','.join(ends)}")
        done = forked.run(folder, "-c", SCRIPT, *words, seconds=800, environment=environment)
        return Swept(ends, folder, temporary, done, still_running(marked(MARK, str(folder)), 15))

    yield sweep
    for temporary in folders:
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def swept(sweep_of: Callable[..., Swept]) -> Swept:
    return sweep_of(COMMON)


def check_ends(swept: Swept) -> None:
    """Each trial has the status, the attempts, the epochs and the error of its end, and a model if it finished."""
    assert swept.sweep.statuses == [end.status for end in swept.ends.values()], swept.done
    for (fate, end), row in zip(swept.ends.items(), swept.sweep.rows, strict=True):
        trial, error, tags = swept.trial(fate), row["error"], swept.runs[fate].data.tags
        assert trial.outcome is not None and trial.outcome["status"] == tags["status"] == end.status, fate
        assert 1 + len(trial.earlier_failures) == end.attempts, fate
        assert len(trial.epochs) == int(row["epoch"] or 0) == end.epochs, fate
        assert (trial.path / "model.pt").exists() == (end.status == "finished"), fate
        assert [words for words in end.error if words not in error] == [], error
        assert bool(error) == (end.status not in ("finished", "stopped")) and "\n" not in error
        assert error in swept.done.stdout.replace("\n", " ") and tags.get("error", "")[:40] == error[:40]


def test_trials_that_finish_hang_or_are_killed_end_by_themselves(swept: Swept):
    check_ends(swept)


@pytest.mark.ci
def test_trials_that_end_in_other_ways_do_so_each_by_itself(sweep_of: Callable[..., Swept]):
    swept = sweep_of(RARE, PATIENT_S)
    check_ends(swept)
    log = (swept.trial("crashes").path / "logs" / "rank0.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log and "fates.py" in log, "the stack of native code"
    assert {"trial.json", "error.txt"} <= set(Store(swept.folder).artifacts(swept.runs["raises"]))


@pytest.mark.full
@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(COMMON | {"raises": RARE["raises"]}, id="common"),
        pytest.param(RARE, id="rare"),
    ],
)
def test_trials_end_the_same_without_the_shortcut(sweep_of: Callable[..., Swept], ends: Ends):
    patient = {fate: hangs(PATIENT_S) if fate == "hangs" else end for fate, end in ends.items()}
    check_ends(sweep_of(patient, PATIENT_S, public="1"))


def test_when_trials_ran_is_known_from_the_folder(swept: Swept):
    """Two at a time: by the clock of the trial's own process or the driver's."""
    data = record_of(sweep_in(swept.folder / "out"))
    spans = [trial.span for trial in data.trials]
    assert all(span is not None and 0 < span[1] - span[0] < 390 for span in spans)
    assert sum(data.frame()["beside"] > 0) >= 2


def test_a_failed_trial_makes_the_exit_status_1_and_is_named(swept: Swept):
    assert swept.done.returncode == 1
    output = swept.done.stdout + swept.done.stderr
    assert "Traceback" not in output
    assert "A worker died" not in output, "Ray has a paragraph for each"
    for number, end in enumerate(swept.ends.values()):
        assert f"trial {number} {end.status}" in output


def test_ranks_have_one_hash_seed(swept: Swept):
    assert len({(swept.folder / f"hash{rank}").read_text() for rank in range(2)}) == 1


def test_what_the_first_epoch_shows_is_noted_everywhere(swept: Swept):
    """A buffer that each rank has written: in the record, in MLflow and on the console."""
    note = "Ranks differ in the buffers own: "
    assert any(each.startswith(note) for each in swept.trial("finishes").facts["notes"])
    assert note in swept.runs["finishes"].data.tags["note"]
    assert swept.done.stdout.count(f"note: {note}") == 1


def test_a_killed_trial_resumes_and_learns_the_same(swept: Swept):
    undisturbed, killed = swept.trial("finishes"), swept.trial("killed")
    assert [epoch for epoch, *_ in killed.losses] == list(range(1, EPOCHS + 1))
    assert killed.losses == undisturbed.losses
    assert killed.facts["resumed_from"] and not undisturbed.facts["resumed_from"]
    models = [torch.load(trial.path / "model.pt", weights_only=True)["state_dict"] for trial in (undisturbed, killed)]
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=0)


def test_nothing_runs_on_and_no_temporary_file_is_left(swept: Swept):
    """Neither a process of Ray's nor what a killed rank had started."""
    assert (swept.folder / "killed").exists() and swept.left == []
    assert list(swept.temporary.glob("fsdp_lab_*")) == list(swept.temporary.glob("ray/session_2*")) == []


def test_the_process_that_trains_is_a_worker_of_rays(swept: Swept):
    """So Ray's dashboard, its logs and its memory monitor see the training."""
    assert json.loads((swept.folder / "seen.json").read_text())["name"].startswith("ray::")


def test_only_the_store_of_rank_0_listens_beyond_the_loopback(swept: Swept):
    """Neither Ray's servers nor ranks with gloo. Two trials train side by side."""
    listeners = json.loads((swept.folder / "seen.json").read_text())["listeners"]
    ranks = [name for name, _ in listeners if name.startswith("ray::")]
    assert {"raylet", "gcs_server"} <= {name for name, _ in listeners} and ranks
    beyond = [name for name, address in listeners if address not in LOOPBACK]
    assert len(beyond) <= 2 and set(beyond) <= set(ranks), listeners


def test_the_losses_are_those_of_a_run_without_ray(swept: Swept):
    config = swept.trial("finishes").config
    config["scheduler"]["name"] = "fifo"  # which stops nothing either
    plain = run_ranks(2, train_alone, config, swept.folder)[0]
    store = Store(swept.folder)
    for key in ("train/loss", "val/loss", "val/accuracy"):
        expected = [metrics[key] for metrics in plain]
        assert [value for _, value in store.history(swept.runs["finishes"], key)] == pytest.approx(expected, abs=1e-6)


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
    assert {run.data.tags["mlflow.parentRunId"] for run in store.trials} == {parent.info.run_id}
    assert (parent.info.status, parent.data.tags["num_trials"]) == ("FAILED", str(len(swept.ends)))
    assert "model.fate=hangs,killed" in parent.data.tags["fsdp_lab.command"]
    assert [run.info.status for run in children] == ["FAILED", "FINISHED", "FINISHED"] and len(store.trials) == 3
    assert {"trial.json", "config/config.yaml", "model/model.pt"} <= set(store.artifacts(children[-1]))
    assert store.artifacts(parent) == ["multirun.yaml", "report.html", "results.csv", "use_pytorch.py"]


@pytest.mark.parametrize("fate", ["finishes", "killed"])
def test_mlflow_has_every_epoch_once(swept: Swept, fate: str):
    store, run = Store(swept.folder), swept.runs[fate]
    for key in ("train/loss", "val/loss", "val/accuracy", "perf/samples_per_s", "memory/peak_bytes"):
        assert [step for step, _ in store.history(run, key)] == list(range(1, EPOCHS + 1)), key
    assert store.history(run, "train/step") == [(epoch, STEPS * epoch) for epoch in range(1, EPOCHS + 1)]
    assert {"memory/rank0/peak_bytes", "memory/rank1/peak_bytes", "checkpoint/save_s"} <= run.data.metrics.keys()
    in_mib = {metric.mib_key for metric in METRICS}
    assert [key for key in run.data.metrics if not (key in in_mib or declared(key))] == []
