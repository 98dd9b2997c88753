"""What is kept of finished trials."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdp_lab.forecast.observations import observations_file, read_observations, record_observation
from fsdp_lab.speed.device import Factors
from tests.speed.test_refine import observations

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
    assert read_observations(CPU, "2.15.0", "of another calibration") == []
    assert read_observations("another", "2.15.0", "d") == []


@pytest.mark.parametrize(
    "content",
    [
        "[", "[]", '{"a": 1}', '{"a": {"measured_s": 1}}', '{"a": {"parts": null}}',
        json.dumps({"a": asdict(observations(1, Factors())[0]) | {"measured_s": float("inf")}}),
        json.dumps({"a": asdict(observations(1, Factors())[0]) | {"measured_s": "fast"}}),
    ],
)  # fmt: skip
def test_what_cannot_be_read_counts_as_absent(content: str):
    file = observations_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert read_observations(CPU, "2.15.0", "d") == []


@pytest.mark.parametrize("content", ["[", "[]", ""])
def test_a_damaged_file_is_reported_with_what_to_do_and_written_anew(
    content: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fsdp_lab.files._reported", set())  # each file is told once in a process
    file = observations_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert read_observations(CPU, "2.15.0", "d") == []
    output = capsys.readouterr().err
    assert output.count(file.name) == 1 and output.endswith(
        "); it is ignored: finished trials do not correct predictions; delete it, the next trial writes a new one\n"
    )
    (one,) = observations(1, Factors())
    record_observation(CPU, "a/0", one)
    assert read_observations(CPU, "2.15.0", "d") == [one]


def test_a_folder_in_its_place_counts_as_absent():
    observations_file(CPU).mkdir(parents=True)
    assert read_observations(CPU, "2.15.0", "d") == []


def test_the_oldest_leave():
    many = observations(510, Factors())
    file = observations_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({str(number): asdict(one) for number, one in enumerate(many[:-1])}))
    record_observation(CPU, "last", many[-1])
    assert read_observations(CPU, "2.15.0", "d") == many[10:]
