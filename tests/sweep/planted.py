"""What stands in for the parts of a sweep: trials made by hand that train nothing, another package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock, Mock

from omegaconf import OmegaConf
from optuna.samplers import BaseSampler, RandomSampler
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from fsdp_lab.config import SweepConfig, from_dict
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Reason
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.record.trial_json import Outcome
from fsdp_lab.sweep.forecasts import Forecasts
from fsdp_lab.sweep.outputs.outputs import Outputs
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.trial import TrialState
from tests.conftest import ROOT

Compose = Callable[[Sequence[str], int], Trial]
LOSS = [("val/loss", "min")]
CPU = Path(__file__).with_name("two_cores.yaml").read_text()  # the data sheet of a machine


def trial_by_hand(words: Sequence[str], number: int = 0) -> Trial:
    """A trial without groups, composed by no Hydra: its words set values."""
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    return Trial(number, from_dict(SweepConfig, cast("dict[str, Any]", values)), {}, list(words), Path(), {})


def sweep_of(states: Sequence[TrialState], folder: Path = Path(), swept: Sequence[str] = ()) -> Sweep:
    """A sweep that has not started; its outputs hear what happens."""
    config = states[0].trial.config if states else SweepConfig()
    sweep = Sweep(states, config, folder, list(swept), SweepStart("", [], True, "", 1))
    sweep.outputs = Hears(sweep)
    return sweep


def plan_of(
    compose: Compose,
    folder: Path,
    cells: Sequence[Sequence[str]],
    common: Sequence[str] = (),
    swept: Sequence[str] = (),
) -> Sweep:
    """A sweep with a trial for each cell, which has not started."""
    trials = [compose([*common, *cell], number) for number, cell in enumerate(cells)]
    sweep = sweep_of([TrialState(trial) for trial in trials], folder, swept)
    sweep.started.write(folder)
    return sweep


class Acts:
    """Runs trials that train nothing: call it with the sweep.

    Args:
        reasons: why each trial ends, by its number; those beyond the end of the list finish.
    """

    def __init__(self, reasons: Sequence[Reason | None] = ()) -> None:
        self._reasons = reasons

    def __call__(self, sweep: Sweep) -> None:
        sweep.outputs.ready()
        while (number := sweep.next()) is not None:
            self.act(sweep, number)

    def act(self, sweep: Sweep, number: int) -> None:
        sweep.prepare(number)
        sweep.begin(number)
        reason = self._reasons[number] if number < len(self._reasons) else None
        sweep.end(number, Outcome(reason.status if reason else TrialStatus.finished, reason))


class Hears(Outputs):
    """Records which trials begin, the epochs, and what is logged; writes nothing but `results.csv` on request."""

    def __init__(self, sweep: Sweep, forecasts: Forecasts | None = None, writes: bool = False) -> None:
        self.sweep, self.console, self.mlflow = sweep, MagicMock(), Mock()
        self.forecasts: Any = forecasts or MagicMock()
        self.plain_loops: Any = MagicMock()
        self._writes, self._stale, self._due_at = writes, False, 0.0
        self.begun: list[int] = []
        self.epochs: list[dict[str, float]] = []
        self.logged: list[str] = []

    def began(self, number: int) -> None:
        super().began(number)
        self.begun.append(number)

    def epoch(self, number: int, metrics: dict[str, float]) -> None:
        super().epoch(number, metrics)
        self.epochs.append(metrics)

    def write_results(self) -> None:
        if self._writes:
            super().write_results()

    def log(self, text: str) -> None:
        self.logged.append(text)

    def report(self) -> None:
        return None


def heard(sweep: Sweep) -> Hears:
    assert isinstance(sweep.outputs, Hears)
    return sweep.outputs


def registering(key: str, name: str) -> str:
    """The code of `python -m fsdp_lab` where the sampler or the scheduler below is registered as an option."""
    return f"""
import sys
sys.path.append({str(ROOT)!r})
from fsdp_lab.commands.main import main
from fsdp_lab.config.options import register
register({key!r}, {name!r}, "tests.sweep.planted.build_{key.partition(".")[0].replace("search", "sampler")}")
main()
"""


class Counts(RandomSampler):
    """Counts through the categories of two keys, the one with three the fastest."""

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        choices = param_distribution.choices
        return choices[(trial.number if len(choices) == 3 else trial.number // 3) % len(choices)]


def build_sampler(seed: int) -> BaseSampler:
    return Counts()


class StopsAbove(FIFOScheduler):
    """Stops every trial whose first epoch is above 1000."""

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.of = metric

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return TrialScheduler.STOP if result[self.of] > 1000 else TrialScheduler.CONTINUE


def build_scheduler(config: Any, watched: dict[str, Any]) -> TrialScheduler:
    return StopsAbove(watched["metric"])
