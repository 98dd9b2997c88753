"""`python -m fsdp_lab.calibrate`: its words, and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_lab.calibrate.__main__ import Options, main, rates, read_options, write_device
from fsdp_lab.calibrate.sure import better_before, how_sure
from fsdp_lab.config import ConfigError
from fsdp_lab.config.conf import slug
from fsdp_lab.forecast.devices import check_here, data_sheet, data_sheet_here, device_notes, refined
from fsdp_lab.forecast.observations import read_observations, record_observation
from fsdp_lab.forecast.run import Request, forecast_one
from fsdp_lab.hardware import cpu_name, num_cpus
from fsdp_lab.speed.device import Basis, KnownError
from fsdp_lab.speed.fitted import digest
from fsdp_lab.speed.measured import Measured
from fsdp_lab.speed.predict import Parts
from fsdp_lab.speed.refine import Observation
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.listeners.forecasts import Forecasts, ran_there, reliable_step_s
from tests.ranks import config
from tests.speed.test_costs import ROUND
from tests.speed.test_measured import HERE, HOST, LINES, MEASURED


def test_the_defaults_are_two_workers_on_a_cpu_for_two_minutes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.calibrate.__main__.num_gpus", lambda: 0)
    assert read_options(["device=auto"]) == Options(min(2, num_cpus()), 120.0, None)
    assert read_options(["workers=1", "limit_s=30", "name=mine"]) == Options(1, 30.0, "mine")
    monkeypatch.setattr("fsdp_lab.calibrate.__main__.num_gpus", lambda: 8)
    assert read_options(["device=cpu"]) == Options(min(2, num_cpus()), 120.0, None)


@pytest.mark.parametrize("words", [["limit_s=30"], ["device=auto"], ["device=cuda"], ["workers=8", "device=cuda"]])
def test_gpus_are_refused_for_their_size_and_a_data_sheet_is_named(words: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.calibrate.__main__.num_gpus", lambda: 8)
    with pytest.raises(ConfigError) as raised:
        read_options(words)
    kind = "cuda" if "device=cuda" in words else "auto"
    assert str(raised.value).startswith(f"device={kind}: this machine has GPUs, and the steps that a calibration")
    assert "use forecast.device=<" in str(raised.value) and "h100_sxm" in str(raised.value)
    assert str(raised.value).endswith("or device=cpu to calibrate the CPU.")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("device=gpu", "device=gpu is not an option. Choose one of: auto, cpu, cuda."),
        ("device=cuda", "device=cuda: this machine has no GPU; use device=cpu, or device=auto."),
        ("workers=two", "workers=two is not a whole number above 0"),
        ("workers=9999", "workers=9999 is more than the "),
        ("limit_s=0", "limit_s=0 is not a whole number above 0"),
        ("name=a/b", "name=a/b becomes the name of a file"),
        ("name=h100_sxm", "name=h100_sxm has another meaning in forecast.device"),
        ("name=cpu", "name=cpu has another meaning"),
        ("hours=2", "hours is not a key. The keys are: workers, device, limit_s, name."),
    ],
)
def test_a_wrong_word_says_what_is_right(word: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.calibrate.__main__.num_gpus", lambda: 0)
    with pytest.raises(ConfigError) as raised:
        read_options([word])
    assert message in str(raised.value)


def calibrated(
    folder: Path, name: str = "", torch: str = "", workers: int = 2, file: str = "here", others: float = 0.0
) -> None:
    name = name or cpu_name()
    device = replace(
        HERE, name=name, measured=Measured(name, torch or version("torch"), workers, 2, others, LINES, HOST)
    )
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
    assert device_notes(config("forecast.device=here"), 2) == [torch, workers], "asked for by its name"
    assert f"calibrated on another, 64 cores, and this is {cpu_name()}: expect larger errors" in machine
    assert "with PyTorch 2.11.0, and this is 2." in torch
    assert "with 8 workers, and this is for 2" in workers
    assert machine.endswith("python -m fsdp_lab.calibrate measures this machine.")


def test_a_calibration_that_others_slowed_down_is_used_with_a_note(here: Path):
    calibrated(here, others=0.66)
    (note,) = device_notes(config(), 2)
    assert "The device was calibrated while other processes used 66% of the cores: expect larger errors" in note


def test_workers_that_share_a_core_have_no_speed(here: Path):
    calibrated(here)
    few, many = (
        forecast_one(Request(config("model=mlp", "precision=fp32"), workers, False, None, sheet=data_sheet(config())))
        for workers in (2, 4)
    )
    assert few.speed is not None and few.speed.basis is Basis.calibration
    assert many.speed is None and many.no_speed is not None
    assert "cluster.num_workers=4 on the 2 cores of " in many.no_speed


def test_a_forecast_is_corrected_by_trials_that_finished(here: Path):
    calibrated(here)
    sheet = data_sheet(config())
    assert sheet is not None and sheet.measured is not None
    slow = Observation("a", Parts(0.1, 0.05, 0.0, 0.0), 0.3, sheet.measured.torch, digest(sheet))
    record_observation(sheet.name, "a", slow)
    corrected = Request.of(config(), 2).sheet
    assert corrected is not None and corrected.basis is Basis.trials


def test_a_damaged_calibration_counts_as_absent(here: Path, capsys: pytest.CaptureFixture[str]):
    calibrated(here)
    (here / "outputs/devices/here.yaml").write_text("name: [")
    (here / "outputs/devices/gone.yaml").symlink_to("nowhere")
    assert data_sheet(config()) is None
    (output,) = capsys.readouterr().err.splitlines()
    assert output.endswith(
        "); it is ignored, and no speed is predicted; delete it, or run python -m fsdp_lab.calibrate again"
    )
    assert output.count("here.yaml") == 1 and "here.yaml is damaged (cannot be read as YAML: while parsing" in output
    calibrated(here, file="second")
    (here / "outputs/devices/third.yaml").write_text((here / "outputs/devices/second.yaml").read_text() + "\nhost: 1")
    assert data_sheet(config()) is not None
    (line,) = capsys.readouterr().err.splitlines()
    assert "it is ignored, and another calibration of " in line and " is used; delete it, or run " in line


def test_of_several_calibrations_that_with_this_pytorch_counts(here: Path):
    calibrated(here, file="right")
    calibrated(here, torch="2.11.0", file="newer")
    sheet = data_sheet(config())
    assert sheet is not None and sheet.measured is not None and sheet.measured.torch == version("torch")


def test_trials_on_a_cluster_elsewhere_are_not_predicted_by_the_drivers_cpu(here: Path):
    calibrated(here)
    assert data_sheet_here(config(), cuda=False) is not None
    assert data_sheet_here(config("cluster.address=10.0.0.1:6379"), cuda=False) is None
    with pytest.raises(ConfigError, match=r"forecast\.keep=2 needs predicted speeds"):
        check_here(config("cluster.address=10.0.0.1:6379", "forecast.keep='2'"), 2, cuda=False)


def test_what_ran_elsewhere_or_is_not_predicted_as_it_runs_teaches_nothing(here: Path):
    calibrated(here)

    def request(*words: str) -> Request:
        return Request(config(*words), 2, False, None, sheet=data_sheet(config()))

    assert ran_there(request(), "cpu")
    assert not ran_there(request("cluster.address=10.0.0.1:6379"), "cpu")
    assert not ran_there(request("cluster.cpus_per_worker=2"), "cpu")
    another = replace(HERE, measured=replace(MEASURED, machine="another"))
    assert not ran_there(replace(request(), sheet=another), "cpu")
    gpu = replace(request(), cuda=True, sheet=replace(ROUND, name="NVIDIA H100 80GB HBM3"))
    assert ran_there(gpu, "NVIDIA H100 80GB HBM3") and not ran_there(gpu, "NVIDIA H200") and not ran_there(gpu, None)


def test_waiting_is_no_part_of_a_step_and_steps_during_other_work_are_none():
    metrics = {"perf/samples_per_s": 100.0, "perf/data_wait_share": 0.1}
    assert reliable_step_s(metrics, 50, cuda=False) == pytest.approx(0.45)
    assert reliable_step_s(metrics, 50, cuda=True) is None
    assert reliable_step_s({**metrics, "perf/others_cpu": 0.2}, 50, cuda=False) is None
    assert reliable_step_s({}, 50, cuda=False) is None


def test_finished_trials_correct_forecasts_by_the_calibration_that_predicted_them(here: Path):
    calibrated(here)
    sheet = data_sheet(config())
    assert sheet is not None and sheet.measured is not None
    for n in range(1, 6):
        parts = Parts(0.1 * n, 0.05 * n, 0.0, 0.0)
        slow = Observation(
            str(n), parts, 2 * (parts.compute + parts.communication), sheet.measured.torch, digest(sheet)
        )
        record_observation(sheet.name, str(n), slow)
    corrected = refined(sheet)
    assert corrected is not None and corrected.basis is Basis.trials
    assert corrected.factors.compute > 1.5 and corrected.factors.settings == 5
    assert data_sheet(config()) == sheet, "a sweep is predicted by the file alone"
    again = replace(sheet, measured=replace(sheet.measured, host=replace(HOST, step_s=1.0)))
    assert refined(again) == again, "another calibration starts afresh"


def test_the_summary_has_rates_and_says_how_sure_predictions_are():
    message = "\n".join([*rates(HERE), *how_sure(replace(HERE, relative=KnownError(0.05, 0.25)))])
    assert "GFLOP/s per worker: bfloat16 100,000, float32 10,000" in message
    assert "gathers 100 GB/s" in message
    assert "that were not measured: nine of ten within ±20% (median 10%)" in message
    assert "skips settings predicted to be slower than 80% of the last that it asks for" in message
    assert "other processes used 0% of the cores" in message and "warning" not in message


@pytest.mark.parametrize(
    ("others", "ratio", "warns"),
    [
        (0.4, 0.1, "because of that its predictions may be too slow"),
        (0.0, 0.84, "forecast.keep skips almost nothing"),
        (0.0, None, "forecast.keep skips almost nothing"),
    ],
)
def test_a_calibration_that_shows_little_says_so_and_what_to_do(others: float, ratio: float | None, warns: str):
    relative = None if ratio is None else KnownError(ratio / 2, ratio)
    (*_, warning) = how_sure(replace(HERE, relative=relative, measured=replace(MEASURED, others=others)))
    assert warning.startswith("warning: ") and warns in warning
    assert warning.endswith("close other programs and run python -m fsdp_lab.calibrate again")


@pytest.mark.parametrize(
    ("error", "others", "kept"),
    [
        (0.2, 0.0, False),
        (0.24, 0.0, False),  # of two quiet ones the newer counts
        (0.59, 0.0, True),
        (0.1, 0.4, True),  # its own errors do not show that all of it is too slow
    ],
)
def test_a_better_calibration_from_before_is_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: float, others: float,
    kept: bool,
):  # fmt: skip
    """The measuring itself is left out: what it finds is made by hand."""
    calibrated(here, file=slug(cpu_name()))
    (file,) = (here / "outputs/devices").glob("*.yaml")
    before = file.read_text()
    measured = Measured(cpu_name(), version("torch"), 2, 2, others, LINES, HOST)
    now = replace(HERE, name=cpu_name(), error=KnownError(0.05, error), measured=measured, link_bandwidth=1.25e9)
    monkeypatch.setattr("fsdp_lab.calibrate.__main__.calibrate", lambda *_: now)
    for words, stays in (["workers=2"], kept), (["workers=2", "name=mine"], True):
        monkeypatch.setattr("sys.argv", ["fsdp_lab.calibrate", *words])
        assert main() == 0
        assert (file.read_text() == before) is stays
        output = capsys.readouterr().out
        assert ("not written: the earlier calibration is better. Its predictions are within ±20%" in output) is (
            kept and words == ["workers=2"]
        )
        before = file.read_text()
    assert (here / "outputs/devices/mine.yaml").is_file(), "asked for by its name"


@pytest.mark.parametrize(
    ("then", "now", "kept"),
    [
        ((0.8, 0.0), (0.15, 0.4), False),  # quiet, with clearly larger errors
        ((0.8, 0.49), (0.15, 0.5), False),
        ((0.2, 0.49), (0.19, 0.5), False),  # of two beside others the newer counts
        ((0.2, 0.49), (0.59, 0.5), True),
        ((0.2, 0.1), (0.19, 0.11), True),
    ],
)
def test_a_quiet_calibration_is_better_unless_its_errors_are_clearly_larger(
    monkeypatch: pytest.MonkeyPatch, then: tuple[float, float], now: tuple[float, float], kept: bool
):
    before, after = (
        replace(HERE, error=KnownError(0.05, error), measured=replace(MEASURED, others=others))
        for error, others in (then, now)
    )
    monkeypatch.setattr("fsdp_lab.calibrate.sure.calibrated", lambda *_: before)
    assert (better_before(after) is before) is kept


@pytest.mark.parametrize("differs", [{"torch": "2.11.0"}, {"workers": 1}, {"machine": "another"}, {"cores": 64}])
def test_a_calibration_of_something_else_is_not_better(here: Path, differs: dict[str, Any]):
    now = replace(HERE, name=cpu_name(), error=KnownError(0.4, 0.8), measured=replace(MEASURED, machine=cpu_name()))
    assert now.measured is not None
    now = replace(now, measured=replace(now.measured, torch=version("torch"), workers=2))
    calibrated(here)
    assert better_before(now) is not None and now.measured is not None
    assert better_before(replace(now, measured=replace(now.measured, **differs))) is None


@pytest.mark.parametrize(("others", "kept"), [(0.05, 1), (0.2, 0)])
def test_a_trial_that_ends_is_kept_beside_its_prediction(
    here: Path, monkeypatch: pytest.MonkeyPatch, others: float, kept: int
):
    """A hand-made state: Ray's part is in tests/sweep/test_forecasts.py, where other tests use the cores."""
    calibrated(here)
    settings = config("model=mlp", "precision=fp32", "training.global_batch_size=32")
    forecast = forecast_one(Request(settings, 2, False, None, sheet=data_sheet(settings)))
    metrics = {"perf/samples_per_s": 320.0, "perf/data_wait_share": 0.5, "perf/others_cpu": others}
    state = SimpleNamespace(
        trial=SimpleNamespace(config=settings), forecast=forecast, metrics=metrics, status=TrialStatus.finished,
        device="cpu",
    )  # fmt: skip
    sweep = SimpleNamespace(states=[state], folder=here / "sweep", log=print, log_once=print)
    monkeypatch.setattr("fsdp_lab.sweep.listeners.forecasts.resources.num_gpus", lambda: 0)
    monkeypatch.setattr("fsdp_lab.sweep.listeners.forecasts.resources.resolve_num_workers", lambda cluster: 2)
    plan = SimpleNamespace(config=settings, state=SimpleNamespace(trials=[]))
    listener = Forecasts(plan)  # type: ignore[arg-type]
    for _ in range(2):  # a resume may publish it again
        listener.ended(sweep, 0)  # type: ignore[arg-type]
    sheet = data_sheet(settings)
    assert sheet is not None and sheet.measured is not None
    observations = read_observations(sheet.name, sheet.measured.torch, digest(sheet))
    assert [one.measured_s for one in observations] == pytest.approx([32 / 320 * 0.5] * kept)
    assert not observations or observations[0].parts == forecast.speed.parts  # type: ignore[union-attr]
