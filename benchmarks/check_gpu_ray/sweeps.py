"""The sweeps that are run, and what is expected of the files they leave. Judging needs no Ray and no GPU."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.check_gpu_ray.lines import Line, Verdict
from benchmarks.check_gpu_ray.machine import Machine
from fsdp_lab.record.trial_files import read_any_facts, read_metrics

LOSS_TOLERANCE = 1e-3
FORECAST_TOLERANCE = 0.10  # on CUDA; on a CPU a forecast is exact
GPU_MEMORY_TOLERANCE = 64 * 2**20  # what a driver takes and returns by itself
REPEATS = 8
_ONE_SETTING = ("sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=always")
_BATCH = 1024  # images of a worker
_TOKENS = 17  # vit_tiny: 4 x 4 patches and the class token
_TOO_MUCH = 1.25  # of the memory there is
_ADDRESS_SPACE = (64 * 2**30, 512 * 2**30)  # at least, for Ray's own maps; at most, for the size of the weights
_NCCL_VERSION = re.compile(r"NCCL version (\S+)")


@dataclass(frozen=True)
class Left:
    """What a sweep left: its exit status, its folder, processes that outlived it, and the growth of the GPU memory in
    use, in bytes; None where there is no GPU."""

    status: int
    folder: Path
    processes: tuple[str, ...] = ()
    gpu_growth: int | None = None

    @property
    def rows(self) -> list[dict[str, str]]:
        path = self.folder / "results.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def trial(self, row: dict[str, str]) -> Path:
        return self.folder / row["trial"]


Judge = Callable[[Line, Left, Machine], Line]


@dataclass(frozen=True)
class PlannedSweep:
    """A command and the lines that come of it.

    `needs_s`: it is not begun with less time left. `memory_limit`: the address space of its processes.
    """

    name: str
    words: list[str]
    lines: list[tuple[Line, Judge]]
    needs_s: float
    memory_limit: int | None = None

    @property
    def names(self) -> list[str]:
        return [line.name for line, _ in self.lines]

    def judge(self, left: Left, machine: Machine, seconds: float) -> list[Line]:
        return [replace(judge(line, left, machine), seconds=seconds) for line, judge in self.lines]

    def not_measured(self, why: str) -> list[Line]:
        return [replace(line, measured=why, verdict=Verdict.not_measured) for line, _ in self.lines]


def all_sweeps(machine: Machine) -> list[PlannedSweep]:
    return [readme(machine), repeats(machine), out_of_memory(machine)]


def readme(machine: Machine) -> PlannedSweep:
    """The sweep that README.md shows."""
    words = ["sharding=root,per_block", "precision=fp32", "offload=none", "reshard_after_forward=always,never"]
    kind = "CUDA" if machine.gpus else "CPU"
    tolerance = f"{_forecast_tolerance(machine):.0%}" if machine.gpus else "0"
    lines: list[tuple[Line, Judge]] = [
        (Line("readme: outcomes", _outcomes(0, ["finished"] * 4)), judge_outcomes),
        (Line("readme: device", f"{_device_names(machine)}, {_workers(machine.num_workers)}"), judge_device),
        (Line("readme: losses", f"all settings within {LOSS_TOLERANCE:g}"), judge_losses),
        (Line("readme: forecast error", f"at most {tolerance} on {kind}"), judge_forecast),
    ]
    return PlannedSweep("readme", [*words, *common(machine), *digits(machine)], lines, needs_s=100)


def repeats(machine: Machine) -> PlannedSweep:
    """One setting eight times: whether a trial leaves something to the next."""
    words = [f"repeat={','.join(map(str, range(REPEATS)))}", *_ONE_SETTING, "training.epochs=1"]
    lines: list[tuple[Line, Judge]] = [
        (Line("repeats: outcomes", _outcomes(0, ["finished"] * REPEATS)), judge_outcomes),
        (Line("repeats: peak memory", f"equal in all {REPEATS} trials"), judge_peaks),
        (Line("repeats: processes", "none left"), judge_processes),
    ]
    if machine.gpus:
        expected = f"back within {GPU_MEMORY_TOLERANCE >> 20} MiB"
        lines.append((Line("repeats: GPU memory", expected), judge_gpu_memory))
    return PlannedSweep("repeats", [*words, *common(machine), *digits(machine)], lines, needs_s=150)


def out_of_memory(machine: Machine) -> PlannedSweep:
    """A trial that cannot fit, between two that do. One activation alone exceeds the memory; the weights are small.

    On a CPU the address space of the processes is limited: otherwise some systems would grant the activation and
    kill whoever writes to it.
    """
    limit = None if machine.gpus else min(max(machine.capacity_bytes, _ADDRESS_SPACE[0]), _ADDRESS_SPACE[1])
    widths = f"64,{too_wide(limit or machine.capacity_bytes)},128"
    batch = _BATCH * machine.num_workers
    words = [f"model.mlp_dim={widths}", "model.hidden_dim=8", "model.num_layers=1", *_ONE_SETTING, *common(machine)]
    words += ["data=synthetic", f"data.num_train={2 * batch}", f"training.global_batch_size={batch}"]
    words += ["training.epochs=1", "forecast.prune=false", "checkpoint.mode=off", "export=false"]
    line = Line("oom: outcomes", _outcomes(0, ["finished", "oom", "finished"]))
    return PlannedSweep("oom", words, [(line, judge_outcomes)], needs_s=90, memory_limit=limit)


def too_wide(capacity_bytes: int) -> int:
    """An `mlp_dim` whose activation in fp32 exceeds the capacity."""
    return -(-int(capacity_bytes * _TOO_MUCH) // (_BATCH * _TOKENS * 4))


def common(machine: Machine) -> list[str]:
    """Workers share cores where there are fewer than workers."""
    if machine.cores >= machine.num_workers:
        return []
    return [f"cluster.cpus_per_worker={machine.cores / machine.num_workers:.2g}"]


def digits(machine: Machine) -> list[str]:
    """A batch that the number of GPUs divides: the default of 64 may not be."""
    rest = 64 % machine.num_workers
    return [f"training.global_batch_size={64 - rest}"] if rest else []


def judge_outcomes(line: Line, left: Left, machine: Machine) -> Line:
    rows = left.rows
    measured = _outcomes(left.status, [row["status"] for row in rows])
    errors = [row["error"] for row in rows if row["error"]]
    return line.judged("; ".join([measured, *errors])[:400], measured == line.expected)


def judge_device(line: Line, left: Left, machine: Machine) -> Line:
    """A trial names a GPU as its device only where its process group has NCCL; NCCL's own line is shown beside it."""
    facts = [read_any_facts(left.trial(row)) or {} for row in left.rows]
    seen = {(str(fact.get("device")), int(fact.get("world_size", 0))) for fact in facts}
    measured = "; ".join(f"{name}, {_workers(size)}" for name, size in sorted(seen)) or "no trial"
    names = set(machine.gpus or ["cpu"])
    holds = bool(seen) and all(name in names and size == machine.num_workers for name, size in seen)
    if not holds and machine.gpus:
        measured += "; GPUs are counted by NVML: does nvidia-smi -L list them?"
    return line.judged(measured + _nccl(left), holds)


