"""A real store in the test's folder, and what a driver wants MLflow to hold; read back with MLflow's own client."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities import Run

from fsdp_lab.config.axes.sharding import Granularity
from fsdp_lab.config.sweep import SweepConfig, TrackingConfig
from fsdp_lab.config.training import OptimizerConfig
from fsdp_lab.config.trial import ShardingConfig
from fsdp_lab.tracking import Projection, WantedRun
from fsdp_lab.tracking.tags import trial_tags
from tests.servers import lay_store
from tests.sweep.conftest import compose_trial as compose_trial
from tests.sweep.conftest import composed as composed
from tests.sweep.conftest import parser as parser

METRICS = {"step": 23, "train/loss": 1.5, "val/accuracy": 0.75, "memory/rank0/peak_bytes": 4096}
CHOICES = {"sharding": "root", "precision": "fp16", "offload": "none", "experiment": "null"}
CONFIG = SweepConfig(
    sharding=ShardingConfig(granularity=Granularity.root), optimizer=OptimizerConfig(lr=0.01), export=False
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingConfig:
    """A fresh store in the current folder, by its relative path; the migration that makes one takes seconds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    lay_store(tmp_path / "outputs")
    return TrackingConfig("sqlite:///outputs/mlflow.db", "lab")


def reader() -> mlflow.MlflowClient:
    """Of this test's store. MLflow keeps stores by URI: a relative one would be an older test's."""
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{Path.cwd()}/outputs/mlflow.db")


class Lab:
    """What a driver wants MLflow to hold, the projection that sends it, and what that reports."""

    def __init__(self, store: TrackingConfig) -> None:
        self.runs: dict[int | None, WantedRun] = {}
        self.problems: list[str] = []
        self.projection = Projection(store, "night", lambda number: self.runs[number], self.problems.append)

    def want(self, number: int | None, **fields: Any) -> None:
        first = WantedRun("root fp16", trial_tags(Path("trial"), ["sharding=root", "precision=fp16"]))
        self.runs[number] = dataclasses.replace(self.runs.get(number, first), **fields)
        self.projection.changed(number)

    def sent(self, number: int | None, **fields: Any) -> Run:
        """Want it, wait, and read the run."""
        self.want(number, **fields)
        assert self.projection.settle(60) == 0
        return reader().get_run(self.projection.run_id(number))

    def history(self, number: int | None, key: str) -> list[tuple[int, float]]:
        points = reader().get_metric_history(self.projection.run_id(number), key)
        return [(point.step, point.value) for point in points]


@contextmanager
def lab_of(store: TrackingConfig, resumed: bool = False) -> Iterator[Lab]:
    made = Lab(store)
    made.projection.open(resumed)
    try:
        yield made
    finally:
        made.projection.stop()


@pytest.fixture
def lab(store: TrackingConfig) -> Iterator[Lab]:
    with lab_of(store) as made:
        yield made
