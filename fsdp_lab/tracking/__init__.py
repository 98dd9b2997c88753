"""MLflow: the only package that imports it. One writer, the driver.

`tracker.py` logs, `outbox.py` keeps the order while the store is away, `read.py` reads a sweep back.
"""

from fsdp_lab.tracking.read import annotate, fetch_artifact, fetch_record, find_sweep_run, folder_here, folder_of_run
from fsdp_lab.tracking.store import TrackingError, runs_url
from fsdp_lab.tracking.tags import command_of
from fsdp_lab.tracking.tracker import Tracker

__all__ = [
    "Tracker", "TrackingError", "annotate", "command_of", "fetch_artifact", "fetch_record", "find_sweep_run",
    "folder_here", "folder_of_run", "runs_url",
]  # fmt: skip
