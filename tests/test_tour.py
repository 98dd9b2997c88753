"""The notebook of the Python API runs, and its results are what the functions promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("nbclient", reason="make docs and make ci install it")
pytestmark = pytest.mark.full

# Behind the notebook's own cells, in its kernel.
_CHECKS = """
from pathlib import Path
assert [len(trial.epochs) for trial in result.trials] == [2] * 4
assert set(result.axes) == {"activation_checkpointing", "precision"}
assert {trial.status for trial in result.trials} == {"finished"}
assert result.recommended is None or result.recommended in result.trials and "-m fsdp_lab" in result.command
assert (result.folder / "report.html").is_file() and result.folder.is_relative_to(Path("outputs/multirun").absolute())
assert again == result
assert {one.setting["sharding"] for one in configurations} == {"ddp", "per_block"}
for one in configurations:
    assert one.num_workers == 8 and not one.error and one.step_s > 0 and one.tokens_per_s > one.samples_per_s
    assert sum(one.parts.values()) == one.peak_bytes < one.needed_bytes
"""


def test_the_notebook_runs(tmp_path: Path):
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_CHECKS))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
