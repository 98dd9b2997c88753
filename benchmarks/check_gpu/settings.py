"""The options of `conf/` that the check uses, as plain values: the machine with the GPU may have no YAML reader.

A test compares them with the files.
"""

from __future__ import annotations

from typing import Any

from fsdp_lab.config import SweepConfig, from_dict, to_dict

Setting = dict[str, Any]  # as typed on the command line: {"sharding": "root", "training.epochs": 1}


VIT = "fsdp_lab.workloads.vision.models.vit"


def _precision(param: str, reduce: str) -> dict[str, Any]:
    return {"param_dtype": param, "reduce_dtype": reduce, "loss_scaling": param == "float16"}


def _vit(layers: int, heads: int, hidden: int, mlp: int) -> dict[str, Any]:
    return {
        "_target_": VIT, "image_size": 224, "num_channels": 3, "patch_size": 16, "num_layers": layers,
        "num_heads": heads, "hidden_dim": hidden, "mlp_dim": mlp, "num_classes": 1000,
    }  # fmt: skip


OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {
        "fp32": _precision("float32", "float32"),
        "bf16": _precision("bfloat16", "bfloat16"),
        "bf16_mixed": _precision("bfloat16", "float32"),
        "fp16": _precision("float16", "float16"),
        "fp16_mixed": _precision("float16", "float32"),
        "grad_bf16": _precision("float32", "bfloat16"),
        "float8": {**_precision("bfloat16", "float32"), "float8": True},
    },
    "model": {
        "vit_tiny": {
            "_target_": VIT, "image_size": 28, "num_channels": 1, "patch_size": 7, "num_layers": 4,
            "num_heads": 2, "hidden_dim": 64, "mlp_dim": 128, "num_classes": 10,
        },
        "mlp": {
            "_target_": "fsdp_lab.workloads.vision.models.mlp", "image_size": 32, "num_channels": 1, "num_layers": 1,
            "hidden_dim": 1024, "num_classes": 10,
        },
        "lm_tiny": {
            "_target_": "fsdp_lab.workloads.language.llama.Llama", "vocab_size": 256, "dim": 64, "num_layers": 2,
            "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "max_seq_len": 1024, "rope_theta": 10000.0,
            "norm_eps": 1.0e-5, "tied": False,
        },
        "vit_b_16": _vit(12, 12, 768, 3072),
        "vit_l_16": _vit(24, 16, 1024, 4096),
    },
    "sharding": {
        **{name: {"granularity": name} for name in ("ddp", "root", "per_block", "per_layer")},
        "size_based": {"granularity": "size_based", "min_num_params": None},
    },
    "data": {"synthetic": {"_target_": "fsdp_lab.workloads.vision.synthetic.SyntheticImages", "num_train": 1024,
                           "num_val": 128}},
    "offload": {name: {"target": name} for name in ("none", "cpu", "cpu_unpinned")},
    "reshard_after_forward": {
        **{name: {"policy": name} for name in ("always", "never", "default")},
        "to_size": {"policy": "to_size", "size": None},
    },
}  # fmt: skip

# Random tokens for the model of language; the number of rows is set by each line.
TOKENS = {"_target_": "fsdp_lab.workloads.language.tokens.SyntheticTokens", "num_train": None, "num_val": None}
# Nothing but training: each subject switches on what it checks.
BASE: Setting = {
    "data": "synthetic",
    "data.loader_workers": 0,
    "training.epochs": 1,
    "checkpoint.mode": "off",
    "export": False,
    "memory_profile": "off",
    "init": "meta",
}


def trial(setting: Setting) -> SweepConfig:
    """`BASE` with `setting` on top: options of groups by their names, single keys with dots.

    A model of language gets random tokens of its vocabulary.
    """
    values = to_dict(SweepConfig())
    language = setting.get("model") == "lm_tiny"
    if language:
        values["task"]["name"] = "language"
        values["data"] = {**TOKENS, "vocab_size": None, "seq_len": None, "loader_workers": 0}
    for key, value in {**BASE, **setting}.items():
        if key == "data" and language:
            continue
        if key in OPTIONS:
            option = OPTIONS[key][value]
            values[key] = dict(option) if key == "model" else {**values[key], **option}
            continue
        *path, leaf = key.split(".")
        node = values
        for part in path:
            node = node[part]
        assert leaf in node, f"{key} is not a key of a trial"
        node[leaf] = value
    if language:
        values["data"]["vocab_size"] = values["model"]["vocab_size"]
    return from_dict(SweepConfig, values)


def words(setting: Setting) -> str:
    """As typed on the command line."""
    return " ".join(f"{key}={value}" for key, value in setting.items())
