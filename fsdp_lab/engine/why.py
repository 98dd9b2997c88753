"""Why a trial failed whose ranks left no failure: by Ray's error."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from pathlib import Path

from fsdp_lab.engine.attempts import failed_to_be_placed, failed_to_start
from fsdp_lab.engine.nodes import lost, nodes_asked
from fsdp_lab.record.failures import read_failures
from fsdp_lab.record.reasons import Code, Reason

_TAIL_LINES = 50  # of a log, for the report of a failure


def why(
    error: Exception, each: Mapping[str, float], num_workers: int, wait_timeout_s: float, known: Collection[str]
) -> Reason:
    """Return the meaning of Ray's error.

    Args:
        error: Ray's.
        each: resources of a worker.
        num_workers: of the trial.
        wait_timeout_s: `cluster.wait_timeout_s`.
        known: ids of the nodes that the sweep has seen.
    """
    if failed_to_be_placed(error):
        import ray

        return Reason.of(
            Code.no_place,
            num_workers=num_workers,
            each=dict(each),
            wait_timeout_s=wait_timeout_s,
            total=ray.cluster_resources(),
            free=ray.available_resources(),
            nodes=_lost(known),
        )
    if failed_to_start(error):
        return Reason.of(Code.not_started, nodes=_lost(known))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Reason.of(Code.job_failed, text=(lines[-1] if lines else type(error).__name__)[:300])


def _lost(known: Collection[str]) -> list[str]:
    return [str(node) for node in lost(known, nodes_asked())]


def report_of(folder: Path, error: Exception) -> str:
    """Return the traceback of the rank that failed first, or else the job's own, and the end of its log."""
    failures = read_failures(folder)
    text = (failures[0].traceback if failures else "") or "".join(traceback.format_exception(error))
    log = folder / "logs" / f"rank{failures[0].rank if failures else 0}.log"
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if log.exists() else []
    return "\n".join([text, f"--- the end of {log.relative_to(folder)} ---", *lines, ""])
