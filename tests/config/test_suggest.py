"""Which name is suggested for a mistyped one."""

from __future__ import annotations

import pytest

from fsdp_lab.config import all_keys
from fsdp_lab.config.conf import known_devices, options_of
from fsdp_lab.config.suggest import closest


@pytest.mark.parametrize(
    ("group", "typed", "meant"),
    [("precision", "bfloat16", "bf16"), ("precision", "BF16", "bf16"), ("precision", "16-mixed", "fp16_mixed"),
     ("precision", "fp8", "float8"), ("optimizer", "adamW", "adamw"), ("optimizer", "AdamW", "adamw"),
     ("model", "llama3_7b", "llama3_8b"), ("model", "llama3_65b", "llama3_70b"), ("model", "vit_l_14", "vit_l_16"),
     ("model", "ViT-L-16", "vit_l_16"), ("data", "fashion-mnist", "fashion_mnist"), ("model", "resnet", None)],
)  # fmt: skip
def test_options_by_case_and_other_names_before_letters(group: str, typed: str, meant: str | None):
    assert closest(typed, options_of(group)) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("h100", "h100_sxm"), ("H100_SXM", "h100_sxm"), ("a100", "a100_80gb"), ("H100-PCIe", "h100_pcie"),
     ("mi300", "mi300x"), ("l40", "l40s"), ("h20", "h200")],
)  # fmt: skip
def test_devices(typed: str, meant: str):
    assert closest(typed, known_devices()) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("training.batch_size", "training.global_batch_size"), ("optimizer.LR", "optimizer.lr"),
     ("checkpoint.every", "checkpoint.every_epochs"), ("optimizer.beta3", "optimizer.beta2"),
     ("cluster.num_worker", "cluster.num_workers"), ("lr", "optimizer.lr")],
)  # fmt: skip
def test_keys(typed: str, meant: str):
    assert closest(typed, all_keys()) == meant
