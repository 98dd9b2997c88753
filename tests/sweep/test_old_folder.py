"""A folder of the version whose one config class held every key: `old/`, a sweep of two trials that was killed in the
second. Its `.hydra/config.yaml` and its checkpoint's `meta.json` hold the keys of sweeps and nights too."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest

from fsdp_lab.sweep.store.changes import changes_of_config
from fsdp_lab.sweep.store.record import code_digests
from fsdp_lab.sweep.store.trials import read_trials
from fsdp_lab.sweep.sweep_data import sweep_in
from fsdp_lab.training.checkpoint import CheckpointError, check_meta, check_same_trial
from fsdp_lab.training.checkpoint_files import read_meta
from tests.conftest import run_cli
from tests.folders import SweepFolder

pytestmark = pytest.mark.full

OLD = Path(__file__).parent / "old"
CHECKPOINT = OLD / "1" / "checkpoints" / "step_00000006"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy as if it had been started here, with this code and these libraries."""
    shutil.copytree(OLD, tmp_path / "out")
    record = json.loads((OLD / "sweep.json").read_text())
    record |= {"launched_in": str(tmp_path), "code": code_digests()}
    record["libraries"] = {name: importlib.metadata.version(name) for name in record["libraries"]}
    (tmp_path / "out" / "sweep.json").write_text(json.dumps(record))
    return tmp_path


def test_its_settings_are_what_is_composed_now(compose_trial):
    for number, (overrides, where) in enumerate(read_trials(OLD)):
        same = compose_trial(overrides, number).config
        assert changes_of_config(where, same) == []
        other = compose_trial([*overrides, "optimizer.lr=0.5", "search.num_trials=9"], number).config
        assert changes_of_config(where, other) == ["optimizer.lr was 0.001 and is 0.5"]


def test_its_checkpoint_is_of_the_same_trial(compose_trial):
    overrides, _ = read_trials(OLD)[1]
    meta = read_meta(CHECKPOINT)
    later = [*overrides, "report.loss_tolerance=0.5", "training.epochs=99"]
    for words in (overrides, later):
        config = compose_trial(words, 1).config
        check_meta(meta, CHECKPOINT, config)
        check_same_trial(meta, CHECKPOINT, config)
    with pytest.raises(CheckpointError, match=r"training\.seed=0 in the checkpoint, 7 now"):
        check_same_trial(meta, CHECKPOINT, compose_trial([*overrides, "training.seed=7"], 1).config)


def test_it_is_reported():
    sweep, record, config = sweep_in(OLD)
    assert sweep.statuses == ["finished", "waiting"] and sweep.axes == ["sharding"]
    assert [len(trial.epochs) for trial in sweep.trials] == [12, 3]
    assert sweep.trials[0].figures["val/loss"] == SweepFolder(OLD).trials[0].losses[-1][2]
    assert record.num_workers == 1 and config.tracking.uri == "sqlite:///mlflow.db"


def test_it_is_resumed(folder: Path):
    """One worker trains DDP and FSDP2 alike: what was killed ends where the other trial did."""
    done = run_cli(folder, f"resume={folder / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 0 starts" not in done.stdout
    left = SweepFolder(folder / "out")
    assert Path(left.trials[1].facts["resumed_from"]).name == CHECKPOINT.name
    assert left.statuses == ["finished", "finished"]
    ddp, per_block = ([loss for _, loss, _ in trial.losses] for trial in left.trials)
    assert len(per_block) == 12 and per_block == pytest.approx(ddp, rel=1e-5)
