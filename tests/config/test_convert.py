"""Typed config <-> plain values: nothing lost, every wrong key and value told by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_lab.config import ConfigError, NightlyConfig, all_keys, conf_dir, flatten, from_dict, to_dict
from fsdp_lab.config.conf import group_dirs
from fsdp_lab.config.parallel import Granularity
from fsdp_lab.config.suggest import closest
from tests.ranks import read_config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["sharding=size_based", "sharding.min_num_params=5", "precision=fp16", "offload=cpu"],
        ["model=mlp", "optimizer=sgd", "lr_schedule=cosine", "checkpoint.mode=off", "init=meta"],
        ["cluster.num_workers=4", "training.max_grad_norm=0.5", "checkpoint.resume_from=some/where"],
    ],
)
def test_round_trip(overrides: list[str]) -> None:
    config = read_config(None, overrides)
    plain = to_dict(config)
    assert from_dict(NightlyConfig, plain) == config
    assert from_dict(NightlyConfig, json.loads(json.dumps(plain))) == config
    assert from_dict(NightlyConfig, yaml.safe_load(yaml.safe_dump(plain))) == config


def test_the_order_of_options_and_keys_does_not_matter() -> None:
    words = ["model.width=16", "model._target_=my.Net", "optimizer.lr=0.5", "optimizer=sgd"]
    config = read_config(None, words)
    assert config == read_config(None, words[::-1])
    assert (config.model.arguments, config.optimizer.lr, config.optimizer.name.name) == ({"width": 16}, 0.5, "sgd")


def test_one_word_is_a_list_of_one() -> None:
    assert from_dict(NightlyConfig, {"objective": "val/loss:min"}).objective == ["val/loss:min"]


def test_flatten_names_are_the_command_lines() -> None:
    flat = flatten(read_config(None, ["optimizer.lr=0.5", "sharding=root"]))
    assert list(flat) == all_keys()
    assert (flat["optimizer.lr"], flat["sharding.granularity"], flat["compile"]) == (0.5, "root", False)


def test_every_key_can_be_typed() -> None:
    """Each key's default, written as text and read again, is the default."""
    typed = [f"{key}={json.dumps(value)}" for key, value in flatten(NightlyConfig()).items()]
    assert len(typed) == len(all_keys())
    typed = [word for word in typed if "._target_=" not in word]  # which implies an option without arguments
    wrong = [word for word in typed if read_config(None, [word]) != NightlyConfig()]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optimiser": {}}, ["optimiser is not a key", "sharding", "optimizer", "training"]),
        ({"optimizer": {"learning_rate": 1}}, ["optimizer.learning_rate is not a key", "lr", "weight_decay", "beta1"]),
        ({"sharding": {"granularity": "per_blok"}},
         ["sharding.granularity=per_blok is not an option", "ddp, root, per_block, per_layer, size_based"]),
        ({"checkpoint": {"mode": "on"}}, ["checkpoint.mode=on", "off, sync, async"]),
        ({"optimizer": {"lr": "abc"}}, ["optimizer.lr=abc is a str", "use a number"]),
        ({"training": {"epochs": 1.5}}, ["training.epochs=1.5 is a float", "use a whole number"]),
        ({"training": {"epochs": True}}, ["training.epochs=True is a bool", "use a whole number"]),
        ({"training": {"epochs": None}}, ["training.epochs=None"]),
        ({"optimizer": {"lr": True}}, ["optimizer.lr=True is a bool", "use a number"]),
        ({"compile": 1}, ["compile=1 is a int", "use true or false"]),
        ({"data": {"collate_fn": 5}}, ["data.collate_fn=5 is a int", "use text"]),
        ({"cluster": {"num_workers": "two"}}, ["cluster.num_workers=two is a str", "use a whole number"]),
        ({"training": 3}, ["training=3 is a int"]),
    ],
)  # fmt: skip
def test_wrong_values_are_reported(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(NightlyConfig, values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"optimizer": {"lr": "1e-3"}}, "optimizer.lr", 0.001),  # YAML reads 1e-3 as text
        ({"optimizer": {"lr": 1}}, "optimizer.lr", 1.0),
        ({"checkpoint": {"mode": False}}, "checkpoint.mode", "off"),  # and off as false
        ({"sharding": {"granularity": Granularity.root.name}}, "sharding.granularity", "root"),
        ({"cluster": {"num_workers": None}}, "cluster.num_workers", None),
        ({"training": {"max_grad_norm": 1}}, "training.max_grad_norm", 1.0),
    ],
)
def test_values_are_read(values: dict[str, object], key: str, expected: object) -> None:
    got = flatten(from_dict(NightlyConfig, values))[key]
    assert got == expected
    assert type(got) is type(expected)


