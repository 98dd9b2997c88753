"""The sentences for why a trial did not finish: of the terminal, `results.csv`, MLflow and the report alike."""

from __future__ import annotations

from fsdp_lab.record.reasons import Reason
from fsdp_lab.report.render import text_of


def reason_text(reason: Reason | None) -> str:
    """Return why a trial did not finish, in a line; "" without a reason."""
    from jinja2 import UndefinedError

    try:
        return text_of("reasons.j2", "reason", reason.code, reason.values) if reason else ""
    except (UndefinedError, TypeError, ValueError, AttributeError):  # a damaged file
        return reason.code if reason else ""


def needs_text(**shortage: float) -> str:
    """Return text such as `needs 12.00 MiB of 8.00 MiB per device, by its forecast (...)`.

    Args:
        **shortage: the values of `Code.does_not_fit`.
    """
    return text_of("reasons.j2", "needs", shortage)
