"""Why a trial failed, in a line: for ranks without a message of their own, Ray's takes a paragraph."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from pathlib import Path

from fsdp_lab.engine.attempts import failed_to_be_placed, failed_to_start
from fsdp_lab.engine.nodes import Node, lost, nodes_asked, words_for
from fsdp_lab.record.trial_files import read_failures
from fsdp_lab.wording import count

_TAIL_LINES = 50  # of a log, for the report of a failure


def why(
    error: Exception, each: Mapping[str, float], num_workers: int, wait_timeout_s: float, known: Collection[str]
) -> str:
    """Return the meaning of Ray's error in a line.

    Args:
        error: Ray's.
        each: resources of a worker.
        num_workers: of the trial.
        wait_timeout_s: `cluster.wait_timeout_s`.
        known: ids of the nodes that the sweep has seen.
    """
    if failed_to_be_placed(error):
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        return unplaced_message(each, num_workers, wait_timeout_s, total, free, lost(known, nodes_asked()))
    if failed_to_start(error):
        gone = " and ".join(f"node {node} went down" for node in lost(known, nodes_asked()))
        return f"a worker's process ended while it started{f': {gone}' if gone else ', as if killed'}"
    return first_line(error)


def unplaced_message(
    each: Mapping[str, float],
    num_workers: int,
    wait_timeout_s: float,
    total: Mapping[str, float],
    free: Mapping[str, float],
    gone: Collection[Node],
) -> str:
    """Return which workers found no resources, which nodes are missing, and the remedy."""
    room = " and ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in each)
    begin = (
        f"cannot place {count(num_workers, 'worker')} with {words_for(each)} each within "
        f"cluster.wait_timeout_s={wait_timeout_s:g} s"
    )
    if not gone:
        return f"{begin}: {room} free; wait until others free resources, or raise cluster.wait_timeout_s"
    names = " and ".join(f"node {node}" for node in gone)
    have = "has" if len(gone) == 1 else "have"
    return f"{begin}: {names} went down and {have} not come back; start Ray there again, or use fewer workers"


def report_of(folder: Path, error: Exception) -> str:
    """Return the traceback of the rank that failed first, or else the job's own, and the end of its log."""
    failures = read_failures(folder)
    text = (failures[0]["traceback"] if failures else "") or "".join(traceback.format_exception(error))
    log = folder / "logs" / f"rank{failures[0]['rank'] if failures else 0}.log"
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if log.exists() else []
    return "\n".join([text, f"--- the end of {log.relative_to(folder)} ---", *lines, ""])


def first_line(error: BaseException) -> str:
    """Return the last meaningful line of an error, cut to fit a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
