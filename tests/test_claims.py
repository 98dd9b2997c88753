"""The ledger of promises, docs/claims.md: each row names tests that exist, and the tier that holds them."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT, TIERS

_ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<held_by>[^|]+) \| `make (?P<tier>test|ci|test-all)` \|$")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


ORDER = ("test", "ci", "test-all")
# Not collected without a browser.
NEED_MORE = ("tests/ui/test_report.py", "tests/ui/test_mlflow_ui.py")


def rows() -> list[tuple[str, list[tuple[str, str]], str]]:
    """Return each promise with its tests, as file and function ("" for all of the file), and its tier."""
    text = (ROOT / "docs" / "claims.md").read_text().partition("\n## Figures\n")[0]
    lines = text.splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith(("| promise |", "| --- |"))]
    found = []
    for line in table:
        row = _ROW.match(line)
        assert row, f"not `| promise | tests | tier |`: {line}"
        found.append((row["promise"], _TEST.findall(row["held_by"]), row["tier"]))
    return found


def test_each_promise_is_held_by_tests_that_exist() -> None:
    wrong = []
    for promise, tests, _ in rows():
        missing = [file for file, _ in tests if not (ROOT / file).is_file()]
        missing += [
            f"{file}::{name}"
            for file, name in tests
            if name and (ROOT / file).is_file() and f"def {name}(" not in (ROOT / file).read_text()
        ]
        if missing or not tests:
            wrong.append(f"{promise}: {', '.join(missing) or 'names no test'}")
    assert not wrong, "give each promise a test, or withdraw it:\n" + "\n".join(wrong)


def test_each_promise_is_in_the_tier_that_it_names(pytestconfig: pytest.Config) -> None:
    """The first tier in which each of its tests runs, at least in part."""
    tiers = pytestconfig.stash[TIERS]
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    if not files - set(NEED_MORE) <= {name.partition("::")[0] for name in tiers}:
        pytest.skip("only where all tests are collected: pytest tests")
    wrong = []
    for promise, tests, tier in rows():
        firsts = [min(where, key=ORDER.index) for file, name in tests if (where := _tiers_of(tiers, file, name))]
        needed = max(firsts, key=ORDER.index, default="")
        if needed != tier and (needed or tests[0][0] not in NEED_MORE):
            wrong.append(f"{promise}: make {tier}, but its tests are in make {needed}")
    assert not wrong, "\n".join(wrong)


def _tiers_of(tiers: dict[str, set[str]], file: str, name: str) -> list[str]:
    if name:
        return sorted(tiers.get(f"{file}::{name}", set()))
    return sorted({tier for test, those in tiers.items() if test.startswith(f"{file}::") for tier in those})
