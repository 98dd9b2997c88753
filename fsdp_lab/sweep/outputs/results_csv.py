"""`results.csv`: a row a trial, with the latest of each figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdp_lab.config.serialize import value_text
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.report.plain_check import check_against_plain
from fsdp_lab.report.render import reason_text
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.sweep import Sweep


def rows_of(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield the row of each trial."""
    front, plain = sweep.front(), check_against_plain(sweep.trials, sweep.plain_loops)
    for number, state in enumerate(sweep.trials):
        waits = state.status is TrialStatus.starting  # for its workers
        yield {
            **{key: str(figure).removesuffix(".0") for key, figure in state.figures.items()},
            **{key: value_text(setting(state.trial, key)) for key in sweep.swept},
            "trial": number,
            "status": TrialStatus.waiting if waits else state.status,
            "plain_loop": "differs" if number in plain.different else "agrees" if number in plain.agreeing else "",
            "note": " ".join([*(f"Resumed with {word}." for word in state.trial.changed), *state.notes]),
            "pareto": "yes" if number in front else "",
            "seconds": None if state.seconds is None else round(state.seconds, 2),
            "error": reason_text(state.reason),
            "run_id": state.run_id,
            "folder": state.trial.folder,
        }
