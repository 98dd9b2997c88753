"""Stands for PyYAML, which a GPU machine with PyTorch alone lacks: the files of `conf/`, and single values.

`conf.json` holds the files' content. `python -m tests.gpu.plain_yaml` writes it again, where PyYAML is installed; a
test compares the two.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "conf.json"
CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("sharding", "precision", "offload", "reshard_after_forward", "model", "data", "task", "optimizer", "device")


class YAMLError(ValueError):
    """What PyYAML raises."""


def read_conf() -> dict[str, Any]:
    """Return the content of each option and data sheet, by its path in `conf/`."""
    import yaml

    files = sorted(
        file for group in GROUPS for file in (CONF / group).glob("*.yaml") if not file.stem.startswith("hf_")
    )
    return {str(file.relative_to(CONF)): yaml.safe_load(file.read_text()) for file in files}


@cache
def _by_text() -> dict[str, str]:
    contents = json.loads(FILE.read_text())
    return {(CONF / path).read_text(): json.dumps(content) for path, content in contents.items()}


def safe_load(text: str) -> Any:
    """Return the content of a file of `conf/`, or the value of a word."""
    if text in _by_text():
        return json.loads(_by_text()[text])
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return [safe_load(each) for each in text[1:-1].split(",")] if text.startswith("[") else text


if __name__ == "__main__":
    lines = (f"{json.dumps(path)}: {json.dumps(content)}" for path, content in read_conf().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
