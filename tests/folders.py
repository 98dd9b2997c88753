"""What a sweep left: the files in its folder, and its runs in an MLflow store.

Tests of commands read folders through this module only, and it uses nothing of fsdp_lab: when the layout of a folder
changes, this file changes, not the tests.
"""

from __future__ import annotations

import csv
import html
import json
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Run


@dataclass(frozen=True)
class TrialFolder:
    """A trial by its files.

    Attributes:
        path: the trial's folder within the sweep's.
        files: where its metrics and record are: `path`, or a folder below `cluster.storage_path` that is no address.
    """

    path: Path
    files: Path

    @property
    def epochs(self) -> list[dict[str, float]]:
        """Every whole line of `metrics.jsonl`, in order; a kill may have cut a line short."""
        path = self.files / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [content for line in lines if isinstance(content := _parsed(line), dict) and "epoch" in content]

    @property
    def losses(self) -> list[tuple[int, float, float]]:
        """`(epoch, train/loss, val/loss)` of each line of `metrics.jsonl`."""
        return [(int(epoch["epoch"]), epoch["train/loss"], epoch["val/loss"]) for epoch in self.epochs]

    @property
    def outcome(self) -> dict[str, Any] | None:
        """How it ended, with `status`; None: it has not ended, or its file is damaged."""
        return self._record.get("outcome")

    @property
    def facts(self) -> dict[str, Any]:
        """What training recorded of itself as it started: the device, `resumed_from`, notes."""
        return self._record.get("facts") or {}

    @property
    def forecast(self) -> dict[str, Any]:
        """Its forecast: figures, and words such as `predicted_by`; empty without one."""
        return {**self._record.get("forecast", {}), **self._record.get("forecast_words", {})}

    @property
    def addresses(self) -> list[str]:
        """That of each rank's node; empty: not known."""
        return [node["address"] for node in self._record.get("nodes", [])]

    @property
    def earlier_failures(self) -> list[list[dict[str, Any]]]:
        """Those of ranks in each attempt before the last one."""
        return list(self._record.get("earlier_failures", []))

    @property
    def _record(self) -> dict[str, Any]:
        return _object(self.files / "trial.json") or {}

    def change(self, **content: Any) -> None:
        """Write other content into its record, as nothing does; `outcome=None`: it was killed before its end."""
        (self.files / "trial.json").write_text(json.dumps(self._record | content))

    @property
    def config(self) -> dict[str, Any]:
        """Its whole configuration, as composed."""
        content: dict[str, Any] = yaml.safe_load((self.path / ".hydra" / "config.yaml").read_text())
        return content

    @property
    def checkpoints(self) -> list[Path]:
        """Its checkpoints, oldest first, including damaged ones."""
        return sorted((self.files / "checkpoints").glob("step_*.json"))


class SweepFolder:
    """A sweep, or a run of one trial, by the files in its folder, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of `results.csv`, one a trial."""
        with (self.path / "results.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    @property
    def statuses(self) -> list[str]:
        """The status of each trial, by `results.csv`."""
        return [row["status"] for row in self.rows]

    @property
    def record(self) -> dict[str, Any]:
        """The command line and the code that it was started with; empty: it has not started, or the file is damaged."""
        return _object(self.path / "sweep.json") or {}

    @property
    def trials(self) -> list[TrialFolder]:
        """Its trials, in order: those that are listed, or the folder itself for a run without `-m`."""
        path = self.path / "trials.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        listed = [content for line in lines if isinstance(content := _parsed(line), dict)]
        if not listed:
            return [TrialFolder(self.path, self.path)]
        folders = [self.path / content["folder"] for content in listed]
        return [
            TrialFolder(folder, folder if "://" in (storage := content.get("storage", "")) else Path(storage or folder))
            for folder, content in zip(folders, listed, strict=True)
        ]


class Store:
    """The MLflow store in a folder: `mlflow.db`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=f"sqlite:///{self._folder}/mlflow.db")

    @property
    def parents(self) -> list[Run]:
        """The runs of sweeps, and of trials that are no sweep's."""
        return [run for run in self._runs if "mlflow.parentRunId" not in run.data.tags]

    @property
    def trials(self) -> list[Run]:
        """The runs of the trials of sweeps, in the order of their folders."""
        children = [run for run in self._runs if "mlflow.parentRunId" in run.data.tags]
        return sorted(children, key=lambda run: run.data.tags["fsdp_lab.folder"])

    @property
    def _runs(self) -> list[Run]:
        return list(self.client.search_runs([e.experiment_id for e in self.client.search_experiments()]))

    def history(self, run: Run, key: str) -> list[tuple[int, float]]:
        """`(step, value)` of every point of a metric, in the order of the steps."""
        points = self.client.get_metric_history(run.info.run_id, key)
        return sorted((point.step, point.value) for point in points)

    def artifacts(self, run: Run, below: str | None = None) -> list[str]:
        """The paths of all files of a run."""
        collected = []
        for entry in self.client.list_artifacts(run.info.run_id, below):
            collected += self.artifacts(run, entry.path) if entry.is_dir else [entry.path]
        return sorted(collected)

    def points(self) -> dict[tuple[str, str, int], list[float]]:
        """Every value of the metrics of sweeps' trials, by trial, metric and epoch: one each, if none came twice."""
        points: dict[tuple[str, str, int], list[float]] = {}
        for trial, key, step, value in self._select(
            """select t.value, m.key, m.step, m.value from metrics m
            join tags t on t.run_uuid = m.run_uuid and t.key = 'fsdp_lab.trial'
            join tags p on p.run_uuid = m.run_uuid and p.key = 'mlflow.parentRunId'"""
        ):
            points.setdefault((trial, key, step), []).append(value)
        return points

    def ends(self) -> list[tuple[str, str]]:
        """`(trial, status)` of every run, sorted; the trial of a sweep's own run is ""."""
        ends = self._select(
            """select coalesce(t.value, ''), r.status from runs r
            left join tags t on t.run_uuid = r.run_uuid and t.key = 'fsdp_lab.trial'"""
        )
        return sorted((str(trial), str(status)) for trial, status in ends)

    def _select(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of the database itself: a client takes seconds to import and to open one."""
        with closing(sqlite3.connect(self._folder / "mlflow.db")) as database:
            return database.execute(query).fetchall()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _object(path: Path) -> dict[str, Any] | None:
    content = _parsed(path.read_text(errors="replace")) if path.exists() else None
    return content if isinstance(content, dict) else None


def page_rows(page: Path) -> list[dict[str, str]]:
    """The table of trials in a report's page by its heads, figures with all digits; `recommended`: `yes` or empty."""
    table = page.read_text().partition('<table class="sortable">')[2].partition("</table>")[0]
    heads = [html.unescape(head.replace("<wbr>", "")) for head in re.findall("<button[^>]*>(.*?)</button>", table)]
    rows = []
    for chosen, row in re.findall('<tr( class="chosen")? data-words=(.*?)</tr>', table, re.DOTALL):
        cells = re.findall('<td(?:[^>]*data-value="([^"]*)")?[^>]*>(.*?)</td>', row, re.DOTALL)
        values = [exact or html.unescape(text) for exact, text in cells]
        rows.append({**dict(zip(heads, values, strict=True)), "recommended": "yes" if chosen else ""})
    return rows
