"""The planted faults fit the code: each can be planted, and its test exists."""

from __future__ import annotations

import ast

from tests.faults import FAULTS, ROOT


def test_each_fault_applies_to_the_code() -> None:
    wrong = []
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text()
        if text.count(fault.right) != 1 or fault.wrong == fault.right:
            wrong.append(f"{fault.name}: its text is {text.count(fault.right)} times in {fault.file}")
        elif fault.file.endswith(".py"):
            ast.parse(text.replace(fault.right, fault.wrong))
    assert not wrong, "rewrite these faults for the new code, do not remove them:\n" + "\n".join(wrong)


def test_each_fault_has_a_name_and_a_test_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        file, _, test = fault.test.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert f"def {test.partition('[')[0]}(" in text if test else text, f"{fault.name}: {fault.test} does not exist"
