"""The memory of one optimizer step, change by change: plain values, from a measured step or a forecast one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

# In the order they are stacked. What stands still lies at the bottom.
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
        category: what the bytes count as from now on.
        num_bytes: of the storage from now on; 0 when it is freed.
        module: the innermost active one; "" outside of all.
        phase: forward, backward or optimizer.
    """

    storage: int
    place: str
    category: str
    num_bytes: int
    module: str
    phase: str


@dataclass(frozen=True)
class Holder:
    """`count` storages of one category, allocated in one module, that were alive at the peak."""

    category: str
    module: str
    num_bytes: int
    count: int


@dataclass
class Profile:
    """One rank's step.

    Attributes:
        events: in order.
        begun: the number of events before the step began.
        peaks: for each place, the bytes of each category at its peak; `total` is their sum.
    """

    events: list[Event] = field(default_factory=list)
    begun: int = 0
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)

    def deltas(self) -> list[int]:
        """Return the bytes that each event adds at its place, negative for freed bytes."""
        held: dict[int, int] = {}
        out = []
        for event in self.events:
            out.append(event.num_bytes - held.get(event.storage, 0))
            held[event.storage] = event.num_bytes
        return out

    def peak_index(self, place: str = "device") -> int:
        """Return the index of the event after which `place` held most; -1 if it held nothing.

        Of equals it is the last, because a new storage often gets its category a moment later.
        """
        best, total, index = 1, 0, -1
        for i, (event, delta) in enumerate(zip(self.events, self.deltas(), strict=True)):
            total += delta if event.place == place else 0
            # what was there before the step counts once all of it is there, whichever place it ends with
            if i >= self.begun - 1 and (event.place == place or i == self.begun - 1) and total >= best:
                best, index = total, i
        return index

    def at_peak(self, place: str = "device") -> dict[str, int]:
        """Return the bytes of each category at the peak of `place`, and their `total`; empty if it held nothing."""
        alive = {e.storage: e for e in self.events[: self.peak_index(place) + 1] if e.place == place}
        if not alive:
            return {}
        sums = dict.fromkeys(CATEGORIES, 0)
        for event in alive.values():
            sums[event.category] += event.num_bytes
        return {**sums, "total": sum(sums.values())}

    def with_peaks(self) -> Profile:
        """Return this profile, once its events are complete, with its peaks."""
        self.peaks = {place: at_peak for place in PLACES if (at_peak := self.at_peak(place))}
        return self

    def holders(self, place: str = "device") -> list[Holder]:
        """Return the storages at the peak of `place`, grouped, the largest first."""
        alive: dict[int, tuple[str, int]] = {}
        made_in: dict[int, str] = {}
        for event in self.events[: self.peak_index(place) + 1]:
            if event.place != place:
                continue
            if event.num_bytes:
                made_in.setdefault(event.storage, event.module)
                alive[event.storage] = (event.category, event.num_bytes)
            else:
                alive.pop(event.storage, None)
                made_in.pop(event.storage, None)
        sums: dict[tuple[str, str], list[int]] = defaultdict(list)
        for storage, (category, num_bytes) in alive.items():
            sums[category, made_in[storage]].append(num_bytes)
        holders = [Holder(category, module, sum(sizes), len(sizes)) for (category, module), sizes in sums.items()]
        return sorted(holders, key=lambda holder: (-holder.num_bytes, holder.category, holder.module))
