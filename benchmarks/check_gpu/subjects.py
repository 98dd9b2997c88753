"""What is checked, the most important first: each batch is one process group."""

from __future__ import annotations

from importlib import import_module

from benchmarks.check_gpu.lines import Bench, Line, Subject

BATCHES: dict[str, tuple[str, ...]] = {
    "numerics": ("parity", "takehome", "scaling", "checkpoints"),
    "memory": ("memory", "oom", "snapshot"),
    "speed": ("speed", "rates"),
}


def subject(name: str) -> Subject:
    return import_module(f"benchmarks.check_gpu.{name}")  # type: ignore[return-value]


def lines_of(batch: str, bench: Bench) -> list[Line]:
    return [line for name in BATCHES[batch] for line in subject(name).lines(bench)]


def all_lines(bench: Bench) -> dict[tuple[str, int], list[Line]]:
    """The lines of each process group, by batch and number of workers: all GPUs before one of them."""
    groups: dict[tuple[str, int], list[Line]] = {}
    for batch in BATCHES:
        for line in lines_of(batch, bench):
            groups.setdefault((batch, line.workers), []).append(line)
    return dict(sorted(groups.items(), key=lambda item: -item[0][1]))
