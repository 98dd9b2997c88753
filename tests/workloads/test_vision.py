"""The images are the real ones; the models are the published ones, and are cut into the right units."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torchvision
from sklearn.datasets import load_digits
from torch import nn

from fsdp_lab.config import TrialConfig
from fsdp_lab.training.blocks import find_block_classes
from fsdp_lab.training.parallelize import apply_to_blocks, sharding_units
from fsdp_lab.workloads.build import build_model_spec
from fsdp_lab.workloads.vision.digits import Digits
from fsdp_lab.workloads.vision.fashion_mnist import FashionMnist
from fsdp_lab.workloads.vision.images import Images, expand_channels
from fsdp_lab.workloads.vision.synthetic import SyntheticImages
from tests.conftest import FASHION_MNIST
from tests.ranks import config
from tests.training.reference import digits, names_of, resize


def rows(images: torch.Tensor, labels: torch.Tensor) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row) for row in torch.cat([images.flatten(1).long(), labels[:, None]], 1).tolist())


def test_digits_are_scikit_learns() -> None:
    train, val = Digits("train"), Digits("val")
    assert (len(train), len(val)) == (1437, 360)
    bunch = load_digits()
    scaled = (torch.from_numpy(bunch.images) * 255 / 16).round()
    ours = rows(torch.cat([train.images, val.images]), torch.cat([train.labels, val.labels]))
    assert ours == rows(scaled, torch.from_numpy(bunch.target))
    assert not set(rows(train.images, train.labels)) & set(rows(val.images, val.labels))
    assert set(val.labels.tolist()) == set(range(10))
    assert Digits("train").digest == train.digest != val.digest
    train.images[700, 0, 3, 3] += 1
    assert Images(train.images, train.labels).digest != Digits("train").digest


def test_batches_are_resized_and_scaled() -> None:
    (images, labels), _ = digits()
    index = torch.tensor([3, 0, 7])
    train = Digits("train", image_size=28)
    got, got_labels = train.batch(index)
    torch.testing.assert_close(got, resize(images[index], 28))
    assert got.shape == (3, 1, 28, 28) and -1 <= got.min() < got.max() <= 1
    assert got_labels.tolist() == labels[index].tolist()
    assert all(torch.equal(one, batched) for one, batched in zip(train[0], (got[1], got_labels[1]), strict=True))
    rgb = expand_channels(Digits("train").batch(index)[0], 3)
    assert rgb.shape == (3, 3, 8, 8) and torch.equal(rgb[:, 0], rgb[:, 2])
    torch.testing.assert_close(rgb[:, :1], images[index])


@pytest.mark.skipif(not (FASHION_MNIST / "FashionMNIST").is_dir(), reason=f"no FashionMNIST in {FASHION_MNIST}")
def test_fashion_mnist_is_torchvisions() -> None:
    """Against the files' own bytes: 16 bytes of header before the pixels, 8 before the labels."""
    raw = FASHION_MNIST / "FashionMNIST" / "raw"
    for name, stem in (("train", "train"), ("val", "t10k")):
        split = FashionMnist(name, root=str(FASHION_MNIST), download=False)
        assert split.num_classes == len(split.class_names) == 10
        pixels = (raw / f"{stem}-images-idx3-ubyte").read_bytes()[16:]
        labels = (raw / f"{stem}-labels-idx1-ubyte").read_bytes()[8:]
        assert split.images.shape == (len(labels), 1, 28, 28)
        assert split.images.numpy().tobytes() == pixels
        assert split.labels.byte().numpy().tobytes() == labels


def test_synthetic_images_have_the_models_shape_and_a_seed() -> None:
    sizes = {"image_size": 16, "num_channels": 3, "num_classes": 7}
    model = config("model=vit_tiny", "model.patch_size=4", *(f"model.{name}={size}" for name, size in sizes.items()))
    assert config("data=synthetic").data.arguments_for(model.model) == sizes
    train, val, again = (SyntheticImages(split, **sizes) for split in ("train", "val", "train"))
    images, labels = train.batch(torch.tensor([0, 64, 99]))  # of a million, with 64 in memory
    assert images.shape == (3, 3, 16, 16) and images[0].equal(images[1]) and labels.max() < 7
    assert torch.equal(train.images, again.images) and not torch.equal(train.images, val.images)


def build(trial: TrialConfig) -> nn.Module:
    with torch.device("meta"):
        return build_model_spec(trial.model).build()


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def test_vit_tiny_is_the_tutorials() -> None:
    model = build(config("model=vit_tiny"))
    got = shapes(model)
    assert got["conv_proj.weight"] == (64, 1, 7, 7)
    assert got["encoder.pos_embedding"] == (1, 17, 64)  # 4 x 4 patches and the class token
    layers = model.encoder.layers
    assert (len(layers), layers[0].self_attention.num_heads) == (4, 2)
    # 3,200 patches + 64 class token + 1,088 positions + 4 blocks of 33,472 + 128 last norm + 650 head
    expected = 3_200 + 64 + 1_088 + 4 * 33_472 + 128 + 650
    assert sum(p.numel() for p in model.parameters()) == expected == 139_018


@pytest.mark.parametrize("name", ["vit_b_16", "vit_l_16", "vit_h_14"])
def test_large_vits_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)()
    ours = build(config(f"model={name}", "data=synthetic"))
    assert shapes(ours) == shapes(theirs)
    heads = [m.num_heads for m in ours.modules() if isinstance(m, nn.MultiheadAttention)]
    assert heads == [m.num_heads for m in theirs.modules() if isinstance(m, nn.MultiheadAttention)]


LAYERS = [f"encoder.layers.encoder_layer_{i}" for i in range(4)]
ATTENTION_AND_MLP = [f"{layer}.{part}" for layer in LAYERS for part in ("self_attention", "mlp")]
ATTENTION_AND_REST = [f"{layer}{part}" for layer in LAYERS for part in (".self_attention", "")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sharding=per_block activation_checkpointing=full", LAYERS),
        ("sharding=per_block model=mlp", ["blocks.0"]),
        ("sharding=per_layer model=mlp", ["blocks.0.0", "head"]),
        # A module becomes a unit when what its inner units left over reaches the threshold. Parameters: attention
        # 16,640; mlp 16,576; a block 33,472; all blocks 133,888; encoder 135,104.
        ("sharding=size_based sharding.min_num_params=135_105", []),
        ("sharding=size_based sharding.min_num_params=135_104", ["encoder"]),
        ("sharding=size_based sharding.min_num_params=133_888", ["encoder.layers"]),
        ("sharding=size_based sharding.min_num_params=33_472", LAYERS),
        ("sharding=size_based sharding.min_num_params=16_640", ATTENTION_AND_REST),  # left of a block: 16,832
        ("sharding=size_based sharding.min_num_params=16_576", ATTENTION_AND_MLP),
    ],
)
def test_units_of_each_sharding(words: str, expected: list[str]) -> None:
    trial = config(*words.split())
    model = build(trial)
    blocks = find_block_classes(model)
    units = sharding_units(model, blocks, trial.sharding)
    apply_to_blocks(model, blocks, units, trial)
    assert names_of(model, units) == expected
