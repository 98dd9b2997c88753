"""The names of sweeps, trials, folders and commands; a new sweep writes over no other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from fsdp_lab.config import ConfigError
from fsdp_lab.storage.locks import InUse
from fsdp_lab.sweep.command import Multirun
from fsdp_lab.sweep.grid import enumerate_grid
from fsdp_lab.sweep.names import setting_text, short_name, sweep_name
from fsdp_lab.sweep.outputs.results_csv import rows_of
from fsdp_lab.sweep.plan import plan_sweep
from fsdp_lab.sweep.start import run
from fsdp_lab.sweep.store.folder import Occupied, check_trial_folders, new_folder
from fsdp_lab.sweep.trial import TrialState
from tests.conftest import INLINE, run_cli, without
from tests.folders import Store, SweepFolder
from tests.sweep import fates
from tests.sweep.conftest import has_trained_an_epoch, results, started, wait_for
from tests.sweep.planted import sweep_of as planned_sweep

KEY = "hydra.sweep.dir"


def test_names_in_mlflow_say_what_differs_with_numbers_rounded(compose_trial):
    """Those that a search drew, to three digits; a whole number has all."""
    swept = ["sharding", "optimizer.lr", "training.seed"]
    drawn = {"0.0012345678": "0.00123", "3e-05": "3e-05", "0.5": "0.5", "123456.7": "123457"}
    words = ["search=optuna", "sharding=root", "training.seed=1234567"]
    trials = [compose_trial([*words, f"optimizer.lr={lr}"], number) for number, lr in enumerate(drawn)]
    assert [short_name(one, swept) for one in trials] == [f"root lr={lr} seed=1234567" for lr in drawn.values()]
    assert setting_text(trials[0], "optimizer.lr") == "0.00123457", "of six digits in tables"
    assert sweep_name(trials, swept) == "sharding × lr × seed (optuna, 4 trials)"
    assert sweep_name([compose_trial(["sharding=root"], 0)], []) == "one setting (1 trial)"


OWN_VALUES = [
    ["{a:1}", "{b:2}", "{a:{b:[1,null]}}", "{}"],
    ["1", "'1'", "1.0", "true", "'true'", "null", "'null'"],
    ["[1]", "['1']", "[{a:1}]", "[{a:2}]", "[]", "[1,[2]]"],
    ["0.1", "0.10000001"],
    ["'介绍'", "'a b'", "s3://bucket/x"],
]


@pytest.mark.parametrize("values", OWN_VALUES)
def test_values_of_the_users_own_are_shown_as_typed(parser: OverridesParser, compose_trial, values: list[str]):
    """Of whatever type: by the table, the report and `results.csv`."""
    words = ["model._target_=collections.ChainMap", f"model.table={','.join(values)}"]
    plan = plan_sweep(enumerate_grid(parser, {}, words), compose_trial, lambda config: None)
    assert [setting_text(trial, "model.table") for trial in plan.trials] == values
    assert [short_name(trial, ["model.table"]) for trial in plan.trials] == [f"table={value}" for value in values]
    states = [TrialState(trial) for trial in plan.trials]
    planned = planned_sweep(states, swept=["model.table"])
    assert [row["model.table"] for row in rows_of(planned)] == values


STRANGE = ("a b", "介绍 é", "x=1", "a/b/../c", "long" * 75)


@pytest.mark.ci
def test_long_and_strange_names_are_in_folder_csv_and_mlflow(tmp_path: Path):
    """A value of the user's own, as it is typed, and folders; the longest value has 300 characters."""
    shutil.copy(Path(fates.__file__), tmp_path)
    typed = ",".join(f"'{value}'" for value in STRANGE)
    words = [f"model.mark={typed}", "model._target_=fates.Fate", "model.fate=finishes", "training.epochs=1"]
    folders = ["hydra.sweep.dir='o u t=ü'", "hydra.sweep.subdir='ünï=${hydra.job.num} x/" + "n" * 255 + "/介绍'"]
    done = run_cli(tmp_path, "-m", *without(INLINE, "model=", "hydra."), *words, *folders)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep, runs = SweepFolder(tmp_path / "o u t=ü"), Store(tmp_path).trials
    assert [row["model.mark"] for row in sweep.rows] == [f"'{value}'" for value in STRANGE]
    assert [str(one.path.relative_to(sweep.path)) for one in sweep.trials] == [
        f"ünï={number} x/{'n' * 255}/介绍" for number in range(5)
    ]
    assert sweep.statuses == ["finished"] * 5 and all((one.path / "model.pt").exists() for one in sweep.trials)
    assert [run.data.params["model.mark"] for run in runs] == [*STRANGE]
    names = [run.info.run_name or "" for run in runs]
    assert names[:4] == [f"mark='{value}'" for value in STRANGE[:4]]
    assert names[4].startswith("mark='long") and len(names[4]) == 250, "the longest that stores of MLflow take"


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


