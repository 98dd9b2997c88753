"""The images are the real ones, and their order depends on seed and epoch only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from fsdp_lab.config import UserError
from fsdp_lab.config.schema import DataConfig, DataName, ModelConfig, TrainingConfig
from fsdp_lab.training import data as module
from fsdp_lab.training.data import (
    ImageDataset,
    Split,
    TrainOrder,
    ValOrder,
    build_loader,
    digest,
    expand_channels,
    prepare,
    read_digits,
    read_splits,
)
from fsdp_lab.training.distributed import Ranks
from tests.ranks import config, run_ranks
from tests.training.reference import digits, resize

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_fashion_mnist = pytest.mark.skipif(not (SHARED / "FashionMNIST").is_dir(), reason=f"no FashionMNIST in {SHARED}")


def ranks_of(world_size: int) -> list[Ranks]:
    return [Ranks(r, r, world_size, torch.device("cpu")) for r in range(world_size)]


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


def test_digits_split_is_fixed() -> None:
    once, again = read_digits(), read_digits()
    for a, b, (images, labels) in zip(once, again, digits(), strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, labels)
        torch.testing.assert_close(a.images.float() / 127.5 - 1, images)


def test_digits_without_the_installed_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scikit-learn keeps its file elsewhere, its own loader gives the same."""
    with_table = read_digits()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
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


def test_grey_images_for_a_model_of_three_channels_can_be_pinned() -> None:
    """Pinning allocates the same strides and copies into them, which PyTorch refuses for a stride of 0. The loader
    itself skips pinning where there is no accelerator, so the same two steps are taken here."""
    train, _ = read_digits()
    model = ModelConfig(image_size=28, num_channels=3)
    (ranks,) = ranks_of(1)
    order = TrainOrder(len(train), TrainingConfig(global_batch_size=16), ranks)
    images, labels = next(iter(build_loader(train, order, DataConfig(), model, ranks)))
    for tensor in (images, labels):
        torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    assert expand_channels(images, model).shape == (16, 3, 28, 28)


