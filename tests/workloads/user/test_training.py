"""A user's model, data set and loss under the training loop, on two ranks; what does not fit is one message."""

from __future__ import annotations

import math
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_lab.config import UserError
from fsdp_lab.config.code import code_digest, user_packages
from fsdp_lab.config.rules import check_trial
from fsdp_lab.config.target import user_root
from fsdp_lab.engine.failures import failure_of
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.record.reasons import Code
from fsdp_lab.workloads.base import tensors_of
from fsdp_lab.workloads.build import build_workload
from fsdp_lab.workloads.user.data import Collated, WithoutPadding, digest_of, example_of
from fsdp_lab.workloads.user.task import AroundUser, OnlyCalled, UserLoss
from tests.ranks import Memo, config, run_ranks, train_all
from tests.workloads.user.my_project.data import Unreadable
from tests.workloads.user.my_project.net import Net
from tests.workloads.user.project import HERE, importable, write_project

NET = (f"model._target_={HERE}.net.Net", "model.width=16")
DATA = (f"data._target_={HERE}.data.Corpus",)
LOSS = (f"task.loss={HERE}.net.loss",)
THEIRS = (*NET, *DATA, *LOSS)
FITS = {
    "all three": ((*THEIRS, f"task.metrics={HERE}.net.off_by"), "val/off_by"),
    "example_batch": ((*NET, *LOSS, "data=example", "data.num_val=7"), "val/loss"),
    "model": ((f"model._target_={HERE}.net.digits", "model.width=8", "sharding=root"), "val/accuracy"),
    "loss": (("model=mlp", f"task.loss={HERE}.net.labels"), "val/loss"),
    "data": ((f"data._target_={HERE}.data.Pictures",), "val/accuracy"),
    "values": ((f"model._target_={HERE}.net.Reads", "model.width=8", *DATA, *LOSS, "init=rank0"), "val/loss"),
    "model_loss": ((f"model._target_={HERE}.net.WithLoss", "model.width=8", "task=model_loss", *DATA), "val/loss"),
}
TOKENS = {"language": ("task=language",), "loss": (f"task.loss={HERE}.net.of_next_token", "task.unit=tokens")}


def line_of(key: str) -> int:
    """Where the losses of `net.py` look a key up."""
    lines = Path(__file__, "..", "my_project", "net.py").resolve().read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if f'batch["{key}"]' in line)


# What is typed -> what the message must say.
DOES_NOT_FIT = {
    "loss of each item": ((*NET, *DATA, f"task.loss={HERE}.net.of_each_item"), ["a tensor of 16;", "loss.mean()"]),
    "batch": (
        (*THEIRS, f"data.collate_fn={HERE}.data.collate_wrongly"),
        ["fails in first (", "on a batch of {x: 16x2 float32, y: 16 float32}", "mat1 and mat2"],
    ),
    "broken item": (
        (*NET, *LOSS, f"data._target_={HERE}.data.Broken"),
        [
            f"data._target_={HERE}.data.Broken, split=train: item ",
            " cannot be read: IndexError: index 128",
        ],
    ),
    "dropped layers": (
        (f"model._target_={HERE}.net.LeavesOut", "model.width=8", *DATA, *LOSS, "sharding=ddp"),
        [
            "sharding=ddp: some parameters got no gradient in the last step",
            "if all ranks leave out the same ones, sharding=root or per_block",
        ],
    ),
    "labels": (
        (*NET, *DATA),
        ["takes (inputs, labels), but this data set returns {x: 16x3 float32, y: 16 float32}; use task.loss="],
    ),
    "keys": (
        (*NET, *DATA, f"task.loss={HERE}.net.loss_of_other_keys", "sharding=ddp"),
        [
            "task.loss=tests.workloads.user.my_project.net.loss_of_other_keys fails at tests/workloads/user/my_project/"
            f"net.py:{line_of('labels')} on a batch of {{x: 16x3 float32, y: 16 float32}}: KeyError: 'labels'"
        ],
    ),
    "iterable": ((*NET, f"data._target_={HERE}.data.stream", *LOSS), ["a generator", "map-style data set"]),
    "no items": ((*NET, f"data._target_={HERE}.data.empty", *LOSS), ["no items for split=train"]),
    "unreadable item": (
        (*NET, *LOSS, f"data._target_={HERE}.data.Unreadable"),
        ["split=train: item ", "cannot be read: ValueError: item ", "is broken (tests/workloads/user/my_project/data"],
    ),
    "ragged": (
        (*NET, *LOSS, f"data._target_={HERE}.data.Ragged"),
        ["do not form a batch: RuntimeError: stack expects", "Items of different sizes need a data.collate_fn."],
    ),
    "no file": (
        (f"model._target_={HERE}.net.Loads", "model.width=4", *DATA, *LOSS),
        ["FileNotFoundError", "nowhere.pt"],
    ),
    "no model": ((f"model._target_={HERE}.net.off_by", "model.model=1", "model.batch=2", *DATA), ["fails: TypeError"]),
    "no module": ((f"model._target_={HERE}.data.Pictures", "model.split=val", *DATA), ["must return an nn.Module"]),
    "values on meta": (
        (f"model._target_={HERE}.net.Reads", "model.width=8", *DATA, *LOSS, "init=meta"),
        ["init=meta: the constructor of Reads reads the values of parameters", "use init=rank0"],
    ),
    "a number": ((*NET, *DATA, f"task.loss={HERE}.net.loss_as_a_number"), ["is a float;", "itself, without .item()"]),
    "of the whole": (
        (f"model._target_={HERE}.net.Refuses", "model.width=8", *DATA, *LOSS, "sharding=root"),
        ["the forward pass fails in Refuses on a batch of", "these are too many (", "net.py:"],
    ),
    "divided": (
        (f"model._target_={HERE}.net.Divides", "model.width=8", *DATA, *LOSS),
        ["the parameter extra of Divides is already a DTensor", "make it a plain tensor"],
    ),
    "no example": (
        (f"model._target_={HERE}.net.digits", "model.width=4", "data=example", "sharding=root"),
        ["example_batch(size)"],
    ),
}


