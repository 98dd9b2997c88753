"""The job file for torchtitan has keys and values that torchtitan's configuration classes have.

torchtitan is not installed: `torchtitan_names.json` lists what its sources declare, and says where.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.layout import Layout
from fsdp_lab.takehome import Setup, write_out
from fsdp_lab.takehome.torchtitan import VERSION
from tests.parity import PRECISIONS
from tests.ranks import config
from tests.takehome.test_pytorch import EVERYTHING

NAMES: dict[str, Any] = json.loads((Path(__file__).parent / "torchtitan_names.json").read_text())
TYPES = {"int": int, "float": (int, float), "bool": bool, "str": str, "list": list}


def written(*overrides: str, units: tuple[str, ...] = ("blocks.*",), world_size: int = 4) -> tuple[str, dict[str, Any]]:
    layout = Layout(units=units, unit_classes=["m:Block"], block_classes=["m:Block"])
    text = write_out("torchtitan", Setup("Trial 0: a=b", config(*overrides), layout, world_size, 1000, 128, "2.15.0"))
    return text, tomllib.loads(text)


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"precision={precision}"] for precision in ("fp32", *PRECISIONS)),
        *([f"optimizer={name}", f"optimizer.implementation={how}"] for name, how in
          (("adam", "for_loop"), ("adamw", "foreach"), ("sgd", "auto"))),
        *([f"lr_schedule={name}", "lr_schedule.warmup_steps=2"] for name in ("constant", "cosine", "step")),
        ["sharding=ddp", "task=language", "model=lm_tiny", "data=pydoc"],
        list(EVERYTHING),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_key_and_value_is_one_of_torchtitans(overrides: list[str]) -> None:
    known = NAMES[VERSION]
    for section, values in written(*overrides)[1].items():
        assert values.keys() <= known[section].keys()
        for key, value in values.items():
            allowed = known[section][key]
            assert value in allowed if isinstance(allowed, list) else isinstance(value, TYPES[allowed]), key


def test_the_values_are_the_trials() -> None:
    _, job = written(
        "sharding=per_block", "sharding.dp_replicate=2", "precision=bf16_mixed", "offload=cpu",
        "reshard_after_forward=never", "activation_checkpointing=full", "training.grad_accum_steps=2",
        "training.max_grad_norm=0.5", "optimizer=adamw", "optimizer.lr=0.002", "training.seed=7", "compile=true",
    )  # fmt: skip
    assert job["parallelism"] == {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "fsdp_reshard_after_forward": "never",
    }  # fmt: skip
    assert job["training"] == {
        "local_batch_size": 4, "global_batch_size": 32, "steps": 4, "max_norm": 0.5, "enable_cpu_offload": True,
        "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32",
    }  # fmt: skip
    assert job["activation_checkpoint"]["mode"] == "full" and job["compile"]["enable"] and job["debug"]["seed"] == 7
    assert job["optimizer"]["name"] == "AdamW" and job["optimizer"]["lr"] == 0.002


@pytest.mark.parametrize(
    ("overrides", "section"),
    [
        (["activation_checkpointing=selective"], {"mode": "selective", "selective_ac_option": "op"}),
        (["activation_checkpointing=every_n"], {"mode": "selective", "selective_ac_option": "2"}),
        (["activation_checkpointing=every_n", "activation_checkpointing_every=3"],
         {"mode": "selective", "selective_ac_option": "3"}),
        (["compile=true", "compile_memory_budget=0.4"], {"mode": "memory_budget", "memory_budget": 0.4}),
    ],
)  # fmt: skip
def test_activation_checkpointing_of_some(overrides: list[str], section: dict[str, object]) -> None:
    assert written("sharding=per_block", *overrides)[1]["activation_checkpoint"] == section


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=fp16"], "float16 and loss scaling"),
        (["precision=bf16"], "gradients reduced in bfloat16"),
        (["sharding=per_layer"], "sharding=per_layer"),
        (["reshard_after_forward=to_size", "reshard_after_forward.size=2"], "reshard_after_forward=2"),
        (["offload=cpu_unpinned"], "offloading to memory that is not pinned"),
        (["training.grad_accum_steps=2"], "gradients reduced once per step"),
        (["optimizer=sgd"], "SGD"),
        (["lr_schedule=step"], "a learning rate that falls in steps"),
        ([], "no clipping"),
    ],
)
def test_what_it_cannot_express_is_reported(overrides: list[str], message: str) -> None:
    comments = " ".join(line[2:] for line in written(*overrides)[0].splitlines() if line.startswith("# "))
    assert f"Not in this file: {message}" in comments
    expressible = ("sharding=per_block", "precision=bf16_mixed", "training.max_grad_norm=1.0")
    assert message not in written(*expressible)[0].replace("# ", "")


def test_the_keys_that_are_named_for_its_main_branch_are_there() -> None:
    text, job = written()
    named = " ".join(line[2:] for line in text.splitlines() if line.startswith("# ")).partition("main branch")[2]
    assert {"parallelism", "compile"} <= set(re.findall(r"\w+", named))
    assert "enable_cpu_offload and mixed_precision_*" in named
    assert job["parallelism"].keys() <= set(NAMES["main"]["parallelism"])
    assert job["compile"].keys() <= set(NAMES["main"]["compile"])
    moved = {key for key in job["training"] if key.startswith(("mixed_precision_", "enable_"))}
    assert moved == set(NAMES["main"]["training"])
