"""A user's model, data set and loss under the training loop, on two ranks; what does not fit is one message."""

from __future__ import annotations

import collections
import collections.abc
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fsdp_lab.config import UserError
from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.source_code import code_digest, user_packages
from fsdp_lab.config.target import user_root
from fsdp_lab.engine.failures import failure_of
from fsdp_lab.record.reasons import Code
from fsdp_lab.workloads.base import tensors_of, to_device
from fsdp_lab.workloads.build import build_workload
from fsdp_lab.workloads.user.data import Collated, digest_of, like
from fsdp_lab.workloads.user.loss_form import LossForm
from fsdp_lab.workloads.user.task import UserLoss
from fsdp_lab.workloads.user.units import num_tokens
from tests.parity import VIT, WORKLOADS
from tests.ranks import Memo, config, run_ranks, train_all
from tests.training.reference import apart
from tests.workloads.user import counting
from tests.workloads.user.my_project import net
from tests.workloads.user.project import HERE, importable, write_project


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As `BatchEncoding` of transformers: a UserDict whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Pair(NamedTuple):
    x: Tensor
    rest: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    rest: list[Tensor]
    name: str = "rows"


class Graph:
    """As PyTorch Geometric's: it moves itself, and returns itself."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: torch.device) -> Graph:
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


class Fixed(collections.abc.Mapping[str, Any]):
    """A mapping that is not changed."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = dict(parts)

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class Named(tuple[Tensor, ...]):
    """It is made of a name and its items."""

    name: str

    def __new__(cls, name: str, *items: Tensor) -> Named:
        made = super().__new__(cls, items)
        made.name = name
        return made


class Rows(list[Any]):
    """It is made of a name and an item."""

    def __init__(self, name: str, item: Any) -> None:
        super().__init__([item])
        self.name = name


class Columns(dict[str, Any]):
    """As above."""

    def __init__(self, name: str, item: Any) -> None:
        super().__init__({name: item})


def collate(items: list[dict[str, Tensor]]) -> Any:
    """A batch in which a class is in another: a dictionary, a tuple, and each of those above."""
    x, y = (torch.stack([item[name] for item in items]) for name in "xy")
    rest = Named("f", Rows("r", Columns("c", Frozen(x, [y]))))  # type: ignore[arg-type]
    return Fixed({"all": (Encoding(g=Graph(x, y)), Pair(x, {"f": rest}))})


def parts_of(batch: Any) -> list[Tensor]:
    """Each tensor of a batch, as its user reads it."""
    encoding, pair = batch["all"]
    (rows,) = pair.rest["f"]
    frozen = rows[0]["c"]
    assert (pair.rest["f"].name, rows.name) == ("f", "r")
    return [encoding.g.x, encoding["g"].y, pair.x, frozen.x, frozen.rest[0]]


