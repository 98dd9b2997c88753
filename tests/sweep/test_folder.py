"""Where a new sweep writes: never over another one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from fsdp_lab.config import ConfigError
from fsdp_lab.storage.locks import InUse
from fsdp_lab.sweep.store.folder import Occupied, check_trial_folders, new_folder
from tests.conftest import INLINE, run_cli
from tests.sweep.conftest import has_trained_an_epoch, results, started, wait_for

KEY = "hydra.sweep.dir"


def hydra(*typed: str) -> DictConfig:
    return OmegaConf.create({"overrides": {"hydra": list(typed)}})


def test_starts_of_one_second_have_folders_of_their_own(tmp_path: Path):
    planned = tmp_path / "14-05-09"
    with new_folder(planned, KEY, hydra()) as first, new_folder(planned, KEY, hydra()) as second:
        assert (first.name, second.name) == ("14-05-09", "14-05-09-2")
        (first / "results.csv").touch()
        (second / "trial.json").touch()
    with new_folder(planned, KEY, hydra()) as third:
        assert third.name == "14-05-09-3", "the others have ended, and their results stay"
    with new_folder(planned, KEY, hydra()) as fourth:
        assert fourth.name == "14-05-09-3", "nothing was begun there"


def test_a_folder_that_was_typed_is_free_or_refused(tmp_path: Path):
    typed = hydra(f"{KEY}={tmp_path}")
    with new_folder(tmp_path, KEY, typed) as folder:
        assert folder == tmp_path
        with pytest.raises(InUse, match="in use by another sweep or run"), new_folder(tmp_path, KEY, typed):
            pass
    (tmp_path / "sweep.json").touch()
    with new_folder(tmp_path, KEY, typed):
        pass  # its start was refused: MLflow was away
    reported = (
        rf"{KEY}={tmp_path} holds results, which would be lost.*python -m fsdp_lab resume={tmp_path}\. .*: {KEY}=\.\.\."
    )
    (tmp_path / "trials.jsonl").touch()
    for left in ("results.csv", "trial.json", "0/trial.json", "a/b/c/trial.json"):
        (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left).touch()
        with pytest.raises(Occupied, match=reported), new_folder(tmp_path, KEY, typed):
            pass
        (tmp_path / left).unlink()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["one", "one"], "trials 0 and 1 the same folder"),
        (["a/b", "a/../a/b/"], "trials 0 and 1 the same folder"),
        (["lr=1e-3", "lr=1E-3"], "trials 0 and 1 the same folder"),
        (["0", "link/0"], "trials 0 and 1 the same folder"),
        (["."], "not one of its own"),
        (["0", "../0"], "trial 1 the folder .*, which is not one of its own"),
        (["/tmp/elsewhere/0"], "not one of its own"),
        (["away/0"], "not one of its own"),
        (["results.csv/0"], "not one of its own"),
        (["a/b", "c", "a"], "trial 0 a folder inside that of trial 2"),
        (["0", "a/" + "n" * 256], "trial 1 a name of more than 255 bytes"),
        (["é" * 128], "trial 0 a name of more than 255 bytes"),
        (["/".join(["n" * 250] * 16)], "trial 0 a path of more than 3896 bytes"),
    ],
)
def test_trials_that_would_share_or_leave_the_sweeps_folder_are_refused(tmp_path: Path, names: list[str], reason: str):
    for name, target in (("link", "."), ("away", "..")):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(ConfigError, match=f"hydra.sweep.subdir gives .*{reason}.*hydra.job.num"):
        check_trial_folders(tmp_path, [tmp_path / name for name in names])


def test_folders_of_their_own_below_the_sweep_are_taken(tmp_path: Path):
    check_trial_folders(tmp_path / "new", [tmp_path / "new" / name for name in ("0", "00", "a/0", "a/1", "n" * 255)])


@pytest.mark.ci
@pytest.mark.parametrize("multirun", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_second_start_changes_nothing_of_the_first_which_can_be_resumed(tmp_path: Path, multirun: bool):
    """While the first runs, and after it was killed."""
    flag = ("-m",) if multirun else ()
    trial = tmp_path / "out" / ("0" if multirun else "")
    other = (*flag, *INLINE, "optimizer.lr=0.5", "training.epochs=1")
    settings = ("training.epochs=3000", "data.num_train=960", "checkpoint.every_epochs=5")
    with started(tmp_path, *flag, *INLINE, *settings) as process:
        wait_for(lambda: has_trained_an_epoch(trial), process)
        before = written_once(tmp_path / "out")
        running = run_cli(tmp_path, *other)
        resuming = run_cli(tmp_path, "resume=out")
        assert written_once(tmp_path / "out") == before
        process.kill()
    killed = run_cli(tmp_path, *other)
    assert (running.returncode, killed.returncode) == (2, 2), running.stderr + killed.stderr
    assert "is in use by another sweep or run" in running.stderr and "use another folder: hydra." in running.stderr
    assert f"resume={tmp_path / 'out'} is in use by another sweep or run" in resuming.stderr
    assert resuming.stderr.endswith("wait until it ends\n"), "a resume has no folder but this"
    assert "holds results, which would be lost" in killed.stderr
    assert written_once(tmp_path / "out") == before
    done = run_cli(tmp_path, "resume=out", "training.max_steps=200", "resume_anyway=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path)[0]["status"] == "finished"


def written_once(folder: Path) -> dict[str, str]:
    """The digest of each file that a sweep writes at its start."""
    names = {"sweep.json", "trials.jsonl", "multirun.yaml", "config.yaml", "hydra.yaml", "overrides.yaml"}
    files = [path for path in sorted(folder.rglob("*")) if path.name in names]
    assert files
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
