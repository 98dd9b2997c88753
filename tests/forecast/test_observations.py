"""What is kept of finished trials."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.forecast.devices import data_sheet, refined
from fsdp_lab.forecast.observations import observations_file, read_observations, record_observation
from fsdp_lab.forecast.run import Request, forecast_one
from fsdp_lab.forecast.speed.device import Basis, Factors, digest
from fsdp_lab.forecast.speed.predict import Parts
from fsdp_lab.forecast.speed.refine import Observation
from fsdp_lab.sweep.forecasts import Forecasts, ran_there, reliable_step_s
from tests.ranks import config
from tests.speed.test_costs import ROUND
from tests.speed.test_refine import observations
from tests.sweep.planted import CPU as TWO_CORES

CPU = "A CPU, 2 cores"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_they_are_kept_by_device_version_and_the_figures_that_predicted_them():
    one, two, three = observations(3, Factors())
    for name, each in (("a/0", one), ("a/1", two), ("a/1", three)):
        record_observation(CPU, name, each)
    assert read_observations(CPU, "2.15.0", "d") == [one, three]
    assert read_observations(CPU, "2.11.0", "d") == []
    assert read_observations(CPU, "2.15.0", "of other figures") == []
    assert read_observations("another", "2.15.0", "d") == []


@pytest.mark.parametrize(
    "content",
    [
        '{"a": 1}', '{"a": {"measured_s": 1}}', '{"a": {"parts": null}}',
        json.dumps({"a": asdict(observations(1, Factors())[0]) | {"measured_s": float("inf")}}),
        json.dumps({"a": asdict(observations(1, Factors())[0]) | {"measured_s": "fast"}}),
    ],
)  # fmt: skip
def test_what_another_version_wrote_counts_as_absent(content: str):
    file = observations_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert read_observations(CPU, "2.15.0", "d") == []


@pytest.mark.parametrize("content", ["[", "[]", ""])
def test_a_file_that_cannot_be_read_is_named(content: str):
    file = observations_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(UserError, match=f"{file} cannot be read .*; remove it: the next trial writes a new one"):
        read_observations(CPU, "2.15.0", "d")


def test_the_oldest_leave():
    many = observations(510, Factors())
    file = observations_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({str(number): asdict(one) for number, one in enumerate(many[:-1])}))
    record_observation(CPU, "last", many[-1])
    assert read_observations(CPU, "2.15.0", "d") == many[10:]


def predicted_for_two_cores(folder: Path, *words: str) -> Request:
    (folder / "cpu.yaml").write_text(TWO_CORES)
    settings = config(f"forecast.device={folder}/cpu.yaml", "model=mlp", "precision=fp32", *words)
    return Request(settings, 2, False, None, sheet=data_sheet(settings))


def test_finished_trials_correct_forecasts_by_the_figures_that_predicted_them(tmp_path: Path):
    asked = predicted_for_two_cores(tmp_path)
    sheet = asked.sheet
    assert sheet is not None
    for n in range(1, 6):
        parts = Parts(0.1 * n, 0.05 * n, 0.0, 0.0)
        twice = 2 * (parts.compute + parts.communication)
        record_observation(sheet.name, str(n), Observation(str(n), parts, twice, version("torch"), digest(sheet)))
    corrected = Request.of(asked.config, 2).sheet
    assert corrected is not None and corrected.basis is Basis.trials
    assert corrected.factors.compute > 1.5 and corrected.factors.settings == 5
    assert data_sheet(asked.config) == sheet, "a sweep is predicted by the file alone"
    other = replace(sheet, launch_s=1.0)
    assert refined(other) == other, "other figures start afresh"


def test_what_ran_elsewhere_or_is_not_predicted_as_it_runs_teaches_nothing(tmp_path: Path):
    assert ran_there(predicted_for_two_cores(tmp_path), "cpu")
    assert not ran_there(predicted_for_two_cores(tmp_path, "cluster.address=10.0.0.1:6379"), "cpu")
    assert not ran_there(predicted_for_two_cores(tmp_path, "cluster.cpus_per_worker=2"), "cpu")
    sheet = replace(ROUND, name="NVIDIA H100 80GB HBM3")
    gpu = replace(predicted_for_two_cores(tmp_path), cuda=True, sheet=sheet)
    assert ran_there(gpu, sheet.name) and not ran_there(gpu, "NVIDIA H200") and not ran_there(gpu, "")


def test_waiting_is_no_part_of_a_step_and_steps_during_other_work_are_none():
    metrics = {"perf/samples_per_s": 100.0, "perf/data_wait_share": 0.1}
    assert reliable_step_s(metrics, 50, cuda=False) == pytest.approx(0.45)
    assert reliable_step_s(metrics, 50, cuda=True) is None
    assert reliable_step_s({**metrics, "perf/others_cpu": 0.2}, 50, cuda=False) is None
    assert reliable_step_s({}, 50, cuda=False) is None


@pytest.mark.parametrize(("others", "kept"), [(0.05, 1), (0.2, 0)])
def test_a_trial_that_ends_is_kept_beside_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: float, kept: int
):
    """A hand-made state: Ray's part is in tests/sweep/test_forecasts.py, where other tests use the cores."""
    asked = predicted_for_two_cores(tmp_path, "training.global_batch_size=32")
    forecast = forecast_one(asked)
    metrics = {"perf/samples_per_s": 320.0, "perf/data_wait_share": 0.5, "perf/others_cpu": others}
    state = SimpleNamespace(
        trial=SimpleNamespace(config=asked.config), forecast=forecast, figures=metrics, status=TrialStatus.finished,
        device="cpu",
    )  # fmt: skip
    sweep = SimpleNamespace(trials=[], config=asked.config, folder=tmp_path / "sweep", log=print, log_once=print)
    monkeypatch.setattr("fsdp_lab.sweep.forecasts.resources.num_gpus", lambda: 0)
    forecasts = Forecasts(sweep)  # type: ignore[arg-type]
    sweep.trials.append(state)
    for _ in range(2):  # a resume may publish it again
        forecasts.ended(0)
    assert asked.sheet is not None
    observations = read_observations(asked.sheet.name, version("torch"), digest(asked.sheet))
    assert [one.measured_s for one in observations] == pytest.approx([32 / 320 * 0.5] * kept)
    assert not observations or observations[0].parts == forecast.speed.parts  # type: ignore[union-attr]
