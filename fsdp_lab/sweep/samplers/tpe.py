"""`search=optuna`: Optuna's tree of Parzen estimators, for one objective or several."""

from __future__ import annotations

from optuna.samplers import BaseSampler, TPESampler


def build_sampler(seed: int) -> BaseSampler:
    """Return Optuna's tree-structured Parzen estimator, which takes settings that do not fit for the worst."""
    return TPESampler(seed=seed)
