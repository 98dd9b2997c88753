"""What is wrong on a command line is refused at once, in one line that names it: by the rows of tests/messages.txt."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fsdp_lab.config import CombinationError
from tests.refusals import (
    COMBINATION,
    COMMANDS,
    FORECAST,
    GOLDEN,
    PASSWORD,
    RULE,
    SWEEP,
    TRIAL,
    Answer,
    Refusal,
    answer_rule,
    answers,
    read_table,
)

RULES = [row for row in read_table() if row.heading in (RULE, COMBINATION)]
REFUSALS = [row for row in read_table() if row not in RULES]


def first_asked(number: int, row: Refusal) -> str:
    """Return one of a row's commands. A forecast, which answers soonest, gets three of five that each refuses."""
    if len(row.commands) == len(COMMANDS):
        return (FORECAST, TRIAL, FORECAST, SWEEP, FORECAST)[number % 5]
    return row.commands[number % len(row.commands)]


FIRST = [(row, first_asked(number, row)) for number, row in enumerate(REFUSALS)]


def check(given: Iterable[Answer]) -> None:
    """Check every answer, and report all that are wrong: each is one line, the same for every command."""
    rows, wrong = {row.words: row for row in read_table()}, []
    for answer in given:
        row = rows[answer.words]
        refused = (answer.status, answer.out, answer.message) == (2, "", f"{row.message}\n")
        if not refused or {*answer.imported} - {*row.imports} or answer.left:
            wrong.append(f"{answer}, expected {row.message}")
    assert not wrong, "\n".join(wrong)


def test_each_command_refuses_at_once_and_names_key_and_value():
    """Before anything slow is imported, and without a folder. Each row is asked of one of its commands."""
    given = answers(FIRST)
    assert {answer.command for answer in given} == {*COMMANDS} and len(given) == len(REFUSALS) > 140
    check(given)


@pytest.mark.full
def test_the_other_commands_refuse_it_in_the_same_words():
    """And one command every fifth row of a rule; `test_rules_name_key_and_value` asks the rules themselves for all."""
    others = [(row, command) for row in REFUSALS for command in row.commands if (row, command) not in FIRST]
    check(answers([*others, *((row, FORECAST) for row in RULES[::5])]))


@pytest.mark.parametrize("heading", [RULE, COMBINATION])
def test_rules_name_key_and_value(heading: str):
    """And which of them a grid leaves out, as a combination without a meaning."""
    rows = [row for row in RULES if row.heading == heading]
    found = [(answer_rule(row), row.message) for row in rows]
    assert [str(error) for error, _ in found] == [message for _, message in found]
    assert {isinstance(error, CombinationError) for error, _ in found} == {heading == COMBINATION}


def test_no_message_repeats_a_password():
    typed = GOLDEN.read_text()
    assert sum(PASSWORD in row.words for row in read_table()) == typed.count(PASSWORD) > 3
