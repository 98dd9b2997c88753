"""`search=random`: every value of the space is as likely as every other."""

from __future__ import annotations

from optuna.samplers import BaseSampler, RandomSampler


def build_sampler(seed: int) -> BaseSampler:
    return RandomSampler(seed)
