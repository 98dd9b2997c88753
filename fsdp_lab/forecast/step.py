"""A step that a forecast has followed: plain values, and the workload."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.memory.profile import Profile
from fsdp_lab.training.layout import Layout, Unit
from fsdp_lab.workloads.base import Workload


class Step(NamedTuple):
    """The second optimizer step of one rank.

    Attributes:
        program: its operators, if it was traced.
        workload: the model, data and task.
        num_params: of the whole model, and of the rank's part.
        num_trained: of the rank's part, those that get gradients.
        layout: how the model was divided.
        uncounted: the traced operators without known FLOPs.
        units: what is gathered and reduced together, the root last.
    """

    profile: Profile
    program: list[Operator]
    workload: Workload
    num_params: tuple[int, int]
    num_trained: int
    layout: Layout
    uncounted: set[str]
    units: list[Unit]
