"""The Python API: cheap to import, with the words and the refusals of the command line. The notebook runs the rest."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab import api
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.table import Row, write_csv
from fsdp_lab.reference import attributes_of


def test_the_import_is_cheap():
    """Neither the package nor the API imports what takes seconds, or anything that is not Python's own."""
    script = (
        "import sys, fsdp_lab.api; print(*{n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=300, check=True,
                          cwd=Path(api.__file__).parent.parent)  # fmt: skip
    assert set(done.stdout.split()) <= {"fsdp_lab", "__main__"}


def test_results_are_frozen_and_documented():
    for name in api.__all__:
        one = getattr(api, name)
        assert one.__doc__
        if name.endswith("Result"):
            assert one.__dataclass_params__.frozen
            assert attributes_of(one).count("\n| `") == len(dataclasses.fields(one))


def test_a_refusal_is_raised_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(api.UserError, match=r"^sharding=foo is not an option"):
        api.sweep("sharding=foo", quiet=True)
    with pytest.raises(api.UserError, match=r"^optimizer\.rate is not a key"):
        api.forecast("optimizer.rate=1", quiet=True)
    with pytest.raises(api.UserError, match="sweep=last: no sweep was started"):
        api.report()
    assert capsys.readouterr().out == ""


def test_an_interrupted_command_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module in its place that leaves as an interrupted sweep does."""
    (tmp_path / "stopped.py").write_text("print('resume with ...'); raise SystemExit(130)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        api._run("stopped", [], quiet=True)


def test_an_interrupt_reaches_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module in its place that says by a file that it was interrupted."""
    (tmp_path / "waits.py").write_text(
        "import pathlib, time, os, signal\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"  # as a notebook interrupts its kernel alone
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pathlib.Path('ended').touch()\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        api._run("waits", [], quiet=True)
    assert (tmp_path / "ended").exists()


def test_the_rows_of_a_forecast_are_typed(tmp_path: Path):
    peaks = {"device": {"param": 4, "grad": 2, "unsharded_grad": 1, "other": 5, "total": 12}}
    forecast = Forecast(True, 8, peaks, {"context": 3}, capacity_bytes=14)
    failed = Forecast(True, 8, error="it cannot run")
    write_csv(
        tmp_path / "forecast.csv", [Row(["ddp"], forecast, None, 1), Row(["root"], failed, None, 1)], ["sharding"]
    )
    with (tmp_path / "forecast.csv").open(newline="") as rows:
        fits, fails = map(api._forecast_of, csv.DictReader(rows))
    assert (fits.setting, fits.num_workers, fits.peak_bytes, fits.needed_bytes) == ({"sharding": "ddp"}, 8, 12, 15)
    assert (fits.parts["params"], fits.parts["grads"], fits.parts["rest"]) == (4, 3, 5)
    assert (fits.fits, fits.step_s, fits.bound, fits.error) == ("false", None, "", "")
    assert (fails.peak_bytes, fails.needed_bytes, fails.error) == (None, None, "it cannot run")
