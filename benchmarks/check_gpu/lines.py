"""The vocabulary: a line of the table, what was measured for it, and the bench it runs on. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from fsdp_lab.hardware import default_cpus_per_worker, default_loader_workers

PASS, FAIL, NOT_MEASURED = "pass", "FAIL", "not measured"


@dataclass(frozen=True)
class Machine:
    """The device and the libraries. `devices` counts GPUs, or is 0 on a CPU; `memory_bytes` is of the smallest GPU."""

    device: str  # "cuda" or "cpu"
    name: str
    devices: int
    cores: int
    driver: str
    capability: str
    torch: str
    cuda: str
    nccl: str
    cudnn: str
    python: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Bench:
    """Where lines run: the machine, the number of workers, and the folder that holds every file of the command."""

    machine: Machine
    workers: int
    thorough: bool
    folder: str
    source: str  # a digest of the sources

    @property
    def cuda(self) -> bool:
        return self.machine.device == "cuda"

    @property
    def prepared(self) -> Path:
        """The folder of references and forecasts, which depend on the sources."""
        return Path(self.folder, "prepared", self.source)

    def cores_per_worker(self, workers: int) -> int:
        """What the product gives a worker by default: one on a CPU, else the GPU's share."""
        return int(default_cpus_per_worker(self.machine.cores, workers if self.cuda else 0))

    def loader_workers(self, workers: int) -> int:
        """What the product uses by default: none on a CPU, whose cores train."""
        return default_loader_workers(self.cuda, self.cores_per_worker(workers))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Bench:
        return Bench(**{**values, "machine": Machine(**values["machine"])})


@dataclass(frozen=True)
class Line:
    """One line of the table.

    `case` is whatever its subject needs to measure it. `limit_s`: without an end after so many seconds, it hangs.
    """

    subject: str
    setting: str
    workers: int
    expected: str
    case: Any = None
    limit_s: float = 90.0

    @property
    def id(self) -> str:
        return f"{self.subject}: {self.setting} x{self.workers}"


@dataclass(frozen=True)
class Measured:
    """What a subject found: whether it is as expected, in words, and as raw figures."""

    passed: bool
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What is kept of a line."""

    id: str
    verdict: str
    measured: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(line: Line, measured: Measured, seconds: float) -> Result:
        verdict = PASS if measured.passed else FAIL
        return Result(line.id, verdict, measured.text, round(seconds, 2), measured.figures)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Result:
        return Result(**{f.name: values[f.name] for f in fields(Result)})


class Subject(Protocol):
    """A module with these functions. A module without `prepare` needs nothing ahead."""

    def lines(self, bench: Bench) -> list[Line]:
        """Return the lines, the most important first. Must not import torch."""

    def prepare(self, lines: Sequence[Line], bench: Bench) -> None:
        """Write what `measure` compares with, in a process that sees no GPU and has no process group."""

    def measure(self, line: Line, bench: Bench) -> Measured:
        """Measure one line. Every rank calls it; the first rank's result counts."""
