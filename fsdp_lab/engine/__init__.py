"""One trial as a Ray Train job: cluster, workers, failures. Ray is imported inside the calls."""