def judge_losses(line: Line, left: Left, machine: Machine) -> Line:
    spreads = {}
    for key in ("train/loss", "val/loss"):
        values = _figures(left, key)
        if len(values) < _expected_trials(left):
            return line.judged(f"{key} in {len(values)} of {len(left.rows)} trials", False)
        spreads[key] = max(values) - min(values)
    measured = ", ".join(f"{key} within {spread:.1e}" for key, spread in spreads.items())
    return line.judged(measured, all(spread <= LOSS_TOLERANCE for spread in spreads.values()))


def judge_forecast(line: Line, left: Left, machine: Machine) -> Line:
    errors = _figures(left, "forecast/error")
    if len(errors) < _expected_trials(left):
        return line.judged(f"known of {len(errors)} of {len(left.rows)} trials", False)
    worst = max(errors, key=abs)
    return line.judged(f"{worst:+.2%} at worst", abs(worst) <= _forecast_tolerance(machine))


def judge_peaks(line: Line, left: Left, machine: Machine) -> Line:
    """Of every rank, in bytes."""
    peaks = [_rank_peaks(left.trial(row)) for row in left.rows]
    if len(peaks) < REPEATS or not all(peaks):
        return line.judged(f"known of {sum(map(bool, peaks))} of {REPEATS} trials", False)
    highest = [max(peak.values()) for peak in peaks]
    if all(peak == peaks[0] for peak in peaks):
        return line.judged(f"{highest[0] / 2**20:.2f} MiB in all", True)
    return line.judged("MiB: " + ", ".join(f"{peak / 2**20:.3f}" for peak in highest), False)


def judge_processes(line: Line, left: Left, machine: Machine) -> Line:
    return line.judged(", ".join(left.processes) or "none", not left.processes)


def judge_gpu_memory(line: Line, left: Left, machine: Machine) -> Line:
    if left.gpu_growth is None:
        return replace(line, measured="the GPUs did not say")
    return line.judged(f"{left.gpu_growth / 2**20:+.0f} MiB", left.gpu_growth <= GPU_MEMORY_TOLERANCE)


def _outcomes(status: int, outcomes: Iterable[str]) -> str:
    runs = [(name, len(list(same))) for name, same in itertools.groupby(outcomes)]
    runs_text = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in runs)
    return f"exit {status}: {runs_text or 'no results'}"


def _workers(count: int) -> str:
    return f"{count} worker" + ("s" if count != 1 else "")


def _device_names(machine: Machine) -> str:
    return " or ".join(sorted(set(machine.gpus))) or "cpu"


def _forecast_tolerance(machine: Machine) -> float:
    return FORECAST_TOLERANCE if machine.gpus else 0.0


def _expected_trials(left: Left) -> int:
    return max(1, len(left.rows))


def _figures(left: Left, key: str) -> list[float]:
    return [float(row[key]) for row in left.rows if row.get(key)]


def _rank_peaks(folder: Path) -> dict[str, float]:
    """The peak of each rank in the last epoch."""
    last = list(read_metrics(folder))[-1:]
    return {k: v for metrics in last for k, v in metrics.items() if re.fullmatch(r"memory/(rank\d+/)?peak_bytes", k)}


def _nccl(left: Left) -> str:
    """What NCCL said of itself in the logs of the ranks."""
    logs = [
        log.read_text(errors="replace") for row in left.rows for log in (left.trial(row) / "logs").glob("rank*.log")
    ]
    versions = sorted({match for log in logs for match in _NCCL_VERSION.findall(log)})
    return f" (NCCL {', '.join(versions)})" if versions else ""
