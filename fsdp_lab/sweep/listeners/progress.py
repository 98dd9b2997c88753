"""How far trials are."""

from __future__ import annotations

from fsdp_lab.sweep.state import TrialState


def share_done(state: TrialState) -> float:
    """Return the share of a trial's epochs that it has trained; 1 once it has ended."""
    return 1.0 if state.ended else min(1.0, state.metrics.get("epoch", 0) / state.trial.config.training.epochs)