def global_batches(world_size: int, accumulate: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    """The images of every optimizer step, all ranks and microbatches together."""
    training = TrainingConfig(global_batch_size=24, grad_accum_steps=accumulate, seed=seed)
    steps: list[list[int]] = [[] for _ in range(100 // 24)]
    for ranks in ranks_of(world_size):
        order = TrainOrder(100, training, ranks)
        order.epoch = epoch
        microbatches = list(order)
        assert len(microbatches) == len(order) == 4 * accumulate
        assert all(len(m) == 24 // world_size // accumulate for m in microbatches)
        for i, microbatch in enumerate(microbatches):
            steps[i // accumulate] += microbatch.tolist()
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_sees_the_same_images_on_any_number_of_workers(world_size: int, accumulate: int) -> None:
    steps = global_batches(world_size, accumulate, seed=3, epoch=2)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3 * 1_000_003 + 2)).tolist()
    assert steps == [sorted(order[i * 24 : (i + 1) * 24]) for i in range(4)]
    assert len({image for step in steps for image in step}) == 96  # none twice in an epoch


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = [global_batches(2, 1, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert orders[0] == global_batches(2, 1, 0, 0)


def test_a_batch_larger_than_the_data_is_told() -> None:
    with pytest.raises(UserError, match=r"global_batch_size=64 .* 50 training images; use at most 50"):
        TrainOrder(50, TrainingConfig(global_batch_size=64), ranks_of(1)[0])


@pytest.mark.parametrize(("count", "world_size", "batch"), [(10, 1, 4), (10, 4, 2), (3, 4, 8), (12, 3, 4), (360, 2, 7)])
def test_validation_counts_each_image_once(count: int, world_size: int, batch: int) -> None:
    orders = [list(ValOrder(count, batch, ranks)) for ranks in ranks_of(world_size)]
    assert len({len(order) for order in orders}) == 1  # all ranks step together
    seen = [i for order in orders for microbatch in order for i in microbatch.tolist() if i >= 0]
    assert sorted(seen) == list(range(count))
    assert all(len(microbatch) <= batch for order in orders for microbatch in order)


@needs_fashion_mnist
def test_fashion_mnist_is_torchvisions() -> None:
    """Against the files' own bytes: 16 bytes of header before the pixels, 8 before the labels."""
    raw = SHARED / "FashionMNIST" / "raw"
    train, val, classes = read_splits(DataConfig(name=DataName.fashion_mnist, root=str(SHARED)), ModelConfig())
    assert classes == 10
    for split, stem in ((train, "train"), (val, "t10k")):
        pixels = (raw / f"{stem}-images-idx3-ubyte").read_bytes()[16:]
        labels = (raw / f"{stem}-labels-idx1-ubyte").read_bytes()[8:]
        assert split.images.shape == (len(labels), 1, 28, 28)
        assert split.images.numpy().tobytes() == pixels
        assert split.labels.byte().numpy().tobytes() == labels


@needs_fashion_mnist
def test_fashion_mnist_items_equal_torchvisions() -> None:
    from torchvision.datasets import FashionMNIST

    theirs = FashionMNIST(str(SHARED), train=False)
    _, val, _ = read_splits(DataConfig(name=DataName.fashion_mnist, root=str(SHARED)), ModelConfig())
    images, labels = ImageDataset(val, ModelConfig(image_size=28))[torch.arange(20)]
    for i in range(20):
        picture, label = theirs[i]
        assert labels[i] == label
        pixels = torch.tensor(list(picture.getdata())).view(28, 28)
        torch.testing.assert_close(images[i, 0], pixels / 127.5 - 1)


def refuse(*args: object, **kwargs: object) -> None:
    raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")


@pytest.mark.parametrize(("download", "reason"), [(False, "data.download=false"), (True, "the download failed")])
def test_missing_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, download: bool, reason: str) -> None:
    import torchvision.datasets

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", refuse)
    with pytest.raises(UserError) as caught:
        prepare(DataConfig(name=DataName.fashion_mnist, root=str(tmp_path), download=download))
    looked_in = str(tmp_path / "FashionMNIST" / "raw")
    for words in (f"data.root={tmp_path}", looked_in, "train-images-idx3-ubyte", "data=digits", reason):
        assert words in str(caught.value)


def load_with_one_download(folder: str) -> tuple[list[str], str]:
    """`(who prepared the data, what was raised)` on this rank, where preparing fails on local rank 0."""
    from fsdp_lab.training.distributed import setup_distributed

    ranks, called = setup_distributed(), []

    def prepare(data: DataConfig) -> None:
        called.append(f"rank {ranks.rank}")
        raise UserError("nothing there")

    module.prepare = prepare
    try:
        module.load_data(config("data=fashion_mnist", f"data.root={folder}").data, ModelConfig(), ranks)
    except UserError as error:
        return called, str(error)
    return called, ""


def test_one_process_prepares_and_all_fail_together(tmp_path: Path) -> None:
    (called, error), (also_called, other_error) = run_ranks(2, load_with_one_download, str(tmp_path))
    assert (called, also_called) == (["rank 0"], [])
    assert error == "nothing there"
    assert other_error == error  # the other rank knows why, in the same words


def test_synthetic_shapes_and_seed() -> None:
    model = ModelConfig(image_size=16, num_channels=3, num_classes=7)
    settings = DataConfig(name=DataName.synthetic, num_train=100, num_val=40)
    train, val, classes = read_splits(settings, model)
    assert train.images.shape == (64, 3, 16, 16)  # of 100: what lies in memory does not grow with the number
    assert len(train) == 100
    images, labels = ImageDataset(train, model)[torch.tensor([0, 64, 99])]
    assert images[0].equal(images[1])
    assert labels.tolist() == train.labels[[0, 64, 99]].tolist()
    assert val.images.shape == (40, 3, 16, 16)
    assert classes == 7
    assert train.labels.max() < 7
    again, _, _ = read_splits(settings, model)
    assert torch.equal(train.images, again.images)
    assert not torch.equal(train.images[:40], val.images)


def test_a_class_too_many_for_the_model_is_told() -> None:
    (told,) = run_ranks(1, load_with_few_classes)
    assert told == "model.num_classes=7 is less than the 10 classes of data=digits; use model.num_classes=10."


def load_with_few_classes() -> str:
    from fsdp_lab.training.distributed import setup_distributed

    try:
        module.load_data(DataConfig(), ModelConfig(num_classes=7), setup_distributed())
    except UserError as error:
        return str(error)
    return ""


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
