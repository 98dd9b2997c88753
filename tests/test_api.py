"""The Python API: cheap to import, with the overrides and the refusals of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import initialize
from hydra.core.global_hydra import GlobalHydra

from fsdp_lab import api
from fsdp_lab.report.answer import Answer
from tests.conftest import INLINE, PLAIN, without
from tests.forecast.command import answered_here
from tests.report.sweeps import sweep
from tests.servers import lay_store
from tests.workloads.user.project import FAILS, importable, write_project


def test_the_import_is_cheap():
    """Neither the package nor the API imports what takes seconds, or anything that is not Python's own."""
    script = (
        "import sys, fsdp_lab.api; print(*{n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=300, check=True,
                          cwd=Path(api.__file__).parent.parent)  # fmt: skip
    assert set(done.stdout.split()) <= {"fsdp_lab", "__main__"}


def test_a_refusal_is_raised_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(api.UserError, match=r"^sharding=foo is not an option"):
        api.sweep("sharding=foo", quiet=True)
    with pytest.raises(api.UserError, match="sweep=last: no sweep was started"):
        api.report()
    with pytest.raises(api.UserError, match="dry_run=true runs no trial"):
        api.sweep({"sharding": "root", "dry_run": True}, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_reaches_the_command_that_prints_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A module in its place that says by a file that it was interrupted."""
    (tmp_path / "waits.py").write_text(
        "import pathlib, time, os, signal\n"
        "try:\n    os.kill(os.getppid(), signal.SIGINT)\n"  # as a notebook interrupts its kernel alone
        "    time.sleep(60)\nexcept KeyboardInterrupt:\n"
        "    print('resume ' * 20_000)\n    pathlib.Path('ended').touch()\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        api._run("waits", [], quiet=False)
    assert (tmp_path / "ended").exists() and capsys.readouterr().out == "resume " * 20_000 + "\n"


def test_a_command_that_crashes_returns_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "crashes.py").write_text(
        "from fsdp_lab.commands.main import leave\n"
        "try:\n    raise KeyError('a bug')\nexcept KeyError as error:\n    leave(error)"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)^crashes ended with 70:\nTraceback.*KeyError: 'a bug'$"):
        api._run("crashes", [], quiet=True)


def test_a_sweep_has_its_answer_and_its_chart():
    result = api.SweepResult(**vars(sweep()))
    assert "sharding=root precision=bf16" in result.recommendation.sentence and len(result.plot().data) > 0
    assert repr(result).startswith("Recommended: sharding=root precision=bf16") and "Compared with it" in repr(result)
    assert set(result.frame()["sharding"]) == {"ddp", "root", "per_block"}


def test_forecasts_that_all_fail_are_an_error_with_the_reasons(tmp_path: Path):
    write_project(tmp_path)
    failing = (FAILS, "sharding=root,per_block", PLAIN[1:], "cluster.num_workers=1")
    with importable(tmp_path), answered_here(), pytest.raises(api.UserError, match=r"^RuntimeError: boom$"):
        api.forecast(failing, quiet=True)


GPUS = {"model": "mlp", "sharding": ["ddp", "root"], "precision": "bf16_mixed", "offload": "none"}
GPUS |= {"reshard_after_forward": "always", "cluster.num_workers": 8, "forecast.device": "h100_sxm"}


def test_forecasts_are_a_typed_frame_with_an_answer_and_a_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The frame is that of forecast.csv; the answer is the one that the command prints, which this prints too.

    It is asked for in a notebook that has initialised Hydra.
    """
    monkeypatch.chdir(tmp_path)
    with answered_here(), initialize(version_base="1.3"):
        result = api.forecast(GPUS)
        assert GlobalHydra.instance().is_initialized()
    frame, answer = result.frame(), result.recommendation
    assert {*frame["sharding"]} == {"ddp", "root"} and frame["cluster.num_workers"].tolist() == [8, 8]
    types = ("needed_bytes", "Int64"), ("step_s", "float64"), ("mfu", "float64"), ("largest_microbatch", "Int64")
    assert [str(frame[name].dtype) for name, _ in types] == [kind for _, kind in types]
    text = (result.folder / "forecast.csv").read_text()
    assert text == frame.to_csv(index=False) and frame["no_forecast"].isna().all()
    assert isinstance(answer, Answer) and answer.setting and answer.setting.values["sharding"] == frame["sharding"][0]
    assert answer.sentence.replace("`", "") in " ".join(capsys.readouterr().out.split())
    assert len(answer.lines) == 1 and answer.notes
    points = [(point.x[0], point.y[0]) for point in result.plot().data]
    speeds = frame["tokens_per_s_per_device"].fillna(frame["samples_per_s_per_device"])
    assert sorted(points) == sorted(zip(frame["needed_bytes"] / 2**30, speeds, strict=True))


def test_an_interrupted_forecast_leaves_what_was_made(tmp_path: Path):
    with answered_here(interrupt_after=1), pytest.raises(KeyboardInterrupt):
        api.forecast(GPUS, folder=tmp_path, quiet=True)
    assert len((tmp_path / "forecast.csv").read_text().splitlines()) == 2


# As a script without a guard, and as a notebook: neither is run again by the processes that forecast.
SCRIPT = """
import os, signal, threading, time
import psutil
from hydra.core.global_hydra import GlobalHydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from fsdp_lab.api import forecast

def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return (handlers, dict(os.environ), os.getcwd(), GlobalHydra.instance().is_initialized(),
            {**ConfigStore.instance().repo}, OmegaConf.has_resolver("per_worker"), psutil.Process().children())

def interrupt():
    while not psutil.Process().children():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

before, words = state(), ["model=mlp", "sharding=root,ddp", "precision=fp32", "offload=none", "cluster.num_workers=2"]
print(len(forecast(words, "reshard_after_forward=always", quiet=True).frame()), state() == before)
threading.Thread(target=interrupt).start()
try:
    forecast(words, quiet=True)
except KeyboardInterrupt:
    print("interrupted", state() == before)
"""


@pytest.mark.ci
def test_a_forecast_leaves_nothing_behind_in_its_process(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.stdout.splitlines() == ["2 True", "interrupted True"], done.stdout + done.stderr


def test_a_sweep_is_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    lay_store(tmp_path)
    once = without(INLINE, "sharding=", "hydra.")
    result = api.sweep({"sharding": "per_block"}, [*once, "training.epochs=1"], "optimizer.lr=1e-3,1e-2", quiet=True)
    frame = result.frame()
    assert result.axes == ["optimizer.lr"]
    assert [*frame["status"]] == ["finished"] * 2 and [*frame["optimizer.lr"]] == [0.001, 0.01]
    assert frame["val/loss"].tolist() == [trial.figures["val/loss"] for trial in result.trials]
    assert result.recommendation.sentence
    assert api.report().trials == result.trials
