"""Parameters that cannot be sharded are refused on `meta`, by name. What the others learn: `test_parity.py`."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fsdp_lab.config import ModelError
from fsdp_lab.training.blocks import find_block_classes
from fsdp_lab.training.layout import Layout, unit_notes
from fsdp_lab.training.parallelize import in_groups, sharding_units
from fsdp_lab.training.shardable import check_parameters, make_contiguous
from fsdp_lab.workloads.construct import Blueprint
from tests.ranks import config
from tests.workloads.user import unusual

ADAM = "optimizer=adam"
SGD = "optimizer=sgd"


def refusal(build: object, words: str) -> str:
    """What the check of a model says; "": it passes."""
    trial = config(*words.split())
    model = Blueprint(build, seed=0).model  # type: ignore[arg-type]
    groups: list[list[nn.Module]] = []
    if "sharding=ddp" not in words:
        units = sharding_units(model, find_block_classes(model), trial.sharding)
        groups = in_groups(model, units, trial.sharding.blocks_per_unit)
    try:
        check_parameters(model, groups, trial)
    except ModelError as error:
        return str(error)
    return ""


SHARDED = ("sharding=root", "sharding=per_block", "sharding=per_layer", "sharding=per_block sharding.blocks_per_unit=2")
COMPLEX = "blocks.0.inner.filter is complex64"
# Each model in each sharding -> what the message says.
REFUSED = [
    (unusual.scalar, SHARDED, "the parameter blocks.0.inner.scale is a scalar, .*x.reshape(1).*sharding=ddp"),
    (unusual.SparseGradient, SHARDED, "table (Embedding) has sparse=True.*sparse=False"),
    (
        unusual.two_dtypes,
        SHARDED[1:2],
        "blocks.2.inner.scale is bfloat16 and blocks.2.inner.inner.weight is float32.*unit, here blocks.2,.*per_layer",
    ),
    (unusual.two_dtypes, SHARDED[:1], "blocks.2.inner.scale is bfloat16.*here the root"),
    (unusual.complex_filters, [f"sharding=per_block {SGD}"], f"{COMPLEX} and .*unit, here blocks.0"),
    (
        unusual.complex_filters,
        [
            f"sharding=per_layer {ADAM}",
            f"sharding=per_layer {SGD} precision=bf16_mixed",
            *(f"sharding=ddp precision={name}" for name in ("grad_bf16", "fp16_mixed")),
            "sharding=ddp optimizer.implementation=fused",
        ],
        f"the parameter {COMPLEX}: .*optimizer=sgd precision=fp32.*view_as_real",
    ),
    (unusual.in_float64, [f"{s} precision=bf16_mixed" for s in SHARDED], "first.weight is float64.*precision=fp32"),
]


@pytest.mark.parametrize(
    ("build", "words", "expected"), [(build, words, text) for build, each, text in REFUSED for words in each]
)
def test_what_cannot_be_sharded_is_refused_by_its_name(build: object, words: str, expected: str) -> None:
    pattern = ".*".join(re.escape(part) for part in expected.split(".*"))
    assert re.search(pattern, refusal(build, words)), refusal(build, words)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (unusual.scalar, "sharding=ddp"),
        (unusual.SparseGradient, "sharding=ddp"),
        (unusual.two_dtypes, "sharding=per_layer"),
        (unusual.two_dtypes, "sharding=ddp"),
        (unusual.frozen_bfloat16, "sharding=per_block"),
        (unusual.whole_numbers, "sharding=per_block precision=bf16"),
        (unusual.in_float64, "sharding=ddp precision=bf16_mixed"),
        (unusual.in_float64, "sharding=root precision=grad_bf16"),
        (unusual.complex_filters, "sharding=ddp precision=bf16_mixed"),
        (unusual.complex_filters, f"sharding=per_layer {SGD}"),
    ],
)
def test_what_can_be_trained_is_not_refused(build: object, words: str) -> None:
    assert refusal(build, words) == ""


def test_contiguous_parameters_keep_their_ties() -> None:
    model = unusual.Layers(*(unusual.Block(unusual.Own(torch.ones(4, 2).t())) for _ in range(2)))
    first, second = (block.inner for block in model.blocks)
    second.weight = first.weight
    make_contiguous(model)
    assert first.weight is second.weight and first.weight.is_contiguous() and first.weight.shape == (2, 4)


def test_a_note_says_that_no_module_became_a_unit() -> None:
    shared = Blueprint(unusual.a_shared_module, seed=0).model
    assert sharding_units(shared, find_block_classes(shared), config("sharding=per_block").sharding) == []
    (note,) = unit_notes(Layout(), config("sharding=per_block"))
    assert note.startswith("sharding=per_block found no module") and "as with sharding=root" in note
    assert unit_notes(Layout(["blocks.*"]), config("sharding=per_block")) == []
    assert unit_notes(Layout(), config("sharding=root")) == unit_notes(Layout(), config("sharding=ddp")) == []
