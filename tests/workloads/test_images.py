"""The images are the real ones, and are served as the model takes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from fsdp_lab.config import UserError
from fsdp_lab.workloads.vision.digits import Digits
from fsdp_lab.workloads.vision.fashion_mnist import FashionMnist
from fsdp_lab.workloads.vision.images import Images, expand_channels
from fsdp_lab.workloads.vision.synthetic import SyntheticImages
from tests.ranks import config
from tests.training.reference import digits, resize

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_fashion_mnist = pytest.mark.skipif(not (SHARED / "FashionMNIST").is_dir(), reason=f"no FashionMNIST in {SHARED}")


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


def test_batches_are_resized_and_scaled() -> None:
    (images, labels), _ = digits()
    index = torch.tensor([3, 0, 7])
    train = Digits("train", image_size=28)
    got, got_labels = train.batch(index)
    torch.testing.assert_close(got, resize(images[index], 28))
    assert got.shape == (3, 1, 28, 28)
    assert -1 <= got.min() < got.max() <= 1
    assert got_labels.tolist() == labels[index].tolist()
    assert all(torch.equal(one, batched) for one, batched in zip(train[0], (got[1], got_labels[1]), strict=True))
    rgb = expand_channels(Digits("train").batch(index)[0], 3)
    assert rgb.shape == (3, 3, 8, 8)
    assert torch.equal(rgb[:, 0], rgb[:, 2])
    torch.testing.assert_close(rgb[:, :1], images[index])


@needs_fashion_mnist
def test_fashion_mnist_is_torchvisions() -> None:
    """Against the files' own bytes: 16 bytes of header before the pixels, 8 before the labels."""
    raw = SHARED / "FashionMNIST" / "raw"
    for name, stem in (("train", "train"), ("val", "t10k")):
        split = FashionMnist(name, root=str(SHARED), download=False)
        assert split.num_classes == len(split.class_names) == 10
        pixels = (raw / f"{stem}-images-idx3-ubyte").read_bytes()[16:]
        labels = (raw / f"{stem}-labels-idx1-ubyte").read_bytes()[8:]
        assert split.images.shape == (len(labels), 1, 28, 28)
        assert split.images.numpy().tobytes() == pixels
        assert split.labels.byte().numpy().tobytes() == labels


def test_a_failed_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", refuse)
    with pytest.raises(UserError, match=rf"data.root={tmp_path}: {tmp_path}/FashionMNIST/raw .*the download failed"):
        FashionMnist("train", root=str(tmp_path), download=True)


def test_synthetic_shapes_and_seed() -> None:
    sizes = {"image_size": 16, "num_channels": 3, "num_classes": 7}
    model = config("model=vit_tiny", "model.patch_size=4", *(f"model.{name}={size}" for name, size in sizes.items()))
    assert config("data=synthetic").data.arguments_for(model.model) == sizes
    train, val, again = (SyntheticImages(split, **sizes) for split in ("train", "val", "train"))
    assert train.images.shape == (64, 3, 16, 16)  # of a million: what lies in memory does not grow with the number
    assert len(train) == len(val) == 2**20
    images, labels = train.batch(torch.tensor([0, 64, 99]))
    assert images[0].equal(images[1])
    assert labels.tolist() == train.labels[[0, 64, 99]].tolist()
    assert train.least_num_classes(**sizes) == 7
    assert train.labels.max() < 7
    assert torch.equal(train.images, again.images)
    assert not torch.equal(train.images, val.images)


def test_digest_sees_one_pixel_one_label_and_the_shape() -> None:
    train, val = Digits("train"), Digits("val")
    assert Digits("train").digest == train.digest
    brighter, relabelled = train.images.clone(), train.labels.clone()
    brighter[700, 0, 3, 3] += 1
    relabelled[700] += 1
    others = [Images(brighter, train.labels), Images(train.images, relabelled), val,
              Images(train.images[:1436], train.labels[:1436])]  # fmt: skip
    assert len({train.digest, *(other.digest for other in others)}) == 5
