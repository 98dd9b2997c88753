"""The Python API: cheap to import, with the overrides and the refusals of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab import api
from fsdp_lab.report.result import SweepResult
from tests import forked
from tests.report.sweeps import sweep
from tests.servers import lay_store


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
    with pytest.raises(api.UserError, match=r"^optimizer\.rate is not a key"):
        api.forecast({"optimizer.rate": 1}, quiet=True)
    with pytest.raises(api.UserError, match="sweep=last: no sweep was started"):
        api.report()
    with pytest.raises(api.UserError, match="3 is no override"):
        api.sweep(3)
    assert capsys.readouterr() == ("", "")


def test_an_interrupted_command_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module in its place that leaves as an interrupted sweep does."""
    (tmp_path / "stopped.py").write_text("print('resume with ...'); raise SystemExit(130)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        api._run("stopped", [], quiet=True)


def test_an_interrupt_reaches_the_command_and_its_last_words_are_printed(
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("sharding=root", ["sharding=root"]),
        (["a=1", ["b=2"]], ["a=1", "b=2"]),
        ({"a": 1, "b": [0.5, None], "c": True, "d": "x"}, ["a=1", "b=0.5,null", "c=true", "d=x"]),
    ],
)
def test_overrides_are_strings_lists_or_dictionaries(given: object, words: list[str]):
    assert api._words((given,)) == words


def test_a_sweep_has_its_answer_and_its_chart():
    result = SweepResult.of(sweep())
    assert "sharding=root precision=bf16" in result.recommendation.sentence and len(result.plot().data) > 0


def run_in_a_fork(module: str, words: list[str], quiet: bool) -> None:
    """Run a command as `api._run` does, whose own tests are above, without seconds of imports."""
    assert quiet
    done = forked.run(Path.cwd(), module, *words)
    assert done.returncode == 0, done.stderr


def test_a_sweep_is_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_run", run_in_a_fork)
    lay_store(tmp_path)
    fixed = {"precision": "fp32", "offload": "none", "reshard_after_forward": "always", "model": "mlp"}
    words = [
        "engine=inline",
        "cluster.num_workers=1",
        "training.epochs=1",
        "data.num_train=160",
        "training.global_batch_size=16",
    ]
    store = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    result = api.sweep("sharding=per_block", fixed, [*words, store], {"optimizer.lr": [1e-3, 1e-2]}, quiet=True)
    frame = result.frame()
    assert result.axes == ["optimizer.lr"]
    assert [*frame["status"]] == ["finished"] * 2 and [*frame["optimizer.lr"]] == ["0.001", "0.01"]
    assert frame["val/loss"].tolist() == [trial.figures["val/loss"] for trial in result.trials]
    assert result.recommendation.sentence
    assert api.report().trials == result.trials
    (row,) = api.forecast(fixed, {"sharding": "per_block"}, quiet=True).to_dict("records")
    assert row["peak_bytes"] > 0 and row["no_forecast"] != row["no_forecast"], "a missing value"
