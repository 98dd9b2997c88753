"""A step that is followed by what the allocator reports: sizes by hand."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_lab.training.allocator_profile import AllocatorRecorder, not_reported
from fsdp_lab.training.profile import Event, Profile

CPU = torch.device("cpu")


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_each_allocation_of_a_step_counts_beside_what_was_there():
    before = Profile([Event(0, "device", "param", 100, "", "forward"), Event(1, "host", "temp", 7, "", "forward")], 1)
    recorder, model = AllocatorRecorder(before, CPU), Doubles()
    x = torch.ones(1000, requires_grad=True)  # before the step: its end is no change of the step
    with recorder.following(model):
        y = model(x)
        with not_reported():
            torch.empty(5000)
        y.backward(torch.ones(1000))
        del x, y
    profile = recorder.finish()
    peak = profile.peaks["device"]
    assert peak["param"] == 100 and peak["total"] == peak["param"] + peak["other"]
    assert 3 * 4000 <= peak["other"] < 3 * 4000 + 100, "y, its gradient, and that of x; a few bytes are of the number 2"
    assert next(event.phase for event in profile.events[1:] if event.num_bytes >= 4000) == "forward"
    assert {event.phase for event in profile.events[1:]} == {"forward", "backward"}
    *_, (left, _) = profile.states()
    assert sum(left.values()) == 100
