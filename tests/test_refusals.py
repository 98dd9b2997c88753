"""What is wrong on a command line is refused at once, with one message that names key and value: by the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from fsdp_lab.config import CombinationError
from tests.refusals import (
    COMMANDS,
    FORECAST,
    GOLDEN,
    PASSWORD,
    Answer,
    Refusal,
    answer_rule,
    answers,
    combinations,
    messages,
    refusals,
    rules,
    whole_messages,
    written,
)


@pytest.fixture(scope="module")
def given() -> list[Answer]:
    """What one of its commands answers to each row, in turn a trial, a forecast and a sweep."""
    given = {a.words: a for command, rows in in_turn(0).items() for a in answers(rows, [command])}
    return [given[row.words] for row in refusals()]


def in_turn(first: int) -> dict[str, list[Refusal]]:
    """Return the rows for each command: a row's commands are counted from `first`, and from one row to the next."""
    turns: dict[str, list[Refusal]] = {command: [] for command in COMMANDS}
    for number, row in enumerate(refusals()):
        if first < len(row.commands):
            turns[row.commands[(number + first) % len(row.commands)]].append(row)
    return turns


def check(given: Iterable[Answer]) -> None:
    """Check every answer, and report all that are wrong: each is one line, the same for every command."""
    rows = {row.words: row for row in [*refusals(), *rules(), *combinations()]}
    expected, wrong = whole_messages(), []
    for answer in given:
        row = rows[answer.words]
        lacks = [name for name in row.names if name not in answer.message]
        refused = (answer.status, answer.out, answer.message) == (2, "", f"{expected.get(answer.words)}\n")
        if lacks or not refused or {*answer.imported} - {*row.imports} or answer.left:
            wrong.append(f"{answer}, expected {expected.get(answer.words)}, lacks {lacks}")
    assert not wrong, "\n".join(wrong)


def test_each_command_refuses_at_once_and_names_key_and_value(given: list[Answer]):
    """In one line, before anything slow is imported and without a folder."""
    assert {answer.command for answer in given} == {*COMMANDS}
    check(given)


@pytest.mark.full
def test_the_other_commands_refuse_it_in_the_same_words():
    for turn in (1, 2):
        for command, rows in in_turn(turn).items():
            check(answers(rows, [command]))


@pytest.mark.full
def test_a_command_refuses_what_a_rule_does():
    """Every fifth of them: `test_rules_name_key_and_value` asks the rules themselves for all."""
    check(answers([*rules(), *combinations()][::5], [FORECAST]))


@pytest.mark.parametrize(("rows", "left_out"), [(rules, False), (combinations, True)])
def test_rules_name_key_and_value(rows: Callable[[], Iterable[Refusal]], left_out: bool):
    """And which of them a grid leaves out, as a combination without a meaning."""
    wrong = []
    for row in rows():
        error = answer_rule(row)
        if any(name not in str(error) for name in row.names) or isinstance(error, CombinationError) != left_out:
            wrong.append(f"{row}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_whole_messages_are_those_of_the_file(given: list[Answer]):
    """`python -m tests.refusals` writes it anew: look at what has changed."""
    found = messages(given)
    assert written(found) == GOLDEN.read_text()
    assert whole_messages() == found and all("\n" not in message for message in found.values())


def test_no_message_repeats_a_password(given: list[Answer]):
    found = messages(given)
    assert sum(PASSWORD in words for words in found) > 3
    assert [message for message in found.values() if PASSWORD in message] == []
