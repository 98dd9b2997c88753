"""A sweep with what its report makes of it: the rules that it is judged by, and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.answer import Answer, answer, rules_of
from fsdp_lab.report.settings import Rules


@dataclass(frozen=True)
class SweepData(SweepRecord):
    @property
    def rules(self) -> Rules:
        return rules_of(self)

    @cached_property
    def recommendation(self) -> Answer:
        return answer(self)
