"""How far trials are, and what lasts unusually long in them."""

from __future__ import annotations

import time
from pathlib import Path

from fsdp_lab.engine.stacks import long_s
from fsdp_lab.record.trial_files import read_progress
from fsdp_lab.report.reason_texts import stuck_text
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.wording import duration

_DUMP_S = 8.0  # by then its ranks have told where they are, or will not


def share_done(state: TrialState) -> float:
    """Return the share of a trial's epochs that it has trained; 1 once it has ended."""
    return 1.0 if state.ended else min(1.0, state.metrics.get("epoch", 0) / state.trial.config.training.epochs)


class Watch:
    """Notices which phase or step of a running trial lasts unusually long, by this machine's clock."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[str | int | None, float]] = {}
        self._reported: set[tuple[int, str]] = set()

    def unusual(self, number: int, folder: Path, timeout_s: float | None) -> str | None:
        """Return what lasts unusually long, and where its rank is; once for each phase, and once for all steps."""
        progress, now = read_progress(folder), time.monotonic()
        doing = progress.phase or progress.step
        if self._since.get(number, (None, 0.0))[0] != doing:
            self._since[number] = doing, now
        lasts_s = now - self._since.get(number, (None, now))[1]
        kind = progress.phase or "step"
        beyond_s = lasts_s - long_s(timeout_s)
        if doing is None or (number, kind) in self._reported or beyond_s < 0:
            return None
        if not progress.stuck and beyond_s < _DUMP_S:
            return None
        self._reported.add((number, kind))
        where = f"; {stuck_text(**progress.stuck)}" if progress.stuck else ""
        return f"{progress.phase or f'step {progress.step}'} has lasted {duration(lasts_s)}{where}"
