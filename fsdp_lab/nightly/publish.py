"""Publishes the verdict on a night."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.files import write_text
from fsdp_lab.nightly.nights import Night
from fsdp_lab.nightly.notify import notify
from fsdp_lab.nightly.study import Study
from fsdp_lab.nightly.verdict import gate_table, gate_text, gate_words
from fsdp_lab.terminal import open_console
from fsdp_lab.tracking import TrackingError, annotate


def publish(study: Study, night: Night, log: Callable[[str], None]) -> None:
    """Publish the verdict: to a file, MLflow, the webhook and the terminal."""
    gate = gate_text(night)
    folder = study.folder / night.id
    write_text(folder / "gate.md", gate)
    tag(study, night, [folder / "gate.md"], log)
    if problem := notify(study.nightly.notify, verdict_of(study, night, folder)):
        log(problem)
    log(gate_words(night).replace("`", "").rstrip())
    if night.is_compared:
        open_console().print(gate_table(night))


def verdict_of(study: Study, night: Night, folder: Path) -> dict[str, Any]:
    """Return the content for the webhook."""
    return {
        "study": study.name,
        "night": night.id,
        "verdict": night.verdict,
        "baseline": night.baseline,
        "regressions": [finding for finding in night.findings if finding["regression"]],
        "commit": night.commit,
        "machine": night.machine,
        "run_id": night.run_id,
        "folder": str(folder),
    }


def tag(study: Study, night: Night, files: Sequence[Path], log: Callable[[str], None]) -> None:
    """Tag the sweep's MLflow run with the verdict, and add the files."""
    if not night.run_id:
        return
    moved = "; ".join(f"{f['setting']}: {f['metric']} {f['change']}" for f in night.findings if f["regression"])
    tags = {"nightly.study": study.name, "nightly.night": night.id, "nightly.verdict": night.verdict}
    tags |= {"nightly.baseline": night.baseline} if night.baseline else {}
    tags |= {"nightly.regressions": moved[:5000]} if moved else {}
    tags |= {f"nightly.accepted_{key}": value for key, value in (night.accepted or {}).items()}
    try:
        # what differs first: MLflow's page shows a dozen letters
        annotate(study.tracking, night.run_id, tags, files, name=f"{night.verdict} {night.id} {study.name}")
    except TrackingError as error:
        log(f"the verdict did not reach MLflow: {error}")
