"""The memory of one optimizer step, change by change: plain values, from a measured step or a forecast one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

# In the order in which the drawing stacks them. Those that do not change in a step come first.
CATEGORIES = (
    "param",
    "optimizer",
    "buffer",
    "input",
    "grad",
    "unsharded_param",
    "all_gather",
    "activation",
    "unsharded_grad",
    "reduce_scatter",
    "temp",
    "other",
)
PLACES = ("device", "host")


@dataclass(frozen=True)
class Event:
    """A change of a tensor storage.

    Attributes:
        storage: identifies the storage.
        place: `device` or `host`, which never changes for a storage.
        category: of the bytes from this event on.
        num_bytes: of the storage from this event on; 0 when it is freed.
        module: the innermost active one; "" outside of all.
        phase: forward, backward or optimizer.
    """

    storage: int
    place: str
    category: str
    num_bytes: int
    module: str
    phase: str


class Held(NamedTuple):
    """A storage that is alive; `module` is the one that allocated it."""

    category: str
    num_bytes: int
    module: str


@dataclass(frozen=True)
class Peak:
    """The moment at which a place held the most bytes.

    Attributes:
        index: of the event that led to it.
        sums: the bytes of each category.
        held: the storages.
    """

    index: int
    sums: dict[str, int]
    held: list[Held]

    @property
    def total(self) -> int:
        return sum(self.sums.values())


@dataclass
class Profile:
    """One rank's step.

    Attributes:
        events: in order.
        begun: the number of events before the step began.
        peaks: for each place, the bytes of each category at its peak; `total` is their sum.
        owners: storage -> the names of its parameters or buffers; or of those that code outside of all modules made it
            for.
    """

    events: list[Event] = field(default_factory=list)
    begun: int = 0
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    owners: dict[int, list[str]] = field(default_factory=dict)

    def states(self, place: str = "device") -> Iterator[tuple[dict[str, int], dict[int, Held]]]:
        """Yield what a place holds after each event: the bytes of each category, and the storages by their number.

        The next event changes both in place.
        """
        sums = dict.fromkeys(CATEGORIES, 0)
        alive: dict[int, Held] = {}
        for event in self.events:
            if event.place == place:
                before = alive.pop(event.storage, None)
                if before is not None:
                    sums[before.category] -= before.num_bytes
                if event.num_bytes:
                    sums[event.category] += event.num_bytes
                    module = before.module if before else event.module
                    alive[event.storage] = Held(event.category, event.num_bytes, module)
            yield sums, alive

    def peak(self, place: str = "device") -> Peak | None:
        """Return the peak of a place; None if it held nothing.

        Of equal peaks it is the last one, because a new storage often gets its category a moment later.
        """
        most, index = 1, -1
        for i, (sums, _) in enumerate(self.states(place)):
            # storages from before the step count as one state, whatever place the last of them is in
            if i == self.begun - 1 or (i >= self.begun and self.events[i].place == place):
                total = sum(sums.values())
                if total >= most:
                    most, index = total, i
        if index < 0:
            return None
        sums, alive = next(islice(self.states(place), index, None))
        return Peak(index, sums, list(alive.values()))

    def with_peaks(self) -> Profile:
        """Set the peaks, when all events are known, and return this profile."""
        peaks = ((place, self.peak(place)) for place in PLACES)
        self.peaks = {place: {**peak.sums, "total": peak.total} for place, peak in peaks if peak is not None}
        return self
