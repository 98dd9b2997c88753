"""The models are the published ones, their weights those of a plain script, and the units the right ones."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from fsdp_lab.config import TrialConfig
from fsdp_lab.training.blocks import find_block_classes
from fsdp_lab.training.parallelize import apply_to_blocks, sharding_units
from fsdp_lab.workloads.build import build_model_spec
from fsdp_lab.workloads.construct import Blueprint
from tests.ranks import config
from tests.training.units import names_of


def build(trial: TrialConfig, device: str = "meta") -> nn.Module:
    with torch.device(device):
        return build_model_spec(trial.model).build()


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def num_params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_vit_tiny_is_the_tutorials() -> None:
    model = build(config("model=vit_tiny"))
    got = shapes(model)
    assert got["conv_proj.weight"] == (64, 1, 7, 7)
    assert got["encoder.pos_embedding"] == (1, 17, 64)  # 4 x 4 patches and the class token
    assert got["encoder.layers.encoder_layer_3.mlp.0.weight"] == (128, 64)
    assert got["heads.head.weight"] == (10, 64)
    layers = model.encoder.layers
    assert (len(layers), layers[0].self_attention.num_heads) == (4, 2)
    # 3,200 patches + 64 class token + 1,088 positions + 4 blocks of 33,472 + 128 last norm + 650 head
    assert num_params(model) == 3_200 + 64 + 1_088 + 4 * 33_472 + 128 + 650 == 139_018


@pytest.mark.parametrize("name", ["vit_b_16", "vit_l_16", "vit_h_14"])
def test_large_vits_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)()
    ours = build(config(f"model={name}", "data=synthetic"))
    assert shapes(ours) == shapes(theirs)
    heads = [m.num_heads for m in ours.modules() if isinstance(m, nn.MultiheadAttention)]
    assert heads == [m.num_heads for m in theirs.modules() if isinstance(m, nn.MultiheadAttention)]


def test_mlp_is_1024_1024_10() -> None:
    trial = config("model=mlp")
    assert list(shapes(build(trial)).values()) == [(1024, 1024), (1024,), (10, 1024), (10,)]
    model = build(trial, "cpu")
    images = torch.randn(3, 1, 32, 32)
    first, last = model.blocks[0][0], model.head
    by_hand = (images.flatten(1) @ first.weight.T + first.bias).clamp(min=0) @ last.weight.T + last.bias
    torch.testing.assert_close(model(images), by_hand)


def test_weights_are_those_of_a_plain_script() -> None:
    """With grey images the first convolution is ours, and drawn after all of torchvision's own."""
    for trial in (config("model=vit_tiny", "training.seed=3"), config("model=vit_tiny", "model.num_channels=3")):
        ours = dict(Blueprint(build_model_spec(trial.model).build, trial.training.seed).values())
        torch.manual_seed(trial.training.seed)
        theirs = torchvision.models.VisionTransformer(28, 7, 4, 2, 64, 128, num_classes=10).state_dict()
        assert ours.keys() == theirs.keys()
        differing = {name for name in ours if not torch.equal(ours[name], theirs[name])}
        assert differing == (
            {"conv_proj.weight", "conv_proj.bias"} if trial.model.arguments["num_channels"] == 1 else set()
        )


LAYERS = [f"encoder.layers.encoder_layer_{i}" for i in range(4)]
PER_LAYER = [
    "conv_proj",
    *(f"{layer}.{part}" for layer in LAYERS for part in ("ln_1", "self_attention", "ln_2", "mlp.0", "mlp.3")),
    "encoder.ln",
    "encoder",  # holds the position embedding
    "heads.head",
]
ATTENTION_AND_MLP = [f"{layer}.{part}" for layer in LAYERS for part in ("self_attention", "mlp")]
ATTENTION_AND_REST = [f"{layer}{part}" for layer in LAYERS for part in (".self_attention", "")]
# Parameters: attention 16,640; mlp 16,576 (its layers 8,320 and 8,256); a block 33,472; all blocks 133,888;
# encoder 135,104; conv_proj 3,200; head 650; last norm 128.


def unit_names(*overrides: str) -> list[str]:
    trial = config(*overrides)
    model = build(trial)
    blocks = find_block_classes(model)
    units = sharding_units(model, blocks, trial.sharding)
    apply_to_blocks(model, blocks, units, trial)
    return names_of(model, units)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sharding=root"], []),
        (["sharding=per_block"], LAYERS),
        (["sharding=per_block", "activation_checkpointing=full"], LAYERS),
        (["sharding=per_layer"], PER_LAYER),
        (["sharding=per_block", "model=mlp"], ["blocks.0"]),
        (["sharding=per_layer", "model=mlp"], ["blocks.0.0", "head"]),
    ],
)
def test_units_of_each_granularity(overrides: list[str], expected: list[str]) -> None:
    assert unit_names(*overrides) == expected


@pytest.mark.parametrize(
    ("min_num_params", "expected"),
    [
        (1_000_000, []),
        (135_105, []),
        (135_104, ["encoder"]),
        (133_889, ["encoder"]),
        (133_888, ["encoder.layers"]),
        (33_473, ["encoder.layers"]),
        (33_472, LAYERS),
        (16_641, LAYERS),
        (16_640, ATTENTION_AND_REST),  # and what is left of a block, 16,832
        (16_576, ATTENTION_AND_MLP),
        (8_321, ATTENTION_AND_MLP),
    ],
)
def test_size_based_threshold(min_num_params: int, expected: list[str]) -> None:
    """A module becomes a unit when what its inner units left over reaches the threshold."""
    got = unit_names("sharding=size_based", f"sharding.min_num_params={min_num_params}")
    assert got == expected
