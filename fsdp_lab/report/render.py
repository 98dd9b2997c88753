"""The templates of a report with their filters, and the texts of reasons."""

from __future__ import annotations

import math
import re
from functools import cache
from inspect import getmembers, isfunction
from typing import Any

from fsdp_lab.config.metrics import mib
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.config.wording import count, resources_text
from fsdp_lab.record.reasons import Reason
from fsdp_lab.record.trial import words
from fsdp_lab.report import texts
from fsdp_lab.report.choice import PLAIN

# The first timed step: after the configured warm-up, and two steps that are followed for memory.
_STEPS_TO_TIME = TrainingConfig().timing_warmup_steps + 2 + 1


def text_of(template: str, macro: str, *values: Any) -> str:
    """Return the text of a macro. A missing value is an error."""
    return str(getattr(environment(False).get_template(template).module, macro)(*values))


def lines_of(template: str, macro: str, *values: Any) -> list[str]:
    """Return the lines of a macro's text that are not empty."""
    return [line.rstrip() for line in text_of(template, macro, *values).split("\n") if line.strip()]


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


@cache
def environment(html: bool, package: str = "fsdp_lab.report") -> Any:
    """Return jinja2's environment for a package's templates; `html`: values are escaped, `code` in backticks marked."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined
    from markupsafe import Markup, escape

    def code(text: str) -> Markup:
        return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))).replace("\n", "<br>"))

    made = Environment(
        loader=PackageLoader(package), autoescape=html, undefined=Undefined if html else StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "breakable": lambda name: Markup(str(escape(name)).replace("_", "_<wbr>")),
        "code": code,
        "count": count,
        "is_known": math.isfinite,
        "mib": mib,
        "resources": resources_text,
        "words": words,
    }
    figures = dict(getmembers(texts, isfunction))
    made.filters |= figures
    made.globals |= {**figures, "plain": words(PLAIN), "steps_to_time": _STEPS_TO_TIME}
    return made