PENALTY = (*NET, *DATA, f"task.loss={HERE}.net.loss_with_penalty")
INSIDE = "loss_with_penalty uses model.head outside model(...)"
for sharding in ("ddp", "root", "per_layer"):  # the last would train
    DOES_NOT_FIT[f"parts, {sharding}"] = ((*PENALTY, f"sharding={sharding}"), [INSIDE, "move it into forward"])


def train_each(cases: dict[str, tuple[str, ...]], more: list[str]) -> dict[str, dict[str, float] | str]:
    from fsdp_lab.training.train import train

    results: dict[str, dict[str, float] | str] = {}
    for name, words in cases.items():
        memo = Memo()
        with tempfile.TemporaryDirectory() as folder:
            try:
                train(config("data.num_train=null", "data.num_val=null", *words, *more), Path(folder), memo)
                results[name] = memo.reported[-1]
            except UserError as error:
                results[name] = str(error)
    return results


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, float] | str]:
    cases = {name: words for name, (words, _) in {**FITS, **DOES_NOT_FIT}.items()}
    rows = (f"model._target_={HERE}.net.Reader", f"data._target_={HERE}.data.Sentences", "sharding=root")
    rows += (f"data.collate_fn={HERE}.data.fill_up", "training.timing_warmup_steps=0", "training.global_batch_size=8")
    for name, words in TOKENS.items():
        cases[f"{name} of even rows"] = (*rows, *words)
        cases[f"{name} of ragged rows"] = (*rows, *words, "data.ragged=true")
    return run_ranks(2, train_each, cases, ["training.max_steps=4"])[0]  # the first two are not timed


@pytest.mark.parametrize("name", FITS)
def test_any_part_may_be_theirs(trained: dict[str, dict[str, float] | str], name: str) -> None:
    reported = trained[name]
    assert isinstance(reported, dict), reported
    assert math.isfinite(reported[FITS[name][1]])


@pytest.mark.parametrize("task", TOKENS)
def test_tokens_are_counted_where_each_item_has_as_many(trained: dict[str, dict[str, float] | str], task: str) -> None:
    """8 of 9 are told. The longest of ragged rows is the first, to whose length batches are filled up."""
    even, ragged = trained[f"{task} of even rows"], trained[f"{task} of ragged rows"]
    assert isinstance(even, dict) and isinstance(ragged, dict), (even, ragged)
    assert even["perf/tokens_per_s"] == pytest.approx(8 * even["perf/samples_per_s"])
    assert {"perf/tokens_per_s", "perf/tflops_per_device"} <= even.keys() - ragged.keys()
    assert ragged["perf/samples_per_s"] > 0


@pytest.mark.parametrize("name", DOES_NOT_FIT)
def test_what_does_not_fit_is_reported_in_one_message(trained: dict[str, dict[str, float] | str], name: str) -> None:
    message = trained[name]
    assert isinstance(message, str), "it trained"
    assert [word for word in DOES_NOT_FIT[name][1] if word not in message] == [], message
    assert "\n" not in message


def test_a_loss_may_read_plain_values_of_the_model() -> None:
    model = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = Net(4)
    model.module.penalty = 0.5
    for seen in (OnlyCalled(model, "f"), OnlyCalled(model.module, "f")):
        assert seen.penalty == 0.5 and seen.training and not hasattr(seen, "module")
        with pytest.raises(UserError, match=r"f uses model\.parameters outside"):
            seen.parameters()


