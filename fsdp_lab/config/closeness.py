"""How close the figures of a trial are to those of its plain loop, and how close they must be.

In float32, sharding, recomputing and moving parameters change a loss only by rounding: by 1e-7 in three steps. The norm
of a gradient sums many small terms in another order. The change of all parameters is compared more coarsely: Adam makes
a full step from a gradient that is only rounding, such as that of a key's bias. A narrower type rounds more: only
figures before the first update are compared, to a few spacings of the type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fsdp_lab.config.axes.precision import Dtype
from fsdp_lab.config.metrics import (
    CHANGE_NORM,
    CHECK_VAL_LOSS,
    EARLY_LOSS,
    EVAL_LOSS,
    FIRST_GRAD_NORM,
    FIRST_LOSS,
    LOSS_EPS,
)
from fsdp_lab.config.trial import TrialConfig

NORM = 1e-4  # of a gradient; a ratio, like the others
# In the order of computation: the first figure that differs shows the cause.
_FLOAT32 = {
    EVAL_LOSS: 1e-5, FIRST_LOSS: 1e-5, FIRST_GRAD_NORM: NORM, EARLY_LOSS: 1e-5, CHANGE_NORM: 0.02, CHECK_VAL_LOSS: 1e-4,
}  # fmt: skip
_NOISE = 10.0  # times the change that other rounding makes in the plain loop itself
_NARROW = {EVAL_LOSS: 4.0, FIRST_LOSS: 4.0, FIRST_GRAD_NORM: 16.0}  # spacings of the type
_OWN_OPTIMIZER = 0.02  # the user's may round by shards, as optimizers with 8-bit states do
_PLAIN_WEIGHTS = ("plain", "rank0")  # of `init`
_SMALL_NORM = 1e-3  # relative to the first losses: a smaller gradient is rounding of larger ones
_EPS = {Dtype.float32: 0.0, Dtype.bfloat16: 2.0**-7, Dtype.float16: 2.0**-10}
_FLOAT32_EPS = 2.0**-23
_TF32_EPS, _FLOAT8_EPS = 2.0**-10, 2.0**-3


class Gap(NamedTuple):
    """The difference of a figure, as a ratio, and the largest that rounding explains."""

    key: str
    found: float
    limit: float

    @property
    def is_of_loss(self) -> bool:
        return not self.key.endswith("_norm")


def why_other_weights(config: TrialConfig) -> str:
    """Return why a trial starts with other weights than a plain script; "": it starts with the same."""
    if config.init.name not in _PLAIN_WEIGHTS:
        return f"init={config.init.name} draws other first weights"
    return "checkpoint.resume_from gives other first weights" if config.checkpoint.resume_from else ""


def gaps_to_plain(
    expected: Mapping[str, float],
    found: Mapping[str, float],
    config: TrialConfig,
    in_tf32: bool,
    draws: bool,
    noise: Mapping[str, float],
    own_eps: float,
) -> Iterator[Gap]:
    """Yield the gap of each figure that both a plain loop and a trial have.

    Args:
        expected: the plain loop's.
        found: the trial's.
        config: the trial's.
        in_tf32: the plain loop or the trial multiplies in TF32.
        draws: forward passes draw random numbers, so only the loss in `eval()` mode is comparable.
        noise: how far each figure of the plain loop is off if gradients are rounded differently.
        own_eps: the rounding of the narrowest parameters that the model creates itself.
    """
    firsts = (abs(expected.get(key, 0.0)) for key in (EVAL_LOSS, FIRST_LOSS, EARLY_LOSS))
    scale = max((loss for loss in firsts if math.isfinite(loss)), default=1.0)
    eps = max(narrowest(config, found, in_tf32), own_eps if own_eps > _FLOAT32_EPS else 0.0)
    limits = {key: eps * spacings for key, spacings in _NARROW.items()} if eps else dict(_FLOAT32)
    if config.optimizer.target is not None:
        limits |= {key: _OWN_OPTIMIZER for key in (EARLY_LOSS, CHECK_VAL_LOSS) if key in limits}
    for key, limit in limits.items():
        gap = relative_gap(expected, found, key, least_of(key, scale))
        if math.isfinite(gap) and (key == EVAL_LOSS or not draws):
            rounded = {key: expected[key] + noise.get(key, 0.0)}
            yield Gap(key, gap, max(limit, _NOISE * relative_gap(expected, rounded, key, least_of(key, scale))))


def narrowest(config: TrialConfig, figures: Mapping[str, float], in_tf32: bool) -> float:
    """Return the relative spacing of the narrowest type that a trial computes with; 0: float32."""
    precision = config.precision
    return max(
        _EPS[precision.param_dtype], _EPS[precision.reduce_dtype], figures.get(LOSS_EPS, 0.0),
        _FLOAT8_EPS if precision.float8 else 0.0, _TF32_EPS if in_tf32 else 0.0,
    )  # fmt: skip


def relative_gap(one: Mapping[str, float], other: Mapping[str, float], key: str, least: float) -> float:
    """Return the difference of two figures as a ratio, relative to `least` if both are smaller; NaN: not known."""
    a, b = one.get(key, math.nan), other.get(key, math.nan)
    return abs(a - b) / (max(abs(a), abs(b), least) or 1.0)


def least_of(key: str, scale: float) -> float:
    """Return the least value that a difference is relative to; `scale`: the first losses."""
    return _SMALL_NORM * scale if key.endswith("_norm") else scale
