"""MLflow: the only room that imports it. One writer, the driver."""

from fsdp_lab.tracking.read import fetch_artifact, folder_of_run
from fsdp_lab.tracking.store import TrackingError
from fsdp_lab.tracking.tracker import Tracker

__all__ = ["Tracker", "TrackingError", "fetch_artifact", "folder_of_run"]
