"""The planted faults fit the code: each can be planted, and its test exists."""

from __future__ import annotations

import ast

from tests.faults import FAULTS, ROOT
from tests.nightly.conftest import SLOWED


def test_each_fault_applies_to_the_code() -> None:
    """And has a name and a test of its own."""
    wrong = []
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text()
        if text.count(fault.right) != 1 or fault.wrong == fault.right:
            wrong.append(f"{fault.name}: its text is {text.count(fault.right)} times in {fault.file}")
        elif fault.file.endswith(".py"):
            ast.parse(text.replace(fault.right, fault.wrong))
        file, _, test = fault.test.partition("[")[0].partition("::")
        if (f"def {test}(" if test else "def test_") not in (ROOT / "tests" / file).read_text():
            wrong.append(f"{fault.name}: {fault.test} does not exist")
    assert not wrong, "rewrite these faults for the new code, do not remove them:\n" + "\n".join(wrong)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_change_that_slows_a_night_applies_to_the_code() -> None:
    """Only a tier that trains plants it."""
    name, text = SLOWED
    assert (ROOT / name).read_text().count(text) == 1, "rewrite SLOWED for the new code"
