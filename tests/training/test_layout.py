"""What a trial records of how it divided its model."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_lab.layout import Layout
from fsdp_lab.training.layout import describe_layout
from fsdp_lab.training.parallelize import apply_to_blocks, sharding_units
from fsdp_lab.workloads.build import build_model_spec
from fsdp_lab.workloads.language.llama import Block
from tests.ranks import config

LM = ("task=language", "model=lm_tiny", "data=pydoc")
BLOCK = "fsdp_lab.workloads.language.llama:Block"


def layout(*overrides: str) -> Layout:
    trial = config(*LM, *overrides)
    model = build_model_spec(trial.model).build()
    apply_to_blocks(model, (Block,), trial)
    return describe_layout(model, sharding_units(model, (Block,), trial.sharding), (Block,))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_blocks_are_named_by_their_class(checkpointing: str) -> None:
    shown = layout("sharding=per_block", f"activation_checkpointing={checkpointing}")
    assert shown == Layout(["blocks.*"], [BLOCK], [BLOCK])


def test_the_root_alone_has_no_units() -> None:
    assert layout("sharding=root") == Layout([], [], [BLOCK])


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_layers_have_the_names_that_they_have_without_checkpointing(checkpointing: str) -> None:
    shown = layout("sharding=per_layer", f"activation_checkpointing={checkpointing}")
    assert shown.units == [
        "embedding", "blocks.*.attention_norm", "blocks.*.attention.q_proj", "blocks.*.attention.k_proj",
        "blocks.*.attention.v_proj", "blocks.*.attention.o_proj", "blocks.*.ffn_norm", "blocks.*.ffn.gate_proj",
        "blocks.*.ffn.up_proj", "blocks.*.ffn.down_proj", "norm", "head",
    ]  # fmt: skip
    assert {path.partition(":")[2] for path in shown.unit_classes} == {
        "Embedding", "RMSNorm", "Linear",
    }  # fmt: skip


def test_classes_are_left_out_where_one_of_their_modules_is_no_unit() -> None:
    """Tied weights lie in the root: the embedding and the head are no units, other linear layers are."""
    shown = layout("sharding=per_layer", "model.tied=true")
    assert "head" not in shown.units and "blocks.*.ffn.up_proj" in shown.units
    assert shown.unit_classes == []


def test_numbers_stay_where_a_pattern_would_match_more() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert describe_layout(model, [model[0], model[2]], ()).units == ["0", "2"]
    assert describe_layout(model, [model[2]], ()).unit_classes == []
