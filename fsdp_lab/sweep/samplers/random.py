"""`search=random`: every value of the space is as likely as every other."""

from __future__ import annotations

from optuna.samplers import BaseSampler, RandomSampler


def build_sampler(seed: int) -> BaseSampler:
    """Return a sampler of random values."""
    return RandomSampler(seed)
