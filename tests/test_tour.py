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
assert [*frame["status"]] == ["finished"] * 4
assert "-m fsdp_lab" in result.recommendation.command or result.recommendation.setting is None
assert (result.trials[0].folder.parent / "report.html").is_file()
assert again.trials == result.trials
assert {*forecasts.frame()["sharding"]} == {"ddp", "per_block"}
for one in forecasts.frame().to_dict("records"):
    assert one["cluster.num_workers"] == 8 and one["step_s"] > 0
    assert one["tokens_per_s_of_all"] > one["samples_per_s_of_all"] and one["peak_bytes"] < one["needed_bytes"]
"""


def test_the_notebook_runs(tmp_path: Path):
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_CHECKS))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    kinds = [kind for output in shown for kind in output.get("data", {})]
    assert kinds.count("image/png") == kinds.count("application/vnd.plotly.v1+json") == 1
