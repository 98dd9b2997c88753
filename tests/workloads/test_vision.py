"""The images are the real ones, and the models the published ones."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torchvision
from sklearn.datasets import load_digits
from torch import nn

from fsdp_lab.workloads.build import build_model_spec
from fsdp_lab.workloads.examples.vision.digits import Digits
from fsdp_lab.workloads.examples.vision.fashion_mnist import FashionMnist
from fsdp_lab.workloads.examples.vision.images import Images
from tests.conftest import FASHION_MNIST
from tests.ranks import config


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


@pytest.mark.skipif(not (FASHION_MNIST / "FashionMNIST").is_dir(), reason=f"no FashionMNIST in {FASHION_MNIST}")
def test_fashion_mnist_is_torchvisions() -> None:
    """Against the files' own bytes: 16 bytes of header before the pixels, 8 before the labels."""
    raw = FASHION_MNIST / "FashionMNIST" / "raw"
    for name, stem in (("train", "train"), ("val", "t10k")):
        split = FashionMnist(name, root=str(FASHION_MNIST), download=False)
        assert split.num_classes == 10
        pixels = (raw / f"{stem}-images-idx3-ubyte").read_bytes()[16:]
        labels = (raw / f"{stem}-labels-idx1-ubyte").read_bytes()[8:]
        assert split.images.shape == (len(labels), 1, 28, 28)
        assert split.images.numpy().tobytes() == pixels
        assert split.labels.byte().numpy().tobytes() == labels


@pytest.mark.parametrize("name", ["vit_b_16", "vit_l_16", "vit_h_14"])
def test_large_vits_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)()
        ours = build_model_spec(config(f"model={name}", "data=synthetic").model).build()
    shapes, heads = [], []
    for model in (ours, theirs):
        shapes.append({name: value.shape for name, value in model.state_dict().items()})
        heads.append([module.num_heads for module in model.modules() if isinstance(module, nn.MultiheadAttention)])
    assert shapes[0] == shapes[1] and heads[0] == heads[1]
