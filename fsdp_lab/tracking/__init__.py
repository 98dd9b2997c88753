"""MLflow: the only room that imports it, and only inside `Tracker.open`, because that import takes 3 s."""

from fsdp_lab.tracking.store import TrackingError
from fsdp_lab.tracking.tracker import Tracker

__all__ = ["Tracker", "TrackingError"]
