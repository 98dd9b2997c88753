"""A verdict as Markdown in its file, and as a table on the terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from fsdp_lab.nightly.gate import Finding
from fsdp_lab.nightly.nights import FAILED, REGRESSION, Night
from fsdp_lab.nightly.verdict import _changed, gate_table, gate_text, gate_words

FINDINGS = [
    Finding("sharding=per_block precision=bf16_mixed", "peak MiB", "12345.67", "12345.67", "none", False),
    Finding(
        "sharding=ddp precision=fp32", "samples/s", "123456", "98765", "-20.0 %", True,
        "worse by more than 15 %, and by more than the noise (4 %)",
    ),
]  # fmt: skip
NIGHT = Night(
    "2026-11-22T02-00-00Z", 0, 0, verdict=REGRESSION, baseline="2026-11-21T02-00-00Z",
    findings=[dataclasses.asdict(finding) for finding in FINDINGS],
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_terminal_shows_all_digits_and_no_markdown(width: int):
    out = io.StringIO()
    Console(file=out, width=width).print(gate_table(NIGHT))
    text = out.getvalue()
    assert "…" not in text and "`" not in text and "|" not in text and "**" not in text
    assert all(word in text for word in ("12345.67", "123456", "98765", "samples/s", "regression:"))
    assert text.index("123456") < text.index("12345.67"), "the regression first"
    assert ("-20.0 %" in text) or "Too narrow for change: see gate.md." in text


def test_a_setting_is_named_once():
    out = io.StringIO()
    alike = [dataclasses.replace(FINDINGS[0], metric=metric) for metric in ("peak MiB", "final loss", "samples/s")]
    night = dataclasses.replace(NIGHT, findings=[dataclasses.asdict(f) for f in (*alike, FINDINGS[1])])
    Console(file=out, width=160).print(gate_table(night))
    assert out.getvalue().count("sharding=per_block precision=bf16_mixed") == 1
    assert out.getvalue().count("sharding=ddp precision=fp32") == 1
    assert [line.split()[0] for line in out.getvalue().splitlines()[2:]][-2:] == ["final", "samples/s"]


UNJUDGED = Finding("a", "samples/s", "", "", "", False, "not judged: others used 43% of the cores")


@pytest.mark.parametrize(
    ("findings", "title"),
    [
        (["peak MiB", "final loss", "forecast error"], "no regression in memory, loss or forecast; speed was not "),
        (["peak MiB", "final loss"], "no regression in memory or loss; speed was not judged: "),
        (["peak MiB!", "final loss"], "a regression; speed was not judged: "),
    ],
)  # fmt: skip
def test_the_title_does_not_call_good_what_was_not_looked_at(findings: list[str], title: str):
    collected = [Finding("a", name.strip("!"), "1", "1", "none", name.endswith("!")) for name in findings]
    night = dataclasses.replace(NIGHT, findings=[dataclasses.asdict(f) for f in (*collected, UNJUDGED)])
    head = "Night 2026-11-22T02-00-00Z against 2026-11-21T02-00-00Z: "
    text = gate_words(night).splitlines()[0]
    assert text.startswith(head + title) and text.endswith("; speed was not judged: others used 43% of the cores")
    judged = dataclasses.replace(NIGHT, findings=[dataclasses.asdict(f) for f in collected if not f.regression])
    assert gate_words(judged).splitlines()[0] == f"{head}nothing got worse"


@pytest.mark.parametrize(
    ("before", "commit", "torch", "words"),
    [
        ("a" * 40, "b" * 40, "2.15", "commit aaaaaaaaaa → bbbbbbbbbb"),
        ("a" * 40, "a" * 40 + "+changes", "2.15", "commit aaaaaaaaaa → aaaaaaaaaa with uncommitted changes"),
        ("a+changes", "a+changes", "2.15", "uncommitted changes in both nights, which may differ"),
        ("", "", "2.16", "commits not known, torch 2.15 → 2.16"),
        ("a" * 40, "a" * 40, "2.15", "nothing"),
    ],
)
def test_what_changed_in_the_code_since_the_baseline(before: str, commit: str, torch: str, words: str):
    baseline = dataclasses.replace(NIGHT, commit=before, libraries={"torch": "2.15"})
    assert _changed(baseline, dataclasses.replace(NIGHT, commit=commit, libraries={"torch": torch})) == words
    assert f"Changed in code, libraries and machine: {words}." in gate_words(dataclasses.replace(NIGHT, code=words))


def test_the_file_has_markdown_and_what_was_not_compared_has_no_table():
    assert gate_text(NIGHT).startswith(
        "# Night 2026-11-22T02-00-00Z against 2026-11-21T02-00-00Z: a regression\n\n| set"
    )
    assert "| **regression**: worse by more than 15 %" in gate_text(NIGHT)
    failed = dataclasses.replace(NIGHT, verdict=FAILED, attempts=3)
    assert gate_text(failed) == f"# {gate_words(failed)}" and not failed.is_compared