def test_a_loss_of_pytorchs_own_is_refused_with_what_to_write() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    task = AroundUser(UserLoss(nn.functional.cross_entropy, "task.loss", None, "samples"))
    with pytest.raises(UserError, match=r"task\.loss is called with the model and a batch.* return cross_entropy"):
        task.forward(Net(4), (x, y)[0])


NO_DATA, NO_MODEL = DOES_NOT_FIT["iterable"][0], DOES_NOT_FIT["no model"][0]
AUGMENTED = [*NET, f"data._target_={HERE}.data.Augmented", *LOSS, "training.epochs=2", "checkpoint.mode=sync"]


def on_one_rank(folder: str) -> tuple[list[list[str]], list[tuple[list[float], list[dict[str, float]]]]]:
    """The phases of three trials, and what five others learn, the last two in one folder."""
    from fsdp_lab.training.train import train

    collected = []
    for words in (THEIRS, NO_DATA, NO_MODEL):
        memo = Memo()
        with tempfile.TemporaryDirectory() as own, suppress(UserError):
            train(config(*words, "training.max_steps=1"), Path(own), memo)
        collected.append(memo.phases)
    trained = train_all([[*AUGMENTED, *more] for more in ([], ["data.loader_workers=1"], ["training.seed=1"])])
    return collected, [*trained, *train_all([[*AUGMENTED, "training.max_steps=3"], AUGMENTED], folder)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(1, on_one_rank, str(tmp_path_factory.mktemp("resumed")))[0]


def test_what_may_get_stuck_before_the_first_step_is_distinguished(one_rank: Any) -> None:
    """Where one of them fails it is the last that was told."""
    every = ["loading the data", "building the model", "initialising the weights (init=rank0)", "loading a checkpoint"]
    assert one_rank[0] == [every, every[:1], every[:2]]


def test_what_a_data_set_draws_is_the_same_in_any_process_and_after_a_resume(one_rank: Any) -> None:
    """Eight steps of two epochs, and the same with a stop after the third."""
    here, there, other, (before, _), (after, output) = one_rank[1]
    assert len(here[0]) == 8 and len(set(here[0])) == 8
    assert here[0] == there[0] != other[0] and here[1][-1]["val/loss"] == there[1][-1]["val/loss"]
    assert before + after == here[0]
    assert output[-1]["val/loss"] == here[1][-1]["val/loss"]


def test_a_validation_weighs_a_batch_by_its_items_whatever_its_first_tensor_is() -> None:
    """Here that is a table with as many rows for every batch. What stands in for padding counts nothing."""
    items = [{"x": torch.tensor(float(i))} for i in range(5)]

    def collate(chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"table": torch.zeros(7, 2), **torch.utils.data.default_collate(chosen)}

    task = AroundUser(UserLoss(lambda model, batch: batch["x"].mean(), "the loss", None, "samples"))
    split = WithoutPadding(Collated(items, collate, None))
    total, count = 0.0, 0.0
    with torch.no_grad():
        for batch in (split[torch.tensor(indices)] for indices in ([0, 1, 2], [3, 4, -1], [-1, -1])):
            summed, counted = task.metrics(task.forward(torch.nn.Identity(), batch), batch)["loss"]
            total, count = total + summed.item(), count + counted.item()
    assert (total, count) == (0 + 1 + 2 + 3 + 4, 5)


def test_items_are_read_in_the_thread_that_made_the_data_set() -> None:
    trial = config(*NET, f"data._target_={HERE}.data.Table", *LOSS)
    data = build_workload(trial.model, trial.data, trial.task).data
    split = data.load().train
    with torch.device("meta"):
        example = data.example_batch(40)
    assert {key: (value.shape, value.dtype, value.device.type) for key, value in example.items()} == {
        key: (value.shape, value.dtype, "meta") for key, value in split[torch.arange(40)].items()
    }
    assert forecast_profile(trial, 2, cuda=False).peaks == forecast_profile(config(*THEIRS), 2, cuda=False).peaks


def test_an_argument_may_be_a_module_of_their_own() -> None:
    """As Hydra makes it of a `_target_`; anew each time that the constructor runs."""
    inner = (f"model.inner._target_={HERE}.net.Net", "model.inner.width=4", "model.inner.depth=3")
    others = "model.others=[{_target_: torch.nn.Linear, in_features: 2, out_features: 5}]"
    trial = config(f"model._target_={HERE}.net.Wraps", *inner, others)
    check_trial(trial, 1)
    assert trial.model.paths() == [f"{HERE}.net.Wraps", f"{HERE}.net.Net", "torch.nn.Linear"]
    build = build_workload(trial.model, trial.data, trial.task).model.build
    first, second = build(), build()
    assert type(first.inner) is Net and len(first.inner.blocks) == 3 and first.others[0].out_features == 5
    assert first.inner is not second.inner


@pytest.mark.parametrize("net", ["Reads", "Asks"])
def test_a_model_that_wants_values_has_no_flops_and_may_be_given_them(net: str) -> None:
    """`Reads` wants them in its constructor, `Asks` in its forward pass. Neither ends a training on a GPU."""
    words = (f"model._target_={HERE}.net.{net}", "model.width=8", *DATA, *LOSS)
    for more, flops in (((), None), (("model.flops_per_unit=7.0",), 7.0)):
        trial = config(*words, *more)
        assert build_workload(trial.model, trial.data, trial.task).train_flops_per_sample() == flops


def test_a_batch_without_tensors_is_refused() -> None:
    """Nothing in it would be put on a GPU, and its items not be counted."""
    split = Collated([1, 2, 3], lambda items: SimpleNamespace(x=torch.tensor(items)), None)
    for read in (lambda: split[torch.arange(2)], lambda: split.first(2)):
        with pytest.raises(UserError, match="is a SimpleNamespace without a tensor in it; let"):
            read()


def ragged(items: list[dict[str, torch.Tensor]]) -> dict[str, object]:
    """Two tokens an item, in one row, and a mask that is square in the items."""
    count = len(items)
    return {
        "packed": torch.zeros(2 * count, dtype=torch.int64),
        "nested": [torch.zeros(count, 7, count), torch.zeros(3)],
    }


@pytest.mark.parametrize("size", [1, 32, 33, 500])
def test_the_shape_of_a_batch_is_distinguished_from_a_few_items(size: int) -> None:
    """Also where new tensors have no storage, and from fewer items than the batch has."""
    reads = []

    class Few:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            reads.append(i)
            return {"x": torch.zeros(3)}

    split = Collated(Few(), ragged, None)
    with torch.device("meta"):
        batch = example_of(split.first)(size)
    shapes = [(tensor.device.type, tensor.dtype, tuple(tensor.shape)) for tensor in tensors_of(batch)]
    assert shapes == [
        ("meta", torch.int64, (2 * size,)),
        ("meta", torch.float32, (size, 7, size)),
        ("meta", torch.float32, (3,)),
    ]
    assert len(reads) <= 65


def test_an_item_that_a_loaders_process_cannot_read_is_one_message(tmp_path: Path) -> None:
    """Such a process gives back its traceback as the message."""
    split = Collated(Unreadable("train"), torch.utils.data.default_collate, None, "data")
    loader = torch.utils.data.DataLoader(split, sampler=[torch.tensor([9])], batch_size=None, num_workers=1)
    with pytest.raises(UserError) as caught:
        next(iter(loader))
    failure = failure_of(caught.value, 0, Code.user_error)
    assert failure.reason.values["text"].startswith("data: item 9 cannot be read: ValueError: item 9 is broken (")


def test_a_digest_is_of_the_ends_of_the_data() -> None:
    class Items:
        def __init__(self, changed: int | None = None, noisy: bool = False, count: int = 20) -> None:
            self.changed, self.noisy, self.count = changed, noisy, count

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, i: int) -> dict[str, object]:
            x = torch.rand(3) if self.noisy else torch.full((3,), float(i))
            return {"x": x + (i == self.changed), "text": f"item {i}", "y": i % 3}

    def digest(items: Items) -> str:
        return digest_of([Collated(items, torch.utils.data.default_collate, None)])

    plain = digest(Items())
    assert plain == digest(Items())
    assert plain != digest(Items(changed=0)) and plain != digest(Items(changed=19))
    assert plain == digest(Items(changed=10)), "the middle is not read"
    assert plain != digest(Items(count=21))
    assert digest(Items(noisy=True)) == digest(Items(noisy=True))
    named = Items()
    named.digest = "version 7"  # type: ignore[attr-defined]
    assert digest(named) != plain


def test_the_digest_is_of_the_files_of_the_users_packages(tmp_path: Path) -> None:
    """Any file of them: one that is changed, new, renamed or gone; not of the installed ones, which have versions."""
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


def test_a_project_needs_nothing_of_ours(tmp_path: Path) -> None:
    write_project(tmp_path)
    sources = [file.read_text() for file in (tmp_path / "my_project").glob("*.py")]
    ours = re.compile(r"^\s*(from|import) (fsdp_lab|tests)", re.MULTILINE)
    assert len(sources) > 2 and not any(map(ours.search, sources))
