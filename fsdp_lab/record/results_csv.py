"""`results.csv`: one row per trial, with the latest value of each metric."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.config.metrics import table_columns
from fsdp_lab.storage.files import write_text

_FILE = "results.csv"


def write_results(folder: Path, axes: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the table of a sweep.

    Args:
        axes: the keys that differ between trials.
        rows: one per trial; values without a column are left out.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = list(rows)
    measured = [column.key for column in table_columns("csv", (key for row in rows for key in row))]
    columns = ["trial", "status", *axes, *measured, "plain_loop", "pareto", "seconds"]
    columns += ["error", "note", "run_id", "folder"]
    text = io.StringIO()
    table = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(folder / _FILE, text.getvalue(), parents=False)


def read_run_ids(folder: Path) -> dict[str, str]:
    """Return the number of each trial -> its MLflow run; without those that are missing or damaged."""
    try:
        with (folder / _FILE).open(newline="") as rows:
            ids = {row["trial"]: row["run_id"] for row in csv.DictReader(rows)}
    except (OSError, KeyError, ValueError, csv.Error):
        return {}
    return {number: run_id for number, run_id in ids.items() if re.fullmatch("[0-9a-f]{32}", run_id or "")}
