"""The pages: the site builds and asks no other server, the notebook runs, files and figures that are named exist.

tests/test_commands.py runs the commands of the pages, tests/test_reference.py compares the reference with the code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT


def test_limitations_say_what_the_committed_runs_on_gpus_have_seen():
    """A run's own rows, and those that were forecast again after it."""
    page = " ".join((ROOT / "docs" / "limitations.md").read_text().split())
    for file in (ROOT / "experiments" / "gpu" / "results").glob("*.json"):
        table = json.loads(file.read_text())
        losses = sum("test_a_setting_learns" in row["check"] and row["outcome"] == "passed" for row in table["rows"])
        peaks = sum("peak_bytes" in row["figures"] for row in table["rows"]) + len(table.get("recomputed", ()))
        assert f"{table['device'].removeprefix('NVIDIA ')} with PyTorch {table['torch'][:4]}" in page
        assert f"losses of {losses} settings, {peaks} peaks of memory" in page


def test_links_of_pages_beside_the_site_lead_to_files():
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)[)#]", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} points at {target}"


@pytest.mark.ci
def test_the_site_builds_and_asks_no_other_server(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="make docs and make ci install it")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))  # raises Abort on a warning
    pages = {file.relative_to(tmp_path).as_posix(): file.read_text() for file in tmp_path.rglob("*.html")}
    assert len(pages) > 20 and "<code>cluster.wait_timeout_s</code>" in pages["reference/keys.html"]
    asked = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//[^"'> ]+""")
    assert {name: asked.findall(text) for name, text in pages.items() if asked.search(text)} == {}
    styles = {file.name: file.read_text() for file in tmp_path.rglob("*.css")}
    assert [name for name, text in styles.items() if re.search(r"(@import|url\()\s*[\"']?https?:", text)] == []


# Behind the notebook's own cells, in its kernel.
_CHECKS = """
from pathlib import Path
assert [len(trial.epochs) for trial in result.trials] == [2] * 4
assert set(result.axes) == {"activation_checkpointing", "precision"}
assert [*frame["status"]] == ["finished"] * 4
assert "-m fsdp_lab" in result.recommendation.command or result.recommendation.setting is None
assert (result.trials[0].folder.parent / "report.html").is_file()
assert again.trials == result.trials
assert {*forecasts.frame()["sharding"]} == {"ddp", "per_block"}
for one in forecasts.frame().to_dict("records"):
    assert one["cluster.num_workers"] == 8 and one["step_s"] > 0
    assert one["tokens_per_s_of_all"] > one["samples_per_s_of_all"] and one["peak_bytes"] < one["needed_bytes"]
"""


@pytest.mark.full
def test_the_notebook_of_the_python_api_runs(tmp_path: Path):
    nbclient = pytest.importorskip("nbclient", reason="make docs and make ci install it")
    import nbformat

    notebook = nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_CHECKS))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    kinds = [kind for output in shown for kind in output.get("data", {})]
    assert kinds.count("image/png") == kinds.count("application/vnd.plotly.v1+json") == 1
