"""What has become of each trial, and `results.csv`."""

from __future__ import annotations

import csv
import io
import os
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_lab.compose import Trial
from fsdp_lab.files import write_text
from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.metrics import FORECAST_ERROR, MEMORY, table_columns

_STORAGE = ".storage"

# All but `interrupted` are results, and final: a setting that does not fit is what the sweep was to find out.
ENDED = ("finished", "failed", "interrupted", "oom", "diverged", "stopped", "skipped")


@dataclass
class TrialState:
    """A trial and how it stands.

    `status`: waiting, starting, running, or one of `ENDED`. `run`: the tracker's handle. `goes_on`: an earlier start
    has left something of it. `place_free_since`: when the trial before it on its place reported for the last time.
    """

    trial: Trial
    status: str = "waiting"
    run: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    begun: float | None = None
    seconds: float | None = None
    facts_told: bool = False
    goes_on: bool = False
    epochs_before: int = 0
    reopened: bool = False
    forecast: Forecast | None = None
    forecast_before: dict[str, float] = field(default_factory=dict)
    place_free_since: float | None = None
    turnaround_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def forecast_figures(self) -> dict[str, float]:
        """What was forecast, in bytes; empty without a forecast."""
        found = self.forecast
        if found is None or found.error:
            return self.forecast_before
        figures = {"forecast/peak_bytes": found.peak_bytes, "forecast/needed_bytes": found.needed_bytes}
        figures |= {"forecast/reserved_bytes": found.reserved_bytes} if found.reserved_bytes is not None else {}
        figures |= {"forecast/host_bytes": found.host_bytes} if found.host_bytes else {}
        figures |= {"forecast/capacity_bytes": found.capacity_bytes} if found.capacity_bytes is not None else {}
        if found.largest_microbatch is not None:
            figures["forecast/largest_microbatch"] = found.largest_microbatch
        return {key: float(value) for key, value in figures.items()}

    def figures(self, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """The metrics of an epoch, the last by default, with what was forecast beside what was measured."""
        metrics = self.metrics if metrics is None else metrics
        figures = {**metrics, **self.forecast_figures}
        measured = metrics.get(MEMORY)
        if measured and "forecast/peak_bytes" in figures:
            figures[FORECAST_ERROR] = (figures["forecast/peak_bytes"] + self._workspaces(metrics)) / measured - 1
        return figures

    def _workspaces(self, metrics: dict[str, float]) -> int:
        """The bytes of cuBLAS's workspaces in the measured peak, where they could not be told from tensors."""
        on_gpu = "memory/reserved_bytes" in metrics
        if not on_gpu or "memory/workspace_bytes" in metrics or self.forecast is None:
            return 0
        return self.forecast.allowances.get("kernel workspaces", 0)

    def begin(self) -> None:
        self.status, self.begun = "running", self.begun or time.time()

    def end(self, status: str, error: str | None) -> None:
        self.status, self.error = status, error
        self.seconds = time.time() - self.begun if self.begun else self.seconds


def storage(trial: Trial, sweep_folder: Path) -> Path:
    """Where the trial's processes write: its own folder, or the shared one of `cluster.storage_path`."""
    shared = trial.config.cluster.storage_path
    if shared is None:
        return trial.folder.absolute()
    within = os.path.relpath(trial.folder, sweep_folder)  # "." for a trial alone
    name = (sweep_folder / _STORAGE).read_text()
    return (Path(shared).absolute() / name / within).resolve()


def name_storage(sweep_folder: Path) -> None:
    """What the sweep's folder below `cluster.storage_path` is called: kept in its own one, so that a resume finds it
    from another node, and where the sweep's folder was moved."""
    if not (sweep_folder / _STORAGE).exists():
        own = uuid.uuid4().hex[:8]  # others may have a folder of that name
        write_text(sweep_folder / _STORAGE, f"{'-'.join(sweep_folder.absolute().parts[-2:])}-{own}")


def setting(trial: Trial, key: str) -> Any:
    """What a trial has for a swept key: a group's option, or a value."""
    return trial.choices.get(key, trial.values.get(key))


def write_results(
    path: Path,
    states: Sequence[TrialState],
    swept: Sequence[str],
    front: Collection[int] = (),
    run_id: Callable[[str | None], str] = lambda handle: handle or "",
) -> None:
    """A row a trial, with the latest of each figure; written anew after each change, under a temporary name first.

    Args:
        front: the trials of the Pareto set, where there are several objectives.
    """
    measured = [column.key for column in table_columns("csv")]
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(
        ["trial", "status", *swept, *measured, "pareto", "turnaround_s", "seconds", "error", "run_id", "folder"]
    )
    for number, state in enumerate(states):
        figures = state.figures()
        rows.writerow(
            [
                number,
                "waiting" if state.status == "starting" else state.status,
                *(setting(state.trial, key) for key in swept),
                *(figures.get(key, "") for key in measured),
                "yes" if number in front else "",
                "" if state.turnaround_s is None else round(state.turnaround_s, 2),
                "" if state.seconds is None else round(state.seconds, 2),
                state.error or "",
                run_id(state.run),
                state.trial.folder,
            ]
        )
    write_text(path, text.getvalue())
