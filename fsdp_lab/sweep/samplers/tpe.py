"""`search=optuna`: Optuna's tree of Parzen estimators, for one objective or several."""

from __future__ import annotations

import warnings

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, Trial

from fsdp_lab.sweep.samplers import OVERRUN


def build_sampler(seed: int) -> BaseSampler:
    """Return Optuna's tree-structured Parzen estimator, which learns to avoid settings that do not fit."""
    if hasattr(Trial, "set_constraint"):  # since Optuna 5 a trial is told its own
        return TPESampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, constraints_func=_overrun)


def _overrun(trial: FrozenTrial) -> tuple[float]:
    """Return by how much a trial exceeded the memory; above 0, the search avoids such settings."""
    return (trial.user_attrs.get(OVERRUN, 0.0),)
