"""What is wrong on a command line is refused at once, in one line that names it: by the rows of tests/messages.txt."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_lab.config import CombinationError
from tests import refusals
from tests.refusals import COMBINATION, COMMANDS, FORECAST, RULE, SWEEP, TRIAL, Refusal

ROWS = {row.words: row for row in refusals.read_table()}
RULES = [row for row in ROWS.values() if row.heading in (RULE, COMBINATION)]
REFUSALS = [row for row in ROWS.values() if row not in RULES]


def first_asked(number: int, row: Refusal) -> str:
    """Return one of a row's commands. A forecast, which answers soonest, gets three of five that each refuses."""
    if len(row.commands) == len(COMMANDS):
        return (FORECAST, TRIAL, FORECAST, SWEEP, FORECAST)[number % 5]
    return row.commands[number % len(row.commands)]


FIRST = [(row.words, first_asked(number, row)) for number, row in enumerate(REFUSALS)]


def is_wrong(answer: dict[str, Any]) -> bool:
    """Return whether an answer is not the row's one line, or came late: after slow imports, or with a folder."""
    row = ROWS[answer["words"]]
    refused = (answer["status"], answer["out"], answer["message"]) == (2, "", f"{row.message}\n")
    return not refused or bool({*answer["imported"]} - {*row.imports}) or bool(answer["left"])


def test_each_command_refuses_at_once_and_names_key_and_value():
    """Before anything slow is imported, and without a folder. Each row is asked of one of its commands."""
    given = refusals.answers(FIRST)
    assert {answer["command"] for answer in given} == {*COMMANDS} and len(given) == len(REFUSALS) > 140
    assert [answer for answer in given if is_wrong(answer)] == []


@pytest.mark.full
def test_the_other_commands_refuse_it_in_the_same_words():
    """And one command every fifth row of a rule; `test_rules_name_key_and_value` asks the rules themselves for all."""
    others = [(row.words, each) for row in REFUSALS for each in row.commands if (row.words, each) not in FIRST]
    last = sorted(RULES[::5], key=lambda row: row.imports)  # in one process: what one imports the next ones have
    given = refusals.answers([*others, *((row.words, FORECAST) for row in last)])
    assert [answer for answer in given if is_wrong(answer)] == []


@pytest.mark.parametrize("heading", [RULE, COMBINATION])
def test_rules_name_key_and_value(heading: str):
    """And which of them a grid leaves out, as a combination without a meaning."""
    rows = [row for row in RULES if row.heading == heading]
    found = [(refusals.answer_rule(row), row.message) for row in rows]
    assert [str(error) for error, _ in found] == [message for _, message in found]
    assert {isinstance(error, CombinationError) for error, _ in found} == {heading == COMBINATION}


def test_no_message_repeats_a_password():
    assert sum(refusals.PASSWORD in words for words in ROWS) == refusals.GOLDEN.read_text().count(refusals.PASSWORD) > 3
