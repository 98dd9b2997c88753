"""What of a store's objects becomes a file here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from fsdp_lab.compose import Trial
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.record.trial_files import Outcome, read_outcome, write_outcome
from fsdp_lab.status import ExitCode, TrialStatus
from fsdp_lab.storage import Storage
from fsdp_lab.sweep.listeners.storage import StorageCopy
from fsdp_lab.sweep.runner import Ending, SweepPlan, SweepRun
from fsdp_lab.sweep.state import SweepState
from fsdp_lab.sweep.store.fetch import fetch_sweep, wanted
from fsdp_lab.sweep.store.resume import resumed_states


def test_all_but_checkpoints_is_copied_and_the_record_last():
    names = ["sweep.json", "trials.jsonl", "0/.hydra/config.yaml", "0/metrics.jsonl", "0/checkpoints/step_4.json", "z"]
    assert wanted(names) == ["0/.hydra/config.yaml", "0/metrics.jsonl", "trials.jsonl", "z", "sweep.json"]


def test_names_that_lead_elsewhere_are_left_out():
    assert wanted(["../x", "0/../../x", "/etc/x", ".lock", "0/.alive", ".copy_of", ".hydra/../../x", "a/./b"]) == [
        "a/./b"
    ]


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A sweep of two finished trials in fsspec's store in memory, which `check_address` refuses to users."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fsdp_lab.sweep.store.fetch.check_address", lambda *_: None)
    monkeypatch.setattr("fsdp_lab.record.paths.is_address", lambda path: path.startswith("memory://"))
    storage = Storage(f"memory://{uuid4().hex}/s-{uuid4().hex[:8]}")
    for name in ("0", "1"):
        (made := tmp_path / "made").mkdir(exist_ok=True)
        write_outcome(made, Outcome(TrialStatus.finished, None, 1.0), 0.25)
        storage.put(made / "outcome.json", f"{name}/outcome.json")
        storage.write(f"{name}/metrics.jsonl", b"{}\n")
    storage.write("sweep.json", b"{}")
    yield storage.address
    storage.delete(list(storage.files()))


@pytest.fixture
def resumed(address: str, compose_trial: Callable[[Sequence[str], int], Trial]) -> Callable[[Path], SweepRun]:
    def resume(folder: Path) -> SweepRun:
        trials = [compose_trial([], n) for n in range(2)]
        for n, trial in enumerate(trials):
            trial.config.cluster.storage_path = address.rpartition("/")[0]
            object.__setattr__(trial, "folder", folder / str(n))
        config = trials[0].config
        state = SweepState(resumed_states(trials, folder, config), [("val/loss", "min")])
        return SweepRun(SweepPlan(state, config, folder, [], SweepStart.of([], True, config), resumed=True), [])

    return resume


def copied(sweep: SweepRun) -> None:
    """What a resume keeps in storage."""
    copy = StorageCopy(lambda text: None)
    copy.opened(sweep)
    copy.finish(sweep, Ending(ExitCode.finished))


def test_what_storage_has_no_more_goes_from_a_copy_and_is_not_sent_again(
    address: str, resumed: Callable[[Path], SweepRun]
):
    storage, folder = Storage(address), fetch_sweep(address, "resume")
    storage.delete(["1/outcome.json"])  # as a resume elsewhere that begins it again
    storage.delete(["1/metrics.jsonl"])
    copied(resumed(folder))
    assert "1/outcome.json" not in storage.files(), "also where the copy is not brought up to date"
    assert fetch_sweep(address, "resume") == folder
    assert read_outcome(folder / "0") and not (folder / "1/outcome.json").exists()
    assert not (folder / "1/metrics.jsonl").exists()
    sweep = resumed(folder)
    assert not sweep.states[1].ended
    copied(sweep)
    assert "1/outcome.json" not in storage.files()
