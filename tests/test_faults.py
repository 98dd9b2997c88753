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
            continue
        if fault.file.endswith(".py"):
            ast.parse(text.replace(fault.right, fault.wrong))
    assert not wrong, "rewrite these faults for the new code, do not remove them:\n" + "\n".join(wrong)


def test_there_are_at_least_thirty_faults_with_names_and_tests() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    for fault in FAULTS:
        file, _, test = fault.test.partition("::")
        path = ROOT / "tests" / file
        assert path.is_file(), f"{fault.name}: {file} does not exist"
        assert not test or f"def {test.partition('[')[0]}(" in path.read_text(), f"{fault.name}: {test} does not exist"
