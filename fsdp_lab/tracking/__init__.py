"""MLflow: the only room that imports it. One writer, a thread of the driver. Imports `config` and `storage`.

Start with `projection.py`, which compares the record with the store and sends what is missing by `writes.py`.
`read.py` finds a sweep's run and its files.
"""

from fsdp_lab.tracking.projection import Projection, WantedRun
from fsdp_lab.tracking.read import annotate, annotate_answer, find_sweep_run
from fsdp_lab.tracking.store import TrackingError, runs_url

__all__ = [
    "Projection", "TrackingError", "WantedRun", "annotate", "annotate_answer", "find_sweep_run", "runs_url",
]  # fmt: skip
