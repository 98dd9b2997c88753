"""`results.csv`: a row a trial, with the latest of each figure."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.files import write_text
from fsdp_lab.metrics import table_columns

if TYPE_CHECKING:
    import pandas as pd

_FILE = "results.csv"


def write_results(folder: Path, axes: Sequence[str], frame: pd.DataFrame) -> None:
    """Write the table of a sweep.

    Args:
        axes: the keys that differ between trials.
        frame: a row a trial, indexed by its number; what no column of the file has is left out.

    Raises:
        OSError: the folder cannot be written.
    """
    measured = [column.key for column in table_columns("csv")]
    columns = ["status", *axes, *measured, "pareto", "seconds", "error", "run_id", "folder"]
    whole = frame.reindex(columns=columns).convert_dtypes()  # else an epoch would be 2.0
    write_text(folder / _FILE, whole.to_csv(lineterminator="\n"), parents=False)


def read_run_ids(folder: Path) -> dict[str, str]:
    """Return the number of each trial -> its MLflow run; without those that are missing or damaged."""
    try:
        with (folder / _FILE).open(newline="") as rows:
            ids = {row["trial"]: row["run_id"] for row in csv.DictReader(rows)}
    except (OSError, KeyError, ValueError, csv.Error):
        return {}
    return {number: run_id for number, run_id in ids.items() if re.fullmatch("[0-9a-f]{32}", run_id or "")}
