"""What runs the trials of a sweep: Ray Tune, or this process."""
