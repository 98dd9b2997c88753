"""The site: it builds strictly, has the generated tables, and asks no other server for anything."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT

pytest.importorskip("mkdocs", reason="make docs and make ci install it")
pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))  # raises Abort on a warning
    return folder


def test_generated_tables_are_there(site: Path):
    text = {name: (site / "reference" / f"{name}.html").read_text() for name in ("keys", "options", "metrics", "files")}
    assert (
        "<code>cluster.wait_timeout_s</code>" in text["keys"] and "<code>sharding=per_block</code>" in text["options"]
    )
    assert (
        "<code>memory/&lt;category&gt;_bytes</code>" in text["metrics"] and "<code>trial.json</code>" in text["files"]
    )
    assert not any("generated:" in page for page in text.values())


def test_no_page_asks_another_server(site: Path):
    pages = list(site.rglob("*.html"))
    asked = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//[^"'> ]+""")
    assert len(pages) > 20
    assert {page.name: asked.findall(page.read_text()) for page in pages if asked.search(page.read_text())} == {}
    styles = [
        file.name for file in site.rglob("*.css") if re.search(r"(@import|url\()\s*[\"']?https?:", file.read_text())
    ]
    assert styles == []


@pytest.mark.parametrize(
    ("link", "source", "expected"),
    [
        ("sweeps.md", "docs/report.md", "sweeps.md"),
        ("../SECURITY.md", "docs/sweeps.md", "repository/SECURITY.md"),
        ("../../SECURITY.md", "docs/reference/keys.md", "../repository/SECURITY.md"),
        ("docs/sweeps.md", "CHANGELOG.md", "../sweeps.md"),
        ("../experiments/nightly/README.md", "benchmarks/README.md", "../experiments/nightly/README.md"),
        ("https://pytorch.org", "docs/sweeps.md", "https://pytorch.org"),
    ],
)
def test_links_lead_to_the_same_file(hooks: ModuleType, link: str, source: str, expected: str):
    assert hooks.moved(link, source) == expected
