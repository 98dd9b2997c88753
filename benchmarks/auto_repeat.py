"""How many runs `repeat=auto` takes, against three repeats of everything.

python -m benchmarks.auto_repeat

Sweeps whose speeds and noise are planted: nothing is trained, so the figures hang on no machine. The rules are those of
a sweep: what runs again is what `fsdp_lab.report.repeats.undecided` leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fsdp_lab.config import SweepConfig
from fsdp_lab.metrics import MEMORY, SPEED, VAL_LOSS
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.repeats import undecided
from fsdp_lab.status import TrialStatus

SWEEPS = 100
# The logarithms of the speeds of the settings, as ratios to the fastest.
SPEEDS: dict[str, list[float]] = {
    "4 settings, all apart": [1.0, 0.7, 0.5, 0.3],
    "4 settings, all equal": [1.0] * 4,
    "12 settings, two of them close": [1.0, 0.98, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2],
}
Noise = Callable[[np.random.Generator], float]
NOISE: dict[str, Noise] = {
    "1 %": lambda rng: rng.normal(0, 0.01),
    "5 %": lambda rng: rng.normal(0, 0.05),
    "3 %, one run in ten half as fast": lambda rng: rng.normal(0, 0.03) + (math.log(0.5) if rng.random() < 0.1 else 0),
}


@dataclass(frozen=True)
class Ended:
    """How a sweep ended: its runs, and whether what it recommends is within 5 % of the fastest."""

    runs: int
    fast: bool


def run(speeds: Sequence[float], noise: Noise, rng: np.random.Generator, most: int, auto: bool) -> Ended:
    """One sweep of at most so many rounds; every setting needs less memory than the one before it."""
    trials: list[TrialRecord] = []
    left = list(range(len(speeds)))
    for number in range(most):
        for which in left[:: -1 if number % 2 else 1]:
            speed = 1000 * speeds[which] * math.exp(noise(rng))
            figures = {SPEED: speed, MEMORY: float(len(speeds) - which), VAL_LOSS: 1.0}
            setting = {"sharding": str(which), "repeat": str(number)}
            trials.append(TrialRecord(len(trials), setting, TrialStatus.finished, figures))
        simulated = SweepData("", "", ["sharding", "repeat"], trials, 0.02, 0.03, repeat_max=most if auto else None)
        if auto:
            left = sorted(int(setting.values["sharding"]) for setting in undecided(simulated.frame(), simulated.rules))
            if len(left) < 2:
                break
    recommended = answer(simulated).setting
    assert recommended is not None
    return Ended(len(trials), speeds[int(recommended.values["sharding"])] >= 0.95 * max(speeds))


def main() -> None:
    most = SweepConfig().repeat_max
    print(f"repeat=auto, at most {most} rounds, against three repeats of everything; {SWEEPS} planted sweeps each")
    print(f"{'settings':32} {'noise of a run':34} {'auto':>6} {'3 each':>6} {'saved':>7}   within 5 % of the fastest")
    for name, speeds in SPEEDS.items():
        for label, noise in NOISE.items():
            ended = [
                [run(speeds, noise, np.random.default_rng(seed), most if auto else 3, auto) for seed in range(SWEEPS)]
                for auto in (True, False)
            ]
            auto, three = (fmean(sweep.runs for sweep in sweeps) for sweeps in ended)
            fast = [sum(sweep.fast for sweep in sweeps) for sweeps in ended]
            row = f"{auto:6.1f} {three:6.1f} {(1 - auto / three) * 100:5.0f} %   {fast[0]}, {fast[1]} of {SWEEPS}"
            print(f"{name:32} {label:34} {row}", flush=True)


if __name__ == "__main__":
    main()
