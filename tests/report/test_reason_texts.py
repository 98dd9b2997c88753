"""Sentences for why a trial did not finish. That each reads as it did is in the golden files and in test_fates.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
import pytest

from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.reason_texts import reason_text


def test_a_trial_that_fails_as_another_names_its_own_error_if_it_differs():
    assert reason_text(Reason.of(Code.same_as, trial=3)) == "for the same reason as trial 3"
    other = Reason.of(Code.same_as, trial=3, text="/nowhere_b is not a folder")
    assert reason_text(other) == "for the same reason as trial 3: /nowhere_b is not a folder"


def test_hundreds_of_reasons_compile_their_template_once(monkeypatch: pytest.MonkeyPatch):
    compiled: list[object] = []
    as_it_is: Callable[..., Any] = jinja2.Environment.compile

    def compile_(self: jinja2.Environment, *args: Any, **settings: Any) -> Any:
        compiled.append(self)
        return as_it_is(self, *args, **settings)

    monkeypatch.setattr(jinja2.Environment, "compile", compile_)
    for trial in range(10):
        reason_text(Reason.of(Code.same_as, trial=trial))
    assert len(compiled) <= 1
