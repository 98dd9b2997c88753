"""What forecasts say of published steps is what the rows of `make published` say."""

from __future__ import annotations

import csv
import math

import pytest

from fsdp_lab.config.conf import conf_dir
from fsdp_lab.forecast.capacity import NEARLY_FULL, NEARLY_FULL_ERROR
from fsdp_lab.report.render import environment

with (conf_dir().parent / "experiments" / "published" / "results" / "rows.csv").open() as file:
    ROWS = list(csv.DictReader(file))


def percent(row: dict[str, str]) -> float:
    """How much more than measured was predicted."""
    return float(row["error"].rstrip("%"))


def test_what_forecasts_say_of_published_steps_is_what_the_rows_say():
    rows = [row for row in ROWS if row["gbit"] != "?"]
    nodes = [row for row in rows if int(row["gpus"]) > 8]
    kinds = {
        "compile=true": [row for row in rows if "compiled" in row["marks"]],
        "float8": [row for row in rows if "float8" in row["marks"]],
        "several nodes": nodes,
        "hybrid sharding over several nodes": [row for row in nodes if "hybrid" in row["marks"]],
    }
    found = {kind: (len(some), math.ceil(max(abs(percent(row)) for row in some))) for kind, some in kinds.items()}
    assert found == environment(False).get_template("forecast_words.j2").module.compared


def test_where_steps_are_slower_is_what_published_rows_show():
    """MPT's rows: what each needs of its GPU by its forecast, and how far off its predicted time was."""
    errors = [(float(row["share"] or 0), percent(row) / 100) for row in ROWS if row["row"].startswith("m")]
    full = sorted(-error for share, error in errors if share > NEARLY_FULL)  # the last were predicted too fast
    others = [error for share, error in errors if share <= NEARLY_FULL]
    assert (len(full), len(others)) == (39, 71)
    assert sum(error > 0.08 for error in full) == 4 and sum(abs(error) > 0.08 for error in others) == 2
    # nine of ten: at 0.9 * 38 = 34.2 between the 35th and the 36th
    assert 0.8 * full[34] + 0.2 * full[35] == pytest.approx(NEARLY_FULL_ERROR, abs=2e-3)
