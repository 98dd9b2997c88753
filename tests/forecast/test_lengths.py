"""`forecast.lengths`: which lengths of a histogram are forecast, and the share of steps that would not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_lab.commands.forecast_lengths import chosen, key_of_lengths, read_lengths, sentences_of_lengths
from fsdp_lab.config import ConfigError
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.table import Row
from tests import forked
from tests.conftest import ROOT
from tests.ranks import config

HISTOGRAM = "128 500\n512 400\n\n4096 70\n4096 30\n"


def test_a_histogram_is_read_and_its_quantiles_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text(HISTOGRAM)
    counts = read_lengths(str(tmp_path / "lengths.txt"))
    assert counts == {128: 500, 512: 400, 4096: 100}
    assert chosen(counts) == [128, 512, 4096]
    assert chosen(dict.fromkeys(range(1, 1001), 1)) == [500, 900, 990, 999, 1000]
    assert chosen({7: 3}) == [7]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty; write a line"), ("512\n", "line 1: '512' is no length and count"), ("5 0\n", "line 1: '5 0'"),
     ("1 1\nx 2\n", "line 2: 'x 2' is no length"), (None, "cannot be read: No such file")],
)  # fmt: skip
def test_a_damaged_histogram_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "lengths.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_lengths(str(file))


def test_the_key_is_an_argument_of_the_data() -> None:
    assert key_of_lengths(config("task=language", "model=lm_tiny").data) == "data.seq_len"
    with pytest.raises(ConfigError, match="Digits has no argument length or seq_len; give it one"):
        key_of_lengths(config().data)


def row(length: int, needs: int) -> Row:
    return Row([str(length)], Forecast(False, 2, capacity_bytes=100, peaks={"device": {"total": needs}}))


def test_the_share_of_steps_with_a_row_that_is_too_long() -> None:
    """Of a tenth of the rows a step of 16 has one with a probability of 1 - 0.9 ** 16."""
    counts, rows = {128: 500, 512: 400, 4096: 100}, [row(128, 10), row(512, 90), row(4096, 900)]
    said = " ".join(sentences_of_lengths(rows, counts, 16))
    assert "1,000 rows that are no longer: 128 (0.5), 512 (0.9), 4,096 (1)." in said
    assert said.endswith("fits: 512. Of all rows 10.00% are longer, and 81.47% of steps of 16 rows have one.")
    assert [*sentences_of_lengths(rows[:2], {128: 1, 512: 1}, 16)][1].endswith(
        "fits: 512. Of all rows 0.00% are longer."
    )
    assert [*sentences_of_lengths(rows[2:], {4096: 1}, 16)][1] == "Not even 4,096 is sure to fit."


@pytest.mark.full
@pytest.mark.documents(
    "python -m fsdp_lab.forecast model=llama3_1b sharding=per_block precision=bf16_mixed training..."
)
def test_the_recipe_prints_what_its_page_shows(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text(HISTOGRAM)
    after = (ROOT / "docs/recipes.md").read_text().partition("## Which rows are too long?")[2]
    command, shown = after.partition("python -m ")[2].partition("```")[0], after.partition("```text\n...\n")[2]
    done = forked.run(tmp_path, *command.replace("\\\n", " ").split(), seconds=900)
    assert done.returncode == 0 and shown.partition("...")[0] in done.stdout, done.stdout + done.stderr
    refused = forked.run(tmp_path, "fsdp_lab.forecast", "-m", "forecast.lengths=lengths.txt", seconds=100)
    assert refused.returncode == 2 and "leave -m out" in refused.stderr
