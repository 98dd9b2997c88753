"""What people read, replaced: every sentence is `x`."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jinja2

from fsdp_lab.config import UserError
from fsdp_lab.sweep.outputs.console import Console
from fsdp_lab.training.divergence import DivergedError


class Words:
    """Stands for the macros of a template."""

    def __getattr__(self, name: str) -> object:
        return lambda *values: "x"


def other_words() -> ExitStack:
    """Replace the sentences of errors, reasons, answers and the terminal, until the stack is closed."""
    log, get_template, replaced = Console.log, jinja2.Environment.get_template, ExitStack()

    def template(environment: jinja2.Environment, name: str, *given: Any, **more: Any) -> Any:
        # a page that imports the words of its own heads names itself
        is_of_sentences = name in ("words.j2", "reasons.j2", "forecast_words.j2") and not given
        return SimpleNamespace(module=Words()) if is_of_sentences else get_template(environment, name, *given, **more)

    for patch in (
        mock.patch.object(Console, "log", lambda console, text: log(console, "x")),
        mock.patch.object(UserError, "__str__", return_value="x"),
        mock.patch.object(DivergedError, "__str__", return_value="x"),
        mock.patch.object(jinja2.Environment, "get_template", template),
    ):
        replaced.enter_context(patch)
    return replaced
