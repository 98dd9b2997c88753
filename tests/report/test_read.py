"""Files of accelerate, transformers' Trainer and torchtitan, and what the command prints of each, in `report/read`.

`python -m tests.report.test_read` writes the golden files again: read what changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_lab.commands.read import main, read_file
from fsdp_lab.report.their_keys import read
from tests.conftest import ROOT, run_cli

FOLDER = Path(__file__).parent / "read"
FILES = sorted(file for file in FOLDER.iterdir() if file.suffix != ".txt")


def printed(*words: str) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    with mock.patch("sys.argv", ["read", *words]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        return main(), out.getvalue(), errors.getvalue()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_read_as_it_was(file: Path) -> None:
    pytest.importorskip("transformers")  # which has the classes of blocks
    assert printed(str(file)) == (0, file.with_suffix(".txt").read_text(), "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_key_of_a_file_is_accounted_for(file: Path) -> None:
    """And each override is one of the command line; models and data are these of the command's own defaults."""
    pytest.importorskip("transformers")
    _, reading = read_file(file)
    named = {*reading.ignored, *reading.unknown, *(key.partition("=")[0] for key in reading.without)}
    assert named.isdisjoint(_used(reading.overrides)) and reading.overrides
    of_tokens = "model=llama3_8b" in reading.overrides
    words = [word for word in reading.overrides if of_tokens or not word.startswith("data.seq_len=")]
    workers = [] if any(word.startswith("cluster.num_workers=") for word in words) else ["cluster.num_workers=2"]
    done = run_cli(file.parent, *words, *workers, "--cfg", "job")
    assert done.returncode == 0, done.stderr


def _used(overrides: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in overrides}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "distributed_type: DEEPSPEED\n", "a.yaml: distributed_type=DEEPSPEED is for DeepSpeed, which is"),
        ("a.yaml", "distributed_type: MEGATRON_LM\n", "distributed_type=MEGATRON_LM divides a model into stages"),
        ("a.yaml", "distributed_type: XLA\n", "distributed_type=XLA is not read: trials run on"),
        ("ds.json", '{"zero_optimization": {"stage": 2}}', "ds.json: zero_optimization is for DeepSpeed"),
        ("t.json", '{"learning_rate": 1, "deepspeed": "ds.json"}', "t.json: deepspeed is for DeepSpeed"),
        ("t.json", '{"learning_rate": 1', "t.json is damaged, or its suffix is wrong: Expecting ',' delimiter"),
        ("t.toml", "[training\n", "t.toml is damaged, or its suffix is wrong"),
        ("a.yaml", "a: [\n", "a.yaml is damaged, or its suffix is wrong"),
        ("a.yaml", "- 1\n", "a.yaml has no keys; give a config of accelerate"),
        ("a.yaml", "width: 3\n", "a.yaml has no key of accelerate (distributed_type), TrainingArguments"),
        ("t.json", '{"per_device_train_batch_size": [1]}', "t.json: a value has another type than its trainer accepts"),
        ("t.toml", "training = 3\n", "t.toml has no key of accelerate"),
        ("t.toml", "parallelism = {data_parallel_shard_degree = 'a'}\n", "t.toml: a value has another type than its"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    status, out, error = printed(str(tmp_path / name))
    assert (status, out, error.count("\n")) == (2, "", 1) and message in error


def test_a_value_with_spaces_is_no_further_override() -> None:
    reading = read("accelerate", {"num_processes": "8 model._target_=os.system", "distributed_type": "MULTI_GPU"}, {})
    assert reading.without == {"num_processes=8 model._target_=os.system": "it has spaces"}
    assert [word for word in reading.overrides if "model" in word] == []
    machines = {"num_machines": "2 model=mlp", "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD"}
    reading = read("accelerate", {"distributed_type": "FSDP", **machines}, {})
    assert "model=mlp" not in reading.overrides and "it depends on another value" in reading.without.values()


def test_other_words_are_refused(tmp_path: Path) -> None:
    assert printed(str(tmp_path / "none.yaml"))[0::2] == (
        2, f"fsdp_lab.read: {tmp_path}/none.yaml: No such file or directory.\n"
    )  # fmt: skip
    assert "model=mlp: read takes one file; overrides follow" in printed("a.yaml", "model=mlp")[2]
    assert printed("--help")[0] == 0 and printed()[0] == 2


def test_every_argument_of_the_trainer_is_known() -> None:
    transformers: Any = pytest.importorskip("transformers")
    values = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    plain = {name: getattr(value, "value", value) for name, value in values.items() if value is not dataclasses.MISSING}
    reading = read("Trainer", dict.fromkeys(values, 1), {})
    assert reading.unknown == ["deepspeed"], "which is refused before"
    of_defaults = read("Trainer", plain, {"samples": 8, "epochs": 3, "warmup": "", "beta1": "", "beta2": ""})
    assert not of_defaults.without
    assert "optimizer.lr=5e-05" in of_defaults.overrides and "training.max_grad_norm=1.0" in of_defaults.overrides


@pytest.mark.documents("python -m fsdp_lab.read accelerate.yaml")
def test_the_recipe_prints_what_its_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    page = (ROOT / "docs" / "recipes.md").read_text()
    ((file, shown),) = re.findall(r"```yaml\n(# accelerate\.yaml\n.*?)```.*?```text\n(.*?)```", page, re.DOTALL)
    (tmp_path / "accelerate.yaml").write_text(file)
    assert printed(str(tmp_path / "accelerate.yaml")) == (0, shown, "")


def test_overrides_are_quoted_for_a_shell() -> None:
    first = printed(str(FOLDER / "trainer_ddp.json"))[1].splitlines()[0]
    assert "'training.global_batch_size=${per_worker:16}'" in first
    assert shlex.split(first) == read_file(FOLDER / "trainer_ddp.json")[1].overrides


if __name__ == "__main__":
    for each in FILES:
        each.with_suffix(".txt").write_text(printed(str(each))[1])
