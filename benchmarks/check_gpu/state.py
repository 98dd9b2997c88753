"""What was measured, a JSON line each, so that a second start skips it."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from benchmarks.check_gpu.lines import Bench, Result
from fsdp_lab.files import write_text


def key_of(bench: Bench) -> str:
    """Results are valid for the same device, driver, PyTorch and sources."""
    machine = bench.machine
    return " | ".join((machine.name, machine.driver, machine.torch, bench.source))


class State:
    """The results of one key, in a file that may hold those of others too.

    The processes that measure append to it; the command reads it again and again.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.path, self.key = folder / "state.jsonl", key

    def append(self, result: Result) -> None:
        """Add a result in one write, so that lines of two ranks cannot mix."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": self.key, "time": time.time(), **asdict(result)})
        with self.path.open("a") as lines:
            lines.write(f"{line}\n")

    def results(self) -> dict[str, Result]:
        """By line, the first of each: a rank that fails because another one did comes second."""
        by_id: dict[str, Result] = {}
        for record in self._records():
            if record["key"] == self.key:
                by_id.setdefault(record["id"], Result.from_dict(record))
        return by_id

    def forget(self, ids: Collection[str]) -> None:
        """Drop the results of these lines, to measure them again."""
        kept = [r for r in self._records() if r["key"] != self.key or r["id"] not in ids]
        write_text(self.path, "".join(f"{json.dumps(record)}\n" for record in kept))

    def _records(self) -> list[dict]:
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # cut short by a kill
        return records
