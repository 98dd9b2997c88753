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
from contextlib import closing, suppress
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
        return _objects(self.files / "metrics.jsonl")

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
        """The figures of its forecast; empty without one."""
        return self._record.get("forecast") or {}

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
        return _object(self.files / "trial.json")

    def change(self, **content: Any) -> None:
        """Write other content into its record, as nothing does; `outcome=None`: it was killed before its end."""
        (self.files / "trial.json").write_text(json.dumps(self._record | content))

    @property
    def config(self) -> dict[str, Any]:
        """Its whole configuration, as composed."""
        content: dict[str, Any] = yaml.safe_load((self.path / ".hydra" / "config.yaml").read_text())
        return content


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
    def trials(self) -> list[TrialFolder]:
        """Its trials, in order: those that are listed, or the folder itself for a run without `-m`."""
        trials = []
        for listed in _objects(self.path / "trials.jsonl"):
            folder, storage = self.path / listed["folder"], listed.get("storage", "")
            trials.append(TrialFolder(folder, folder if "://" in storage else Path(storage or folder)))
        return trials or [TrialFolder(self.path, self.path)]


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

    def artifacts(self, run: Run) -> list[str]:
        """The paths of all files of a run."""
        root = Path(self.client.download_artifacts(run.info.run_id, ""))
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def points(self) -> list[tuple[str, str, int, float]]:
        """`(trial, metric, epoch, value)` of every point of the trials of sweeps, sorted."""
        return self._select("""select t.value, m.key, m.step, m.value from metrics m
            join tags t on t.run_uuid = m.run_uuid and t.key = 'fsdp_lab.trial'""")

    def ends(self) -> list[tuple[str, str]]:
        """`(trial, status)` of every run, sorted; the trial of a sweep's own run is ""."""
        return self._select("""select coalesce(t.value, ''), r.status from runs r
            left join tags t on t.run_uuid = r.run_uuid and t.key = 'fsdp_lab.trial'""")

    def _select(self, query: str) -> list[Any]:
        """Rows of the database itself, sorted: a client takes long to open one."""
        with closing(sqlite3.connect(self._folder / "mlflow.db")) as database:
            return sorted(database.execute(query))


def _object(path: Path) -> dict[str, Any]:
    """That in a file; empty where it is missing or damaged."""
    with suppress(OSError, ValueError):
        if isinstance(content := json.loads(path.read_text()), dict):
            return content
    return {}


def _objects(path: Path) -> list[dict[str, Any]]:
    """Those in the whole lines of a file."""
    content = []
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                content.append(json.loads(line))
    return [each for each in content if isinstance(each, dict)]


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
