"""`python -m fsdp_lab.calibrate`: its words, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.calibrate.__main__ import Options, read_options, summary, write_device
from fsdp_lab.config import ConfigError
from fsdp_lab.forecast.devices import data_sheet, device_notes
from fsdp_lab.forecast.trials import record_trials
from fsdp_lab.hardware import cpu_name, num_cpus
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.measured import Measured
from fsdp_lab.speed.predict import Parts
from fsdp_lab.speed.refine import Trial
from tests.ranks import config
from tests.speed.test_measured import HERE, HOST, LINES


def test_the_defaults_are_two_workers_on_a_cpu_for_two_minutes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.calibrate.__main__.num_gpus", lambda: 0)
    assert read_options(["device=auto"]) == Options(min(2, num_cpus()), False, 120.0, None)
    assert read_options(["workers=1", "limit_s=30", "name=mine"]) == Options(1, False, 30.0, "mine")
    monkeypatch.setattr("fsdp_lab.calibrate.__main__.num_gpus", lambda: 8)
    assert read_options(["device=auto"]) == Options(8, True, 120.0, None)
    assert read_options(["device=cpu"]).cuda is False


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("device=gpu", "device=gpu is not an option. Choose one of: auto, cpu, cuda."),
        ("device=cuda", "device=cuda: this machine has no GPU; use device=cpu, or device=auto."),
        ("workers=two", "workers=two is no whole number above 0"),
        ("workers=9999", "workers=9999 is more than the "),
        ("limit_s=0", "limit_s=0 is no whole number above 0"),
        ("name=a/b", "name=a/b becomes the name of a file"),
        ("hours=2", "hours is not a key. The keys are: workers, device, limit_s, name."),
    ],
)
def test_a_wrong_word_says_what_is_right(word: str, told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.calibrate.__main__.num_gpus", lambda: 0)
    with pytest.raises(ConfigError) as raised:
        read_options([word])
    assert told in str(raised.value)


def calibrated(folder: Path, name: str = "", torch: str = "", workers: int = 2, file: str = "here") -> None:
    from dataclasses import replace
    from importlib.metadata import version

    name = name or cpu_name()
    device = replace(HERE, name=name, measured=Measured(name, torch or version("torch"), workers, LINES, HOST))
    write_device(folder / f"outputs/devices/{file}.yaml", device)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fsdp_lab.forecast.devices.gpus", lambda: [])
    return tmp_path


def test_forecasts_on_this_machine_use_its_calibration(here: Path):
    assert data_sheet(config()) is None
    calibrated(here, name="another", file="newer_than_nothing")
    calibrated(here)
    sheet = data_sheet(config())
    assert sheet is not None and sheet.name == cpu_name() and sheet.basis is Basis.calibration
    assert device_notes(config(), 2) == []
    assert data_sheet(config("forecast.device=cpu")) == sheet
    assert data_sheet(config("forecast.device=cuda")) is None
    named = data_sheet(config("forecast.device=newer_than_nothing"))
    assert named is not None and named.name == "another"


def test_a_calibration_of_another_machine_or_version_is_used_with_a_note(here: Path):
    calibrated(here, name="another, 64 cores", torch="2.11.0", workers=8)
    sheet = data_sheet(config())
    assert sheet is not None and sheet.name == "another, 64 cores"
    machine, torch, workers = device_notes(config(), 2)
    assert f"calibrated on another, 64 cores, and this is {cpu_name()}: expect larger errors" in machine
    assert "with PyTorch 2.11.0, and this is 2." in torch
    assert "with 8 workers, and this is for 2" in workers
    assert machine.endswith("python -m fsdp_lab.calibrate measures this machine.")


def test_a_damaged_calibration_counts_as_absent(here: Path, capsys: pytest.CaptureFixture[str]):
    calibrated(here)
    (here / "outputs/devices/here.yaml").write_text("name: [")
    assert data_sheet(config()) is None
    assert "here.yaml is damaged" in capsys.readouterr().err


def test_trials_on_this_machine_correct_its_calibration(here: Path):
    calibrated(here)
    from importlib.metadata import version

    parts = [Parts(0.1 * n, 0.05 * n, 0.0, 0.0) for n in range(1, 6)]
    slow = {str(n): Trial(p, 2 * (p.compute + p.communication), version("torch")) for n, p in enumerate(parts)}
    record_trials(cpu_name(), slow)
    sheet = data_sheet(config())
    assert sheet is not None and sheet.basis is Basis.trials
    assert sheet.factors.compute > 1.5 and sheet.factors.settings == 5


def test_the_summary_has_rates_errors_and_the_file(here: Path):
    told = summary(HERE, Path("outputs/devices/here.yaml"))
    assert "bfloat16 1e+05, float32 1e+04" in told.replace(",000", "e+03") or "bfloat16" in told
    assert "error for unseen models: median 10%, nine of ten 20%" in told
    assert told.endswith("written: outputs/devices/here.yaml")
