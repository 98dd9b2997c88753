"""The sentences for why a trial did not finish: of the terminal, `results.csv`, MLflow and the report alike."""

from __future__ import annotations

from functools import cache
from typing import Any

from fsdp_lab.record.reasons import Reason
from fsdp_lab.report.render import environment


def reason_text(reason: Reason | None) -> str:
    """Return why a trial did not finish, in a line; "" without a reason."""
    from jinja2 import UndefinedError

    if reason is None:
        return ""
    try:
        return str(words_of_reasons().reason(reason.code, reason.values))
    except (UndefinedError, TypeError, ValueError, AttributeError):  # a damaged file
        return reason.code


def needs_text(**shortage: float) -> str:
    """Return text such as `needs 12.00 MiB of 8.00 MiB per device, by its forecast (...)`.

    Args:
        **shortage: the values of `Code.does_not_fit`.
    """
    return str(words_of_reasons().needs(shortage))


def words_of_reasons() -> Any:
    """Return the template of these sentences; a value that it needs and that is missing is an error."""
    return _strict_environment().get_template("reasons.j2").module


@cache
def _strict_environment() -> Any:
    from jinja2 import StrictUndefined

    return environment(False).overlay(undefined=StrictUndefined)
