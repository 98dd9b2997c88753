"""The pages in `docs/` hold code that runs."""

from __future__ import annotations

import json

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
