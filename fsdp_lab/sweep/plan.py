"""Which cells of a grid become trials: each composed and checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fsdp_lab.config import (
    CombinationError,
    ConfigError,
    SweepConfig,
    effective_settings,
    workers_of,
)
from fsdp_lab.config.checks import check
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.wording import count
from fsdp_lab.sweep.grid import swept_keys


@dataclass
class Plan:
    """The trials of a grid.

    Attributes:
        left_out: reason -> the invalid cells.
        folded: cells that would repeat a trial, and its number.
        unnamed: swept axes that nobody typed, of the defaults or a preset; only of forecasts.
    """

    trials: list[Trial] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    folded: list[tuple[str, int]] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return what was left out of the grid, and why, a line each."""
        lines = [f"left out {len(cells)}: {reason}" for reason, cells in self.left_out.items()]
        if self.folded:
            lines.append(
                f"{count(len(self.folded), 'duplicate')} left out ("
                + "; ".join(f"{cell} = trial {index}" for cell, index in self.folded[:6])
                + (f"; and {len(self.folded) - 6} more)" if len(self.folded) > 6 else ")")
            )
        if self.unnamed:
            lines.append(f"varied because no value was named: {', '.join(self.unnamed)}.")
        return lines


def plan_sweep(
    grid: Sequence[Sequence[str]],
    compose: Callable[[Sequence[str], int], Trial],
    check: Callable[[SweepConfig], None] = check,
    fold: bool = True,
) -> Plan:
    """Compose and check every cell.

    Args:
        compose: makes the trial of a cell from its overrides and its number.
        check: raises for an invalid config; by default also for one that cannot run here.
        fold: keep only the first of cells with the same effect.

    Raises:
        ConfigError: a value is wrong in itself, or no cell is valid.
    """
    plan = Plan()
    seen: dict[str, int] = {}
    swept = swept_keys(grid)
    for overrides in grid:
        cell = " ".join(word for word in overrides if word.partition("=")[0].lstrip("+") in swept)
        trial = compose(overrides, len(plan.trials))
        try:
            check(trial.config)
        except CombinationError as reason:
            plan.left_out.setdefault(str(reason), []).append(cell)
            continue
        key = effect(trial.config, workers_of(trial.config))
        if fold and key in seen:
            plan.folded.append((cell, seen[key]))
            continue
        seen[key] = len(plan.trials)
        plan.trials.append(trial)
    if not plan.trials:
        most = max(map(len, plan.left_out.values()), default=0)  # the error of most cells is to be fixed first
        reasons = [reason for reason, cells in plan.left_out.items() if len(cells) == most]
        raise ConfigError(" / ".join(reasons) or "the sweep has no trials: an axis has no values.")
    return plan


def effect(config: SweepConfig, num_workers: int) -> str:
    """Return a value that is equal for cells that are one trial; see `effective_settings`."""
    return json.dumps(effective_settings(config, num_workers), sort_keys=True)
