"""The files of docs/recipes.md that are trained in every sharding: each name is one of theirs."""

from __future__ import annotations

from tests.conftest import ROOT

_PAGE = (ROOT / "docs/recipes.md").read_text()
CODE = {name: _PAGE.partition(f"# my_project/{name}.py\n")[2].partition("```\n")[0] for name in ("gan", "stream")}
for _code in CODE.values():
    exec(_code, globals())
