"""The table for people (Markdown) and the raw figures (CSV)."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.check_gpu.lines import FAIL, NOT_MEASURED, Bench, Line, Result
from benchmarks.check_gpu.machine import ROOT, commit
from fsdp_lab.files import write_text

HEAD = ("check", "setting", "workers", "expected", "measured", "verdict", "seconds")


def rows(lines: Sequence[Line], results: dict[str, Result]) -> list[tuple[Line, Result]]:
    """Every line with its result, in the table's order."""
    return [(line, results.get(line.id, Result(line.id, NOT_MEASURED, ""))) for line in lines]


def exit_status(rows: Sequence[tuple[Line, Result]]) -> int:
    """1 when a line failed, 3 when none failed and one was not measured, else 0."""
    verdicts = {result.verdict for _, result in rows}
    return 1 if FAIL in verdicts else 3 if NOT_MEASURED in verdicts else 0


def about(bench: Bench) -> str:
    """The machine, the libraries, the sources and the date."""
    m = bench.machine
    parts = {
        "device": f"{m.devices} x {m.name}" if m.devices else m.name,
        "driver": m.driver,
        "compute capability": m.capability,
        "cores": m.cores,
        "torch": m.torch,
        "CUDA": m.cuda,
        "NCCL": m.nccl,
        "cuDNN": m.cudnn,
        "Python": m.python,
        "commit": commit(ROOT),
        "digest of the sources": bench.source,
        "table written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return "\n".join(f"- {name}: {value}" for name, value in parts.items())


def summary(rows: Sequence[tuple[Line, Result]]) -> str:
    """How many lines have which verdict, and the failed ones by name."""
    counts = Counter(result.verdict for _, result in rows)
    text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "no line"
    failed = [f"FAIL {line.id}: {result.measured}" for line, result in rows if result.verdict == FAIL]
    return "\n".join([text, *failed])


def markdown(rows: Sequence[tuple[Line, Result]], bench: Bench) -> str:
    lines = ["# GPU check", "", about(bench), "", f"| {' | '.join(HEAD)} |", f"| {' | '.join('---' for _ in HEAD)} |"]
    for line, result in rows:
        cells = (line.subject, line.setting, line.workers, line.expected, result.measured, result.verdict)
        cleaned = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
        lines.append(f"| {' | '.join(cleaned)} | {result.seconds:.1f} |")
    return "\n".join([*lines, "", summary(rows).replace("\n", "\n\n"), ""])


def write(rows: Sequence[tuple[Line, Result]], bench: Bench, out: Path) -> str:
    """Write `check_gpu.md` and `check_gpu.csv`; return the Markdown."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow([*HEAD, "figures"])
    for line, result in rows:
        head = (line.subject, line.setting, line.workers, line.expected, result.measured, result.verdict)
        table.writerow([*head, result.seconds, json.dumps(result.figures)])
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "check_gpu.csv", text.getvalue())
    write_text(out / "check_gpu.md", markdown(rows, bench))
    return markdown(rows, bench)
