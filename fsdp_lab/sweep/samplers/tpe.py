"""`search=optuna`: Optuna's tree of Parzen estimators, for one objective or several."""

from __future__ import annotations

import warnings

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial

from fsdp_lab.sweep.samplers import OVERRUN


def build_sampler(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # before Optuna 5 constraints are called experimental
        return TPESampler(seed=seed, constraints_func=_overrun)


def _overrun(trial: FrozenTrial) -> tuple[float]:
    """By how much a trial exceeded the memory, above 0 where it did not fit: the search leaves such settings."""
    return (trial.user_attrs.get(OVERRUN, 0.0),)
