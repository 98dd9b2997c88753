"""The ledger of promises, docs/claims.md: each row names test functions that exist, and the tier that holds them."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT, TIERS

_ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<held_by>[^|]+) \| `make (?P<tier>test|ci|test-all)` \|$")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
ORDER = ("test", "ci", "test-all")


def rows() -> list[tuple[str, list[tuple[str, str]], str]]:
    """Return each promise with its tests, as file and function, and its tier."""
    lines = (ROOT / "docs" / "claims.md").read_text().partition("\n## Figures\n")[0].splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith(("| promise |", "| --- |"))]
    found = []
    for line in table:
        row = _ROW.match(line)
        assert row, f"not `| promise | tests | tier |`: {line}"
        found.append((row["promise"], _TEST.findall(row["held_by"]), row["tier"]))
    return found


def test_each_promise_is_held_by_test_functions_that_exist() -> None:
    assert [promise for promise, tests, _ in rows() if not tests] == [], "give each promise a test, or withdraw it"
    named = {test for _, tests, _ in rows() for test in tests}
    gone = {(file, name) for file, name in named if not name or f"def {name}(" not in (ROOT / file).read_text()}
    assert gone == set(), "give their promises another test, or withdraw them"


def test_each_promise_is_in_the_tier_that_it_names(pytestconfig: pytest.Config) -> None:
    """In the tier of a row all cases of its tests run, but for those of later tiers that its sentence names."""
    tiers = pytestconfig.stash[TIERS]
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    not_collected = files - {name.partition("::")[0] for name in tiers}
    if any("/ui/" not in file for file in not_collected):
        pytest.skip("only where all tests are collected: pytest tests")
    wrong = []
    for promise, tests, tier in rows():
        of_cases = [tiers[f"{file}::{name}"] for file, name in tests if file not in not_collected]
        later = {each for cases in of_cases for each in cases if ORDER.index(each) > ORDER.index(tier)}
        first = max((min(cases, key=ORDER.index) for cases in of_cases), key=ORDER.index, default=tier)
        last = max((each for cases in of_cases for each in cases), key=ORDER.index, default=tier)
        unnamed = [each for each in later if f"`make {each}`" not in promise]
        gone = [each for each in ORDER if f"`make {each}`" in promise and not any(each in cases for cases in of_cases)]
        if unnamed or gone or first in later or ORDER.index(tier) > ORDER.index(last):
            where = f"cases of its tests are in {sorted(later) or last}, none in {gone}"
            wrong.append(f"{promise}: make {tier}, but {where}")
    assert not wrong, "\n".join(wrong)
