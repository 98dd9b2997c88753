"""Sweeps: from overrides to trials, and the trials through Ray Tune."""