def even_classes(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Every second image counts."""
    images, classes = batch
    logits = model(images)[::2]
    return nn.functional.cross_entropy(logits, classes[::2], reduction="sum"), torch.tensor(len(logits))


def collate_sparse(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in "xy"}


def in_layout(i: int, items: list[dict[str, Tensor]]) -> Tensor:
    """A batch in one of the sparse layouts, or nested."""
    y = torch.stack([item["y"] for item in items]).diag()
    made = [y.to_sparse(), y.to_sparse_csr(), y.to_sparse_csc(), y.to_sparse_bsr((1, 1)), y.to_sparse_bsc((1, 1))]
    return [*made, torch.nested.nested_tensor([*y, torch.ones(2)], layout=torch.jagged)][i]


def loss_of_sparse(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return net.loss(model, {**batch, "x": batch["x"].to_dense()})


def loss_of_parts(model: nn.Module, batch: Any) -> Tensor:
    x, y, *_ = parts_of(batch)
    return net.loss(model, {"x": x, "y": y})


NET = f"model._target_={HERE}.net.Net model.width=16"
DATA = f"data._target_={HERE}.data.Corpus"
LOSS = f"task.loss={HERE}.net.loss"
THEIRS = f"{NET} {DATA} {LOSS}"
NESTED = f"{NET} {DATA} task.loss={__name__}.loss_of_parts data.collate_fn={__name__}.collate"
SPARSE = (
    f"{NET} data._target_={HERE}.data.Sparse task.loss={__name__}.loss_of_sparse "
    f"data.collate_fn={__name__}.collate_sparse"
)
AT_ONCE = f"{NET} data._target_={HERE}.data.AtOnce {LOSS}"
# What is typed -> a metric that it has, or what the message must say.
FITS = {
    THEIRS: "val/loss",
    **dict.fromkeys((NESTED, SPARSE, AT_ONCE), "val/loss"),
    f"{THEIRS} task.metrics={HERE}.net.off_by": "val/off_by",
    f"{NET} {LOSS} data=example data.num_val=7": "val/loss",
    f"model._target_={HERE}.net.digits model.width=8 sharding=root": "val/accuracy",
    f"data._target_={HERE}.data.Pictures": "val/accuracy",
    f"model._target_={HERE}.net.Reads model.width=8 {DATA} {LOSS}": "val/loss",
    f"model._target_={HERE}.net.Reads model.width=8 {DATA} {LOSS} init=rank0": "val/loss",
    f"model._target_={HERE}.net.Wraps model.inner._target_={HERE}.net.Net model.inner.width=4 "
    f'model.others=[{{"_target_":torch.nn.Identity}}] {DATA} {LOSS}': "val/loss",
}
DOES_NOT_FIT = {
    f"{NET} {DATA} task.loss={HERE}.net.of_each_item": r"a tensor of 16; .*loss\.mean\(\)",
    f"{NET} {DATA} task.loss={HERE}.net.loss_as_a_number": r"is a float; .*itself, without \.item\(\)",
    f"{NET} {DATA} task.loss={HERE}.net.loss_with_penalty sharding=root": (
        r"loss_with_penalty uses model\.head outside model\(\.\.\.\).*move it into forward"
    ),
    f"{NET} {DATA} task.loss={HERE}.net.loss_of_other_keys sharding=ddp": (
        r"loss_of_other_keys fails at tests/.*/net\.py:\d+ on a batch of \{x: 16x3 float32, .*\}: KeyError: 'labels'"
    ),
    f"{NET} {DATA} task.loss=torch.nn.functional.cross_entropy": (
        r"cross_entropy gets the model where it wants a tensor: .* return cross_entropy\(model\(x\), y\)"
    ),
    f"{NET} {DATA}": r"takes \(inputs, labels\), but this data set returns \{x: 16x3 .*\}; use task\.loss=",
    f"{NET} {LOSS} data._target_={HERE}.data.Unreadable data.loader_workers=1": (
        r"split=train: item \d+ cannot be read: ValueError: item \d+ is broken \(tests/workloads/user/my_project/data"
    ),
    f"{NET} {LOSS} data._target_={HERE}.data.Ragged": (
        r"do not form a batch: RuntimeError: stack expects.*Items of different sizes need a data\.collate_fn\."
    ),
    f"{NET} {LOSS} data._target_={HERE}.data.empty": "no items for split=train",
    f"{NET} {LOSS} data._target_={HERE}.data.stream": "a generator.*map-style data set",
    f"{NET} {LOSS} data._target_={HERE}.data.Stream": "a Stream for split=train; return a map-style data set",
    f"model._target_={HERE}.data.Pictures model.split=val {DATA}": r"must return an nn\.Module",
    f"model._target_={HERE}.net.LeavesOut model.width=8 {DATA} {LOSS} sharding=ddp": (
        r"sharding=ddp: some parameters got no gradient in the last step.*use sharding\.find_unused_parameters=true"
    ),
}
TOLD = f"model._target_={counting.__name__}.Told data._target_=tests.parity.SomeLabels data.kind=tokens"
_A_COUNT = r"it must be a scalar tensor, the number of labels that count"
DOES_NOT_FIT |= {  # what a loss returned
    f"{TOLD} task.loss={counting.__name__}.{name} training.global_batch_size=4 sharding={sharding}": words
    for sharding, name, words in [
        ("ddp", "number_as_count", rf"but its count is a int; {_A_COUNT}.*torch\.tensor\(number\)"),
        ("ddp", "with_logits", rf"but its count is a tensor of 2x8x7; {_A_COUNT}.*must return only the mean"),
        ("ddp", "with_accuracy", "but its count is 0.25 for a whole batch; .*an accuracy.*must return the mean alone"),
        ("root", "of_each_row", r"but its sum is a tensor of 2; it must be the summed loss.*loss\.sum\(\)"),
        ("root", "without_gradient", r"but its sum is without a gradient;.*add 0 \* logits\.sum\(\)"),
        ("root", "learned_count", r"but its count depends on parameters.*count\.detach\(\)"),
        ("root", "swapped", r"but its sum is a tensor of scalar int64; it must be the summed loss"),
        ("root", "three", r"three is a tuple; it must be the mean loss of the batch or \(sum, count\)"),
        *((sharding, "mean_on_the_second", r"the loss is \(sum, count\) on rank 0 and a mean on rank 1 in step 1; let")
          for sharding in ("ddp", "per_block")),
    ]
}  # fmt: skip
COUNTED = f"model=mlp task.loss={__name__}.even_classes task.unit=tokens training.timing_warmup_steps=0"
TOKENS = (
    f"model._target_={HERE}.net.Reader data=synthetic_tokens data.vocab_size=7 data.seq_len=8 sharding=root "
    f"task=custom task.loss=tests.parity.next_token task.unit=tokens training.timing_warmup_steps=0 "
    "training.global_batch_size=8 data.num_train=64 data.num_val=8"
)


def train_each(cases: list[str]) -> dict[str, Any]:
    """On each rank: the last metrics of each case, or what a sweep would say of it."""
    from fsdp_lab.training.train import train

    results: dict[str, Any] = {}
    for words in cases:
        memo = Memo()
        with tempfile.TemporaryDirectory() as folder:
            try:
                all_items = ("data.num_train=null", "data.num_val=null", "training.max_steps=4")
                train(config(*all_items, *words.split()), Path(folder), memo)
                results[words] = memo.reported[-1]
            except UserError as error:
                results[words] = failure_of(error, 0, Code.user_error).reason.values["text"]
    return results


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    return run_ranks(2, train_each, [*FITS, *DOES_NOT_FIT, TOKENS, COUNTED])[0]


@pytest.mark.parametrize("words", FITS)
def test_any_part_may_be_theirs(trained: dict[str, Any], words: str) -> None:
    assert isinstance(trained[words], dict), trained[words]
    assert math.isfinite(trained[words][FITS[words]])


@pytest.mark.parametrize("words", DOES_NOT_FIT)
def test_what_does_not_fit_is_reported_in_one_message(trained: dict[str, Any], words: str) -> None:
    message = trained[words]
    assert isinstance(message, str), "it trained"
    assert re.search(DOES_NOT_FIT[words], message) and "\n" not in message, message


@pytest.mark.parametrize("words", [NESTED, SPARSE, AT_ONCE])
def test_a_batch_of_any_class_is_learned_from_as_a_plain_one(trained: dict[str, Any], words: str) -> None:
    """What the plain one learns is in tests/training/test_parity.py."""
    assert trained[words]["val/loss"] == pytest.approx(trained[THEIRS]["val/loss"], abs=1e-6)


def test_a_batch_keeps_its_class_and_counts_in_the_digest() -> None:
    items = [{"x": torch.ones(3), "y": torch.zeros(())} for _ in range(20)]
    batch = collate(items[:2])
    assert {id(tensor) for tensor in tensors_of(batch)} == {id(tensor) for tensor in parts_of(batch)}
    moved = to_device(batch, torch.device("meta"))
    pair = moved["all"][1]
    classes = [type(each) for each in (*moved["all"], moved["all"][0]["g"], pair.rest["f"], *pair.rest["f"])]
    (columns,) = pair.rest["f"][0]
    assert type(moved) is Fixed and classes == [Encoding, Pair, Graph, Named, Rows]
    assert type(columns) is Columns and columns["c"].name == "rows"
    assert {tensor.device.type for tensor in parts_of(moved)} == {"meta"}
    assert {tensor.device.type for tensor in parts_of(batch)} == {"cpu"}, "the batch stays, whatever its `to` does"
    items = [{**item, "y": torch.full((), 2.0)} for item in items]
    changed = [*items[:-1], {**items[-1], "y": torch.ones(())}]
    for made in (collate, *(partial(in_layout, i) for i in range(6))):
        one, same, other = (digest_of([Collated(each, made, None)]) for each in (items, [*items], changed))
        assert one == same != other


ROWS = [torch.zeros(1 + number // 10) for number in range(2000)]


def places(size: int) -> list[int]:
    return [number * 1999 // max(size - 1, 1) for number in range(size)]


def pairs(items: list[Tensor]) -> Tensor:
    return torch.zeros(len(items) * (len(items) - 1) // 2)


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (torch.stack, None),  # of items that are alike no more are needed
        (torch.cat, lambda size: (sum(len(ROWS[place]) for place in places(size)),)),
        (partial(pad_sequence, batch_first=True), lambda size: (size, 200)),  # the longest is the last
        (pairs, lambda size: (size * (size - 1) // 2,)),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 200, 1000])
def test_a_forecasts_batch_has_the_shape_of_a_batch(collate: Any, expected: Any, size: int) -> None:
    """Of 2,000 items of 1 to 200 numbers, sorted by length."""
    alike = expected is None
    data = Collated([torch.zeros(7)] * 2000 if alike else ROWS, collate, None)
    batch = like(data.spread, size)
    assert batch.shape == ((size, 7) if alike else expected(size))


def test_a_batch_of_more_items_than_are_read_is_as_long_in_proportion() -> None:
    """2,000 items have 10 x (1 + ... + 200) numbers, 4,000 twice as many; of 1,024 the sum is 0.1 % off."""
    cat, padded = (like(Collated(ROWS, each, None).spread, 4000) for each in (torch.cat, pad_sequence))
    assert cat.shape[0] == pytest.approx(2 * 10 * 200 * 201 / 2, rel=0.002)
    assert padded.shape == (200, 4000)


def test_tokens_are_counted_where_the_user_says_so(trained: dict[str, Any]) -> None:
    """8 of 9 are told. Of images with labels of one dimension, those that the loss counts: each second."""
    metrics = trained[TOKENS]
    assert metrics["perf/tokens_per_s"] == pytest.approx(8 * metrics["perf/samples_per_s"])
    assert trained[COUNTED]["train/labels"] == 16
    assert trained[COUNTED]["perf/tokens_per_s"] == pytest.approx(trained[COUNTED]["perf/samples_per_s"] / 2)


IDS, IMAGES = torch.ones(4, 77, dtype=torch.int64), torch.ones(4, 3, 224, 224, dtype=torch.uint8)
LABELS = IDS.where(torch.arange(77) < 10, -100)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"pixel_values": IMAGES, "input_ids": IDS, "labels": LABELS}, 308),
        (Encoding(pixel_values=IMAGES, labels=LABELS), 40),
        (Frozen(torch.ones(4, 9), [IMAGES, IDS]), 308),
        (Pair(IMAGES, {"chosen": {"input_ids": IDS}, "rejected": {"input_ids": IDS[:, :7]}}), 308 + 28),
        ({"input_ids": IDS.flatten(), "position_ids": IDS}, 308),
        ((IDS[:, :-1], IDS[:, 1:]), 304),
        (IDS, 304),
        ({"pixel_values": IMAGES, "labels": IDS[:, 0]}, None),
        ({"mask": IDS.bool(), "boxes": torch.ones(4, 5, 4, dtype=torch.int64)}, None),
        (IMAGES, None),
    ],
)
def test_tokens_are_those_of_parts_that_hold_tokens(batch: Any, tokens: int | None) -> None:
    """Of four items with 77 tokens; images of 602,112 whole numbers have none."""
    assert num_tokens(batch) == tokens


def test_a_loss_keeps_its_form_and_a_task_its_unit() -> None:
    form, total = LossForm("task.loss=f"), torch.ones((), requires_grad=True)
    form.check((total, torch.tensor(3)))
    with pytest.raises(ModelError, match=r"f returned \(sum, count\) for one batch and a mean for another; return"):
        form.check(total)
    task = UserLoss(lambda model, batch: total, "task.loss=f", None, "tokens")
    with pytest.raises(ModelError, match=r"task.unit=tokens: a batch of 4x3x224x224 uint8 has no input_ids.*samples"):
        task.forward(nn.Identity(), IMAGES)


@pytest.mark.parametrize(
    ("model", "counted"),
    [
        ("Reads", 2 * (2 * 24 + 3 * (64 + 64 + 8))),
        ("OnlyHead", 2 * (24 + 64 + 64 + 2 * 8)),
        ("Asks", None),
    ],
)
def test_flops_are_those_of_the_products_of_a_step_or_given(model: str, counted: float | None) -> None:
    """Frozen weights and inputs have no gradient. `Reads` wants values in its constructor, `Asks` in its forward pass:
    neither ends a training on a GPU."""
    for more, flops in (([], counted), (["model.flops_per_unit=7.0"], 7.0)):
        trial = config(f"model._target_={HERE}.net.{model}", "model.width=8", DATA, LOSS, *more)
        assert build_workload(trial.model, trial.data, trial.task).train_flops_per_sample() == flops


def test_what_a_data_set_draws_is_the_same_anywhere_and_resumed(tmp_path: Path) -> None:
    """Eight steps of two epochs, and the same with a stop after the third."""
    words = [*NET.split(), f"data._target_={HERE}.data.Augmented", LOSS, "training.epochs=2", "checkpoint.mode=sync"]
    processes = [f"data.loader_workers={count}" for count in (1, 2)]
    cases = [[*words, *more] for more in ([], *([each] for each in processes), ["training.seed=1"])]
    here, *there, other = run_ranks(1, train_all, cases)[0]
    assert len(here[0]) == 8 and len(set(here[0])) == 8 and here[0] != other[0]
    for each, (losses, metrics) in zip(processes, there, strict=True):
        assert losses == here[0] and metrics[-1]["val/loss"] == here[1][-1]["val/loss"], each
    (before, _), (after, metrics) = run_ranks(1, train_all, [[*words, "training.max_steps=3"], words], str(tmp_path))[0]
    assert before + after == here[0]
    assert metrics[-1]["val/loss"] == here[1][-1]["val/loss"]


def test_the_digest_is_of_the_files_of_the_users_packages(tmp_path: Path) -> None:
    """Any file of them: one that is changed, renamed or gone; not of the installed ones, which have versions."""
    write_project(tmp_path)
    with importable(tmp_path):
        named = ["my_project.net.Net", "my_project.data.Corpus", "torch.nn.Linear", "fsdp_lab.config.checks.check"]
        assert user_packages(named) == ["my_project"]
        assert user_root("torch.nn.Linear") is None and user_root("fsdp_lab.config.checks.check") is None
        digests, data = [code_digest(["my_project"])], tmp_path / "my_project/data.py"
        data.write_text(data.read_text() + "# other\n")
        digests.append(code_digest(["my_project"]))
        data.rename(data.with_name("renamed.py"))
        digests.append(code_digest(["my_project"]))
        (tmp_path / "my_project/.hidden.py").touch()
        assert code_digest(["my_project"]) == digests[-1]
        data.with_name("renamed.py").unlink()
        assert len({*digests, code_digest(["my_project"]), code_digest([])}) == 5


DROPOUT = [*WORKLOADS["user"].words, *VIT, "model.dropout=0.5", "training.global_batch_size=8"]


@pytest.mark.ci
def test_dropout_is_the_same_in_every_sharding() -> None:
    """Of as many workers: other workers draw other masks, as docs/your-model.md says."""
    shardings = (
        "ddp", "root", "per_block", "per_layer", "size_based sharding.min_num_params=80", "per_block init=rank0",
        "per_block activation_checkpointing=full",
    )  # fmt: skip
    cases = [[*DROPOUT, *f"sharding={each}".split()] for each in shardings]
    trained = run_ranks(2, train_all, [*cases, [*cases[0], "model.dropout=0"]])[0]
    (first, _), *others, (without, _) = trained
    assert [each for each, (losses, _) in zip(shardings[1:], others, strict=True) if apart(losses, first) > 1e-5] == []
    assert apart(first, without) > 1e-2, "it does drop"


@pytest.mark.ci
@pytest.mark.parametrize("sharding", ["sharding=ddp", "sharding=per_block"])
def test_dropout_goes_on_in_an_epoch_as_if_never_stopped(tmp_path: Path, sharding: str) -> None:
    """To the bit, after a stop at three of eight steps."""
    words = [*DROPOUT, sharding, "checkpoint.mode=sync"]
    (whole, _), *_ = run_ranks(2, train_all, [words])[0]
    (begun, _), (resumed, _) = run_ranks(2, train_all, [[*words, "training.max_steps=3"], words], str(tmp_path))[0]
    assert len(whole) == 16 and [*begun, *resumed] == whole
