"""Executors of a sweep's trials: Ray Tune, or this process."""
