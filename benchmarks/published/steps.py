"""Steps of published rows: their programs with few blocks, from which all follow, and their memory with all blocks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.published.rows import Row
from fsdp_lab.config import TrialConfig
from fsdp_lab.forecast.allocator import STREAMS, STREAMS_BEFORE_129721
from fsdp_lab.forecast.capacity import GIB, NEARLY_FULL_ERROR, Forecast
from fsdp_lab.forecast.pool import NoAnswerError, Pool
from fsdp_lab.hardware import num_cpus
from fsdp_lab.speed.device import Device, on_network
from fsdp_lab.speed.predict import NETWORKS, step_seconds
from fsdp_lab.speed.program import Operator

DEPTHS = (4, 6)  # a step is linear in its equal blocks; even numbers, for rows that checkpoint every second block
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Step:
    """A traced step of few blocks.

    Attributes:
        whole: its program, of two microbatches at most.
        again: the second of them alone, None where there is one.
    """

    whole: Sequence[Operator]
    again: Sequence[Operator] | None

    @classmethod
    def of(cls, program: Sequence[Operator]) -> Step:
        """Return the step of a program."""
        pairs = enumerate(pairwise(program), start=1)
        begins = [i for i, (one, other) in pairs if one.phase == "optimizer" and other.phase == "forward"]
        if not begins:
            return cls(program, None)
        end = max(i for i, operator in enumerate(program) if operator.phase == "backward")
        return cls(program, program[begins[0] : end + 1])

    def seconds(self, device: Device, microbatches: int) -> float:
        """Return the seconds with so many microbatches."""
        again = step_seconds(self.again, device) if self.again else 0.0
        return step_seconds(self.whole, device) + (microbatches - 2) * again


@dataclass(frozen=True)
class Traced:
    """A row with its steps of `DEPTHS` blocks, and the memory of a step of all blocks.

    Attributes:
        row: as published.
        steps: number of blocks -> step.
        memory: its forecast, on the row's device. What the allocator reserves is not linear in the blocks.
        unlike: how it differs from the steps that the device's error is known for.
    """

    row: Row
    steps: Mapping[int, Step]
    memory: Forecast
    unlike: tuple[str, ...]

    def seconds(self, device: Device) -> float:
        """Return the predicted seconds of a step."""
        (low, few), (high, more) = sorted(self.steps.items())
        of_few, of_more = (step.seconds(device, self.row.microbatches) for step in (few, more))
        return of_few + (self.row.blocks - low) * (of_more - of_few) / (high - low)

    def range(self, device: Device) -> tuple[float, float]:
        """Return the range of a predicted step, as a forecast has it: see `predict` and `on_capacity`."""
        step_s = self.seconds(device)
        steps = [step_s]
        if self.row.several_nodes and not device.network_known:
            ends = (on_network(device, device.network_gbit * factor) for factor in (NETWORKS[0], NETWORKS[-1]))
            steps += [self.seconds(one) for one in ends]
        most = (device.error_elsewhere if self.unlike else device.error).p90
        low, high = min(steps) / (1 + most), max(steps) / (1 - most)
        if self.memory.nearly_full:
            high = max(high, step_s / (1 - NEARLY_FULL_ERROR))
        return low, high


def trace(rows: Sequence[Row], on_done: Callable[[int, int], None]) -> list[Traced]:
    """Trace the steps of rows in processes, as many as there are cores.

    Raises:
        RuntimeError: a row has no forecast.
    """
    with Pool(_trace, num_cpus(), _LIMIT_S) as pool:
        # the longest first, so that none of them runs alone at the end
        order = sorted(range(len(rows)), key=lambda place: -rows[place].workers * rows[place].microbatches)
        futures = {place: pool.submit(rows[place]) for place in order}
        traced = {}
        for done, (place, future) in enumerate(futures.items(), start=1):
            try:
                answer = future.result()
            except NoAnswerError as error:
                raise RuntimeError(f"{rows[place].name} has no forecast: its process {error}") from error
            if isinstance(answer, str):
                raise RuntimeError(f"{rows[place].name} has no forecast: {answer}")
            traced[place] = answer
            on_done(done, len(rows))
    return [traced[place] for place in range(len(rows))]


def _trace(row: Row) -> Traced | str:
    os.environ["OMP_NUM_THREADS"] = "1"
    from fsdp_lab.forecast.forecast import Step as ForecastStep
    from fsdp_lab.forecast.forecast import forecast_step, unlike, weigh
    from fsdp_lab.training.__main__ import read_config

    try:

        def followed(blocks: int, traced: bool) -> tuple[TrialConfig, ForecastStep]:
            config = read_config(None, [*row.words, f"model.num_layers={blocks}"])
            return config, forecast_step(config, row.workers, cuda=True, traced=traced)

        steps = {blocks: Step.of(followed(blocks, traced=True)[1].program) for blocks in DEPTHS}
        config, whole = followed(row.blocks, traced=False)
        streams = STREAMS_BEFORE_129721 if row.early else STREAMS
        capacity = int(row.device.memory_gib * GIB)
        memory = weigh(whole.profile, config, row.workers, True, capacity, streams)
        return Traced(row, steps, memory, unlike(config, row.workers, row.device))
    except Exception:  # noqa: BLE001 - the command ends with it
        return traceback.format_exc()
