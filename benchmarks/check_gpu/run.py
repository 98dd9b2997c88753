"""Train one trial with the product's own `train`, and keep what it reports."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.check_gpu.settings import Setting, trial


@dataclass
class Run:
    """A reporter that keeps everything. `step_begins` has the clock at the begin of every step."""

    losses: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)
    step_begins: list[float] = field(default_factory=list)

    def facts(self, facts: dict[str, Any]) -> None:
        self.known = facts

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int) -> None:
        self.step_begins.append(time.perf_counter())

    def epoch(self, metrics: dict[str, float], checkpoint: Path | None) -> None:
        self.epochs.append(dict(metrics))

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the last epoch."""
        return self.epochs[-1]


def run_trial(setting: Setting, folder: Path | None = None) -> Run:
    """Train to the end.

    Args:
        folder: for checkpoints and memory profiles, seen by all ranks; None for a trial without such.
    """
    from fsdp_lab.training import train

    run = Run()
    with tempfile.TemporaryDirectory() as own:
        train(trial(setting), folder or Path(own), run, run.losses.extend)
    return run