@pytest.mark.parametrize("search", ["grid", "random"])
def test_a_sweep_whose_default_folder_is_taken_is_planned_once(
    parser: OverridesParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str
):
    monkeypatch.chdir(tmp_path)  # which remembers the last sweep
    (tmp_path / "now").mkdir()
    (tmp_path / "now" / "results.csv").touch()
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("config", ["hydra.job.name=x"], RunMode.MULTIRUN)
    config.hydra.sweep.dir = str(tmp_path / "now")
    context = HydraContext(config_loader=loader, callbacks=Callbacks())
    words = ["sharding=root", "optimizer.lr=0.1,0.2", "engine=inline", "cluster.num_workers=1", f"search={search}"]
    command = Multirun(context, config, {}, words)
    plans, begun = iter([command.sweep()]), []
    monkeypatch.setattr(command, "sweep", lambda: next(plans))
    monkeypatch.setattr("fsdp_lab.sweep.start.start_sweep", begun.append)
    run(command)
    (sweep,), there = begun, tmp_path / "now-2"
    later = [] if sweep.search is None else [sweep.search.next()]
    folders = [trial.folder for trial in (*(state.trial for state in sweep.trials), *later)]
    assert (sweep.folder, folders) == (there, [there / "0", there / "1"])
    assert [one.path for one in SweepFolder(there).trials] == folders[: len(sweep.trials)]
    assert yaml.safe_load((there / "multirun.yaml").read_text())["hydra"]["sweep"]["dir"] == str(there)


def test_a_folder_that_was_typed_is_free_or_refused(tmp_path: Path):
    typed = hydra(f"{KEY}={tmp_path}")
    with new_folder(tmp_path, KEY, typed) as folder:
        assert folder == tmp_path
        with pytest.raises(InUse, match="in use by another sweep or run"), new_folder(tmp_path, KEY, typed):
            pass
    (tmp_path / "sweep.json").touch()
    with new_folder(tmp_path, KEY, typed):
        pass  # its start was refused: MLflow was away
    reported = rf"{KEY}={tmp_path} holds results, .*python -m fsdp_lab resume={tmp_path}\. .*: {KEY}=\.\.\."
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
        (["lr=1e-3", "lr=1E-3"], "trials 0 and 1 the same folder"),
        (["0", "link/0"], "trials 0 and 1 the same folder"),
        (["."], "not one of its own"),
        (["0", "../0"], "trial 1 the folder .*, which is not one of its own"),
        (["away/0"], "not one of its own"),
        (["results.csv/0"], "not one of its own"),
        (["a/b", "c", "a"], "trial 0 a folder inside that of trial 2"),
        (["0", "a/" + "n" * 256], "trial 1 a name of more than 255 bytes"),
        (["é" * 128], "trial 0 a name of more than 255 bytes"),
        (["/".join(["n" * 250] * 16)], "trial 0 a path of more than 3896 bytes"),
    ],
)
def test_trials_that_share_or_leave_the_folder_are_refused(tmp_path: Path, names: list[str], reason: str):
    for name, target in (("link", "."), ("away", "..")):
        (tmp_path / name).symlink_to(target)
    check_trial_folders(tmp_path, [tmp_path / name for name in ("0", "00", "a/0", "a/1", "n" * 255)])
    with pytest.raises(ConfigError, match=f"hydra.sweep.subdir gives .*{reason}.*hydra.job.num"):
        check_trial_folders(tmp_path, [tmp_path / name for name in names])


def written_once(folder: Path) -> dict[Path, bytes]:
    """The content of each file that a sweep writes at its start."""
    names = ("sweep.json", "trials.jsonl", "multirun.yaml", "config.yaml", "hydra.yaml", "overrides.yaml")
    return {path: path.read_bytes() for name in names for path in folder.rglob(name)}


@pytest.mark.ci
@pytest.mark.parametrize("multirun", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_second_start_changes_nothing_of_the_first(tmp_path: Path, multirun: bool):
    """While the first runs, and after it was killed."""
    flag = ("-m",) if multirun else ()
    trial = tmp_path / "out" / ("0" if multirun else "")
    other = (*flag, *INLINE, "optimizer.lr=0.5", "training.epochs=1")
    settings = ("training.epochs=3000", "data.num_train=960", "checkpoint.every_epochs=5")
    with started(tmp_path, *flag, *INLINE, *settings) as process:
        wait_for(lambda: has_trained_an_epoch(trial), process)
        before = written_once(tmp_path / "out")
        assert len(before) >= 5
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
