"""The reference is made from the schema: every key, option and metric has its line there, with a meaning."""

from __future__ import annotations

import re
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fsdp_lab import __version__
from fsdp_lab.commands import reference
from fsdp_lab.config import ConfigError, all_keys
from fsdp_lab.config.describe import describe_keys
from fsdp_lab.config.metrics import METRICS, declared
from fsdp_lab.config.options import data_sheets, group_dirs
from fsdp_lab.config.serialize import leaves
from tests.conftest import ROOT

tables = SimpleNamespace(**run_path(str(ROOT / "docs" / "tables.py")))
KEYS = {key.name: key for _, _, keys in describe_keys() for key in keys}
OPTIONS = [file for folder in group_dirs() for file in sorted(folder.glob("*.yaml"))]


def test_every_key_has_a_meaning():
    wrong = [name for name, described in KEYS.items() if not (described.meaning.endswith(".") and described.kind)]
    assert not wrong, f"add a docstring below the field, as its neighbours have: {wrong}"


def test_every_key_that_can_be_typed_is_described():
    groups = ("model", "data", "optimizer", "lr_schedule")
    assert set(KEYS) - set(all_keys()) == {f"{group}.<argument>" for group in groups}
    assert set(all_keys()) - set(KEYS) == set()
    assert KEYS["optimizer.beta1"].takes == "0 or more, below 1"
    assert KEYS["forecast.capacity_gib"].kind == "number or null"
    assert KEYS["sharding.granularity"].takes == "`ddp`, `root`, `per_block`, `per_layer`, `size_based`"


@pytest.mark.documents("python -m fsdp_lab --cfg job")
def test_defaults_are_those_of_a_trial_that_names_nothing(cli):
    """Those of `conf/config.yaml`, and of the options that it chooses, are the fields' own."""
    composed = leaves(yaml.safe_load(cli("--cfg", "job").stdout))
    assert {name: _typed(value) for name, value in composed.items() if _typed(value) != KEYS[name].default} == {}


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def test_committed_pages_are_those_of_the_code():
    pages = {page.name: page.read_text() for page in tables.FILES}
    old = [name for name, text in pages.items() if tables.filled(text) != text]
    assert not old, f"python docs/tables.py writes them again: {old}"
    assert "- `cluster.num_workers=" in pages["keys.md"] and "- `sharding=per_block`: " in pages["options.md"]
    assert "- `val/loss` (" in pages["metrics.md"] and "| `trial.json`" in pages["files.md"]


def test_pages_have_every_key_option_and_metric():
    keys, options, metrics = tables.keys_page(), tables.options_page(), tables.metrics_page()
    assert [name for name in KEYS if f"- `{name}=" not in keys and f"- `{name}` (" not in keys] == []
    assert [file for file in OPTIONS if f"- `{file.parent.name}={file.stem}`: " not in options] == []
    assert [file for file in data_sheets() if f"`forecast.device={file.stem}`" not in options] == []
    assert [metric.key for metric in METRICS if f"- `{metric.key}`" not in metrics] == []


@pytest.mark.documents("python -m fsdp_lab --keys", "python -m fsdp_lab --keys cluster")
def test_keys_are_shown_with_their_meanings(cli):
    done = cli("--keys", "cluster")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "cluster.wait_timeout_s=600.0\n    number: a number above 0\n"
        "    Seconds that a trial waits for free resources before it fails.\n"
    ) in done.stdout
    assert sum(not line.startswith(" ") for line in cli("--keys").stdout.splitlines()) == len(KEYS)


def test_keys_of_an_option_have_its_values_and_fit_a_terminal(cli):
    lines = cli("--keys", "model=llama3_8b", "precision=fp16", "experiment=zero2_zero3").stdout.splitlines()
    assert {"model.ffn_dim=14336", "model.num_heads=32", "precision.param_dtype=float16"} <= set(lines)
    assert "hydra.sweeper.params.sharding=ddp,per_block" in lines
    narrow = reference.keys_text([], 60).splitlines()
    assert [line for line in narrow if len(line) > 60 and " " in line.strip()] == []
    with pytest.raises(ConfigError, match=r"--keys model=llama3_7b: no such option\. Did you mean model=llama3_8b\?"):
        reference.keys_text(["model=llama3_7b"], 80)
    with pytest.raises(ConfigError, match=r"--keys cluster\.num_worker_: .* Did you mean cluster\.num_workers\?"):
        reference.keys_text(["cluster.num_worker_"], 80)


def test_the_version_is_reported_with_those_of_the_libraries(cli):
    done = cli("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"fsdp_lab {__version__} (Python 3.") and ", torch 2." in done.stdout


# A text of the code that is a key, but no f-string.
_METRIC = re.compile(r"""(?<![\w"'])["']((?:train|val|perf|memory|forecast|checkpoint)/[a-z0-9_]+)["']""")


def test_every_metric_in_the_code_is_declared():
    assert declared("memory/rank7/host_peak_bytes").key == "memory/rank<r>/<total>_bytes"
    with pytest.raises(KeyError, match="val/los"):
        declared("val/los")
    used = {key for file in (ROOT / "fsdp_lab").rglob("*.py") for key in _METRIC.findall(file.read_text())}
    assert len(used) > 20
    for key in sorted(used - {metric.mib_key for metric in METRICS}):
        declared(key)
