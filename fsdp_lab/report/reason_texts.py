"""The sentences for why a trial did not finish: of the terminal, `results.csv`, MLflow and the report alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_lab.metrics import mib
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.texts import figures_text
from fsdp_lab.wording import count, resources_text

Values = Mapping[str, Any]

_ELSEWHERE = "set hydra.run.dir (hydra.sweep.dir with -m)"


def reason_text(reason: Reason | None) -> str:
    """Return why a trial did not finish, in a line; "" without a reason."""
    if reason is None:
        return ""
    try:
        return TEXTS[reason.code](reason.values)
    except (LookupError, TypeError, ValueError, AttributeError):  # a damaged file
        return reason.code


def _who(v: Values) -> str:
    return f"rank {v['rank']}" + (f", {v['at']}" if "at" in v else "")


def _raised(v: Values) -> str:
    return f"{_who(v)}: {v['error']}: {v['text']}" + (f" ({v['line']})" if "line" in v else "")


def _timed_out(v: Values) -> str:
    begun = f"step {v['step']:.0f} began" if "step" in v else f"{v['phase']} began" if "phase" in v else "its start"
    text = f"no progress for trial_timeout_s={v['limit_s']:g} s since {begun}; it was ended"
    return f"{text}; {stuck_text(**v['stuck'])}" if "stuck" in v else text


def stuck_text(rank: int, place: str, log: str) -> str:
    """Return where a rank is that all others wait for."""
    return f"rank {rank} is at {place}; its stack is in {log}"


def _disk_full(v: Values) -> str:
    who = f"rank {v['rank']}: " if "rank" in v else ""
    return f"{who}{v['folder']}: No space left on device; free the disk, or {_ELSEWHERE} to a folder on another disk"


def _no_place(v: Values) -> str:
    text = (
        f"cannot place {count(v['num_workers'], 'worker')} with {resources_text(v['each'])} each within "
        f"cluster.wait_timeout_s={v['wait_timeout_s']:g} s"
    )
    if "nodes" in v:
        have = "has" if len(v["nodes"]) == 1 else "have"
        return f"{text}: {_down(v)} and {have} not come back; start Ray there again, or use fewer workers"
    free, total = v.get("free", {}), v.get("total", {})
    room = " and ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in v["each"])
    return f"{text}: {room} free; wait until others free resources, or raise cluster.wait_timeout_s"


def _down(v: Values) -> str:
    return f"{' and '.join(f'node {node}' for node in v['nodes'])} went down"


def _not_started(v: Values) -> str:
    return f"a worker's process ended while it started{f': {_down(v)}' if 'nodes' in v else ', as if killed'}"


def _does_not_fit(v: Values) -> str:
    skips = f"forecast.keep={v['keep']} does not start it" if "keep" in v else "forecast.prune=true skips it"
    return f"{needs_text(v['needed_bytes'], v['capacity_bytes'], v['peak_bytes'])}; {skips}"


def needs_text(needed_bytes: float, capacity_bytes: float, peak_bytes: float) -> str:
    """Return text such as `needs 12.00 MiB of 8.00 MiB per device, by its forecast (...)`."""
    return (
        f"needs {mib(needed_bytes)} MiB of {mib(capacity_bytes)} MiB per device, by its forecast "
        f"(peak {mib(peak_bytes)}, the rest is an allowance)"
    )


def _too_slow(v: Values) -> str:
    text, end = f"predicted {figures_text(v['speed'])} samples/s", f"; forecast.keep={v['keep']} does not start it"
    if "error" not in v:
        ends = f"{figures_text(v['low'])} to {figures_text(v['high'])}"
        return f"{text} ({ends}), which is not among the most promising{end}"
    sure = v["error"]
    return (
        f"{text}, {v['share']:.1%} of the last of the most promising. Less than 1 / {1 + sure:.2f} = "
        f"{1 / (1 + sure):.1%} is too slow: predicted ratios have an error of up to ±{sure:.0%}{end}"
    )


def _forecast_failed(v: Values) -> str:
    return f"{v['text'].rstrip('.')}. The forecast found this; to train anyway, use forecast.enabled=false."


TEXTS: dict[Code, Callable[[Values], str]] = {
    Code.out_of_memory: _raised,
    Code.host_out_of_memory: lambda v: f"{_who(v)}: its process was killed: the host is out of memory",
    Code.user_error: lambda v: v["text"],
    Code.diverged: _raised,
    Code.error: _raised,
    Code.peer_lost: _raised,
    Code.timed_out: _timed_out,
    Code.crashed: lambda v: f"{_who(v)}: its process crashed: {v['signal']}; its stack is in {v['log']}",
    Code.killed: lambda v: f"{_who(v)}: its process ended without an error, as if killed",
    Code.node_lost: lambda v: f"{_who(v)}: its node {v['node']} went down",
    Code.disk_full: _disk_full,
    Code.no_place: _no_place,
    Code.not_started: _not_started,
    Code.job_failed: lambda v: v["text"],
    Code.folder_gone: lambda v: f"{v['folder']} is gone: it was removed or moved while the trial ran",
    Code.unwritable: lambda v: (
        f"{v['folder']} cannot be written ({v['error']}); make it writable, or {_ELSEWHERE} to a writable folder"
    ),
    Code.no_outcome: lambda v: "its process ended without an error: see the trial's logs",
    Code.sweep_failed: lambda v: v["text"],
    Code.forecast_failed: _forecast_failed,
    Code.same_as: lambda v: f"for the same reason as trial {v['trial']}",
    Code.does_not_fit: _does_not_fit,
    Code.too_slow: _too_slow,
}
