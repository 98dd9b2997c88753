"""Private names of libraries stay in the one file of a package that has them: what the linter does not see of it."""

from __future__ import annotations

import re

from tests.conftest import ROOT

OWNERS = {"torch_private.py", "hf_private.py", "shortcut.py"}  # pyproject.toml has the same for SLF001 and PLC2701
# Names in texts, private modules, and modules that are private in spite of their names.
_USES = re.compile(
    r"""(?:attr|patch|patch\.object)\([^()]*["']((?!_fields)_[a-z]\w*)["']"""
    r"|^\s*(?:import|from) (\w[\w.]*\._[a-z]\w*|_[a-z]\w*|(?:ray\.train\.v2|torch\.testing)\b)",
    re.MULTILINE,
)


def test_no_file_uses_a_private_name_of_a_library():
    files = [*(ROOT / "fsdp_lab").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]
    used = {file.name: _USES.findall(file.read_text()) for file in files if file.name not in OWNERS}
    assert {name: names for name, names in used.items() if names} == {}, f"use public names, or one of {OWNERS}"
    assert all(_USES.search(file.read_text()) for file in files if file.name == "torch_private.py"), "it finds some"
