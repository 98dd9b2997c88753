"""MLflow: the only package that imports it. One writer, a thread of the driver.

`projection.py` compares the record with the store and sends what is missing, `writes.py` makes the single writes,
`read.py` finds a sweep's run and its files.
"""

from fsdp_lab.tracking.projection import Projection, WantedRun
from fsdp_lab.tracking.read import annotate, annotate_answer, fetch_artifact, find_sweep_run
from fsdp_lab.tracking.store import TrackingError, runs_url

__all__ = [
    "Projection", "TrackingError", "WantedRun", "annotate", "annotate_answer", "fetch_artifact", "find_sweep_run",
    "runs_url",
]  # fmt: skip
