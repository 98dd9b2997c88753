"""`search=optuna`: Optuna's tree of Parzen estimators, for one objective or several."""

from __future__ import annotations

from optuna.samplers import BaseSampler, TPESampler


def build_sampler(seed: int) -> BaseSampler:
    return TPESampler(seed=seed)
