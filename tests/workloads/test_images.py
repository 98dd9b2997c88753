"""The images are the real ones, and are served as the model takes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from fsdp_lab.config import UserError
from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads.build import build_source, build_workload
from fsdp_lab.workloads.vision import digits as digits_module
from fsdp_lab.workloads.vision.digits import read_digits
from fsdp_lab.workloads.vision.fashion_mnist import prepare
from fsdp_lab.workloads.vision.images import ImageDataset, Split, digest, expand_channels
from tests.training.reference import digits, resize

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_fashion_mnist = pytest.mark.skipif(not (SHARED / "FashionMNIST").is_dir(), reason=f"no FashionMNIST in {SHARED}")


def rows(images: torch.Tensor, labels: torch.Tensor) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row) for row in torch.cat([images.flatten(1).long(), labels[:, None]], 1).tolist())


def test_digits_are_scikit_learns() -> None:
    train, val = read_digits()
    assert (len(train), len(val)) == (1437, 360)
    bunch = load_digits()
    scaled = (torch.from_numpy(bunch.images) * 255 / 16).round()
    ours = rows(torch.cat([train.images, val.images]), torch.cat([train.labels, val.labels]))
    assert ours == rows(scaled, torch.from_numpy(bunch.target))
    assert not set(rows(train.images, train.labels)) & set(rows(val.images, val.labels))
    assert set(val.labels.tolist()) == set(range(10))


def test_digits_without_the_installed_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scikit-learn keeps its file elsewhere, its own loader gives the same."""
    with_table = read_digits()
    monkeypatch.setattr(digits_module.importlib.util, "find_spec", lambda name: None)
    for a, b in zip(with_table, read_digits(), strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


def test_batches_are_resized_and_scaled() -> None:
    train, _ = read_digits()
    (images, labels), _ = digits()
    index = torch.tensor([3, 0, -1])
    got, got_labels = ImageDataset(train, ModelConfig(image_size=28))[index]
    torch.testing.assert_close(got, resize(images[index], 28))
    assert got.shape == (3, 1, 28, 28)
    assert -1 <= got.min() < got.max() <= 1
    assert got_labels.tolist() == [*labels[[3, 0]].tolist(), -1]
    rgb_model = ModelConfig(image_size=8, num_channels=3)
    rgb = expand_channels(ImageDataset(train, rgb_model)[index][0], rgb_model)
    assert rgb.shape == (3, 3, 8, 8)
    assert torch.equal(rgb[:, 0], rgb[:, 2])
    torch.testing.assert_close(rgb[:, :1], images[index])


@needs_fashion_mnist
def test_fashion_mnist_is_torchvisions() -> None:
    """Against the files' own bytes: 16 bytes of header before the pixels, 8 before the labels."""
    raw = SHARED / "FashionMNIST" / "raw"
    source = build_source(DataConfig(name="fashion_mnist", root=str(SHARED)), ModelConfig())
    train, val = source.read()
    assert source.num_classes == 10
    for split, stem in ((train, "train"), (val, "t10k")):
        pixels = (raw / f"{stem}-images-idx3-ubyte").read_bytes()[16:]
        labels = (raw / f"{stem}-labels-idx1-ubyte").read_bytes()[8:]
        assert split.images.shape == (len(labels), 1, 28, 28)
        assert split.images.numpy().tobytes() == pixels
        assert split.labels.byte().numpy().tobytes() == labels


def refuse(*args: object, **kwargs: object) -> None:
    raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")


@pytest.mark.parametrize(("download", "reason"), [(False, "data.download=false"), (True, "the download failed")])
def test_missing_data_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, download: bool, reason: str) -> None:
    import torchvision.datasets

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", refuse)
    with pytest.raises(UserError) as caught:
        prepare(DataConfig(name="fashion_mnist", root=str(tmp_path), download=download))
    looked_in = str(tmp_path / "FashionMNIST" / "raw")
    for words in (f"data.root={tmp_path}", looked_in, "train-images-idx3-ubyte", "data=digits", reason):
        assert words in str(caught.value)


def test_synthetic_shapes_and_seed() -> None:
    model = ModelConfig(image_size=16, num_channels=3, num_classes=7)
    settings = DataConfig(name="synthetic", num_train=100, num_val=40)
    source = build_source(settings, model)
    train, val = source.read()
    assert train.images.shape == (64, 3, 16, 16)  # of 100: what lies in memory does not grow with the number
    assert len(train) == 100
    images, labels = ImageDataset(train, model)[torch.tensor([0, 64, 99])]
    assert images[0].equal(images[1])
    assert labels.tolist() == train.labels[[0, 64, 99]].tolist()
    assert val.images.shape == (40, 3, 16, 16)
    assert source.num_classes == 7
    assert train.labels.max() < 7
    again, _ = source.read()
    assert torch.equal(train.images, again.images)
    assert not torch.equal(train.images[:40], val.images)


def test_a_class_too_many_for_the_model_is_reported() -> None:
    with pytest.raises(UserError) as caught:
        build_workload(ModelConfig(num_classes=7), DataConfig()).data.load()
    expected = "model.num_classes=7 is less than the 10 classes of data=digits; use model.num_classes=10."
    assert str(caught.value) == expected


def test_digest_sees_one_pixel_one_label_and_the_shape() -> None:
    train, val = read_digits()
    before = digest(train, val)
    assert digest(*read_digits()) == before
    brighter = Split(train.images.clone(), train.labels)
    brighter.images[700, 0, 3, 3] += 1
    relabelled = Split(train.images, train.labels.clone())
    relabelled.labels[700] += 1
    others = [(brighter, val), (relabelled, val), (val, train), (train.first(1436), val)]
    assert len({before, *(digest(*splits) for splits in others)}) == 5
    assert len(before) <= 36  # MLflow keeps no more
