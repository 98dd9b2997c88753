"""A sampler and a scheduler as another package would have them."""

from __future__ import annotations

from typing import Any

import optuna
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from tests.conftest import ROOT

LIMIT = 1e3


def registering(key: str, name: str) -> str:
    """The code of `python -m fsdp_lab` where this module is registered as an option."""
    return f"""
import sys
sys.path.append({str(ROOT)!r})
from fsdp_lab.commands.main import main
from fsdp_lab.config.registry import register
register({key!r}, {name!r}, "tests.sweep.outside.build_{key.partition(".")[0].replace("search", "sampler")}")
main()
"""


class Counts(optuna.samplers.BaseSampler):
    """Counts through the categories, the first key fastest."""

    def __init__(self) -> None:
        self.strides: dict[str, int] = {}
        self.stride = 1

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        choices = param_distribution.choices
        if param_name not in self.strides:
            self.strides[param_name] = self.stride
            self.stride *= len(choices)
        return choices[trial.number // self.strides[param_name] % len(choices)]


def build_sampler(seed: int) -> optuna.samplers.BaseSampler:
    return Counts()


class StopsAbove(FIFOScheduler):
    """Stops every trial whose first epoch is above a limit."""

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.of = metric

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return TrialScheduler.STOP if result[self.of] > LIMIT else TrialScheduler.CONTINUE


def build_scheduler(config: Any, watched: dict[str, Any]) -> TrialScheduler:
    return StopsAbove(watched["metric"])