@dataclass
class Labelled:
    labels: dict[str, int]
    rows: list[dict[str, Any]]


def test_dictionaries_and_lists_of_them_are_read() -> None:
    values: dict[str, Any] = {"labels": {"a": 1}, "rows": [{"x": None}]}
    assert to_dict(from_dict(Labelled, values)) == values
    for wrong, key in (({"labels": 1}, "labels=1"), ({"rows": [1]}, "rows=1")):
        with pytest.raises(ConfigError, match=key):
            from_dict(Labelled, values | wrong)


OPTIONS = sorted(
    f"{folder.name}={file.stem}"
    for folder in group_dirs()
    if folder.name != "experiment"
    for file in folder.glob("*.yaml")
)


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def unread(option: str) -> list[str]:
    """Return the keys of an option's file that the config has with another value."""
    group, _, name = option.partition("=")
    values = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
    flat, wrong = flatten(read_config(None, [option])), []
    for key, value in leaves(values):
        value = flat[value[2:-1]] if str(value).startswith("${") else value  # what another key says
        if flat[f"{group}.{key}"] != (float(value) if isinstance(value, str) and value[0].isdigit() else value):
            wrong.append(f"{group}.{key}")
    return wrong


def test_every_option_of_every_group_is_read() -> None:
    assert len(OPTIONS) > 50
    assert {option: wrong for option in OPTIONS if (wrong := unread(option))} == {}


def test_the_config_package_imports_nothing_heavy() -> None:
    """Bad input is told in a moment: no torch, ray, mlflow or hydra behind `fsdp_lab.config`."""
    look = "import sys, fsdp_lab.config; print(sorted({'torch','ray','mlflow','hydra','omegaconf'} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", look], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


# As users of other trainers type them.
MEANT = {
    "optimizer.learning_rate": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "training.lr": "optimizer.lr",
    "optimizer.rate": "optimizer.lr",
    "optimizer.wd": "optimizer.weight_decay",
    "batch_size": "training.global_batch_size",
    "training.train_batch_size": "training.global_batch_size",
    "training.gradient_accumulation_steps": "training.grad_accum_steps",
    "training.gradient_clipping": "training.max_grad_norm",
    "num_workers": "cluster.num_workers",
    "cluster.gpus": "cluster.num_workers",
    "training.epoch": "training.epochs",
    "model.layers": "model.num_layers",
    "memory_profil": "memory_profile",
}


def test_the_key_that_was_meant_is_found():
    for typed, meant in MEANT.items():
        group = [key for key in all_keys() if key.startswith(meant.partition(".")[0] + ".")]
        assert (closest(typed, all_keys()), closest(typed, group or all_keys())) == (meant, meant), typed


def test_an_argument_of_a_data_set_is_found():
    assert closest("path", ["root", "download", "image_size"]) == "root"
    assert closest("+offload._target_", ["offload.target"]) == "offload.target"


def test_nothing_is_guessed_of_a_word_that_is_like_none():
    assert [typed for typed in ("bogus", "foo", "x", "") if closest(typed, all_keys()) is not None] == []
