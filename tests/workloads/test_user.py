"""A user's model, data set and loss under the training loop, on two ranks; what does not fit is one message."""

from __future__ import annotations

import math
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_lab.config import UserError
from fsdp_lab.config.code import code_digest, user_packages
from fsdp_lab.config.rules import check_trial
from fsdp_lab.config.target import user_root
from fsdp_lab.engine.failures import failure_of
from fsdp_lab.record.reasons import Code
from fsdp_lab.workloads.build import build_workload
from fsdp_lab.workloads.user.data import Collated, digest_of
from fsdp_lab.workloads.user.task import OnlyCalled
from tests.parity import VIT, WORKLOADS
from tests.ranks import Memo, config, run_ranks, train_all
from tests.training.reference import apart
from tests.workloads.user.my_project.net import Net
from tests.workloads.user.project import HERE, importable, write_project

NET = f"model._target_={HERE}.net.Net model.width=16"
DATA = f"data._target_={HERE}.data.Corpus"
LOSS = f"task.loss={HERE}.net.loss"
THEIRS = f"{NET} {DATA} {LOSS}"
FITS = {
    f"{THEIRS} task.metrics={HERE}.net.off_by": "val/off_by",
    f"{NET} {LOSS} data=example data.num_val=7": "val/loss",
    f"model._target_={HERE}.net.digits model.width=8 sharding=root": "val/accuracy",
    f"data._target_={HERE}.data.Pictures": "val/accuracy",
    f"model._target_={HERE}.net.Reads model.width=8 {DATA} {LOSS} init=rank0": "val/loss",
}
# What is typed -> what the message must say.
NO_DATA = f"{NET} {LOSS} data._target_={HERE}.data.stream"
NO_MODEL = f"model._target_={HERE}.data.Pictures model.split=val {DATA}"
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
    f"{THEIRS} data.collate_fn={HERE}.data.collate_wrongly": (
        r"fails in first \(.* on a batch of \{x: 16x2 float32, y: 16 float32\}.*mat1 and mat2"
    ),
    f"{NET} {DATA}": r"takes \(inputs, labels\), but this data set returns \{x: 16x3 .*\}; use task\.loss=",
    f"{NET} {LOSS} data._target_={HERE}.data.Unreadable data.loader_workers=1": (
        r"split=train: item \d+ cannot be read: ValueError: item \d+ is broken \(tests/workloads/user/my_project/data"
    ),
    f"{NET} {LOSS} data._target_={HERE}.data.Ragged": (
        r"do not form a batch: RuntimeError: stack expects.*Items of different sizes need a data\.collate_fn\."
    ),
    f"{NET} {LOSS} data._target_={HERE}.data.empty": "no items for split=train",
    NO_DATA: "a generator.*map-style data set",
    NO_MODEL: r"must return an nn\.Module",
    f"model._target_={HERE}.net.LeavesOut model.width=8 {DATA} {LOSS} sharding=ddp": (
        r"sharding=ddp: some parameters got no gradient in the last step.*sharding=root or per_block"
    ),
    f"model._target_={HERE}.net.Reads model.width=8 {DATA} {LOSS} init=meta": (
        "init=meta: the constructor of Reads reads the values of parameters.*use init=rank0"
    ),
}
TOKENS = (
    f"model._target_={HERE}.net.Reader data._target_={HERE}.data.Sentences data.collate_fn={HERE}.data.fill_up "
    f"sharding=root task.loss={HERE}.net.of_next_token task.unit=tokens "
    "training.timing_warmup_steps=0 training.global_batch_size=8"
)
RAGGED = f"{TOKENS} data.ragged=true"


def train_each(cases: list[str]) -> dict[str, Any]:
    """On each rank: the last metrics of each case, or what a sweep would say of it. Two of four steps are timed."""
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
    return run_ranks(2, train_each, [*FITS, *DOES_NOT_FIT, TOKENS, RAGGED])[0]


@pytest.mark.parametrize("words", FITS)
def test_any_part_may_be_theirs(trained: dict[str, Any], words: str) -> None:
    assert isinstance(trained[words], dict), trained[words]
    assert math.isfinite(trained[words][FITS[words]])


@pytest.mark.parametrize("words", DOES_NOT_FIT)
def test_what_does_not_fit_is_reported_in_one_message(trained: dict[str, Any], words: str) -> None:
    message = trained[words]
    assert isinstance(message, str), "it trained"
    assert re.search(DOES_NOT_FIT[words], message) and "\n" not in message, message


def test_tokens_are_counted_where_each_item_has_as_many(trained: dict[str, Any]) -> None:
    """8 of 9 are told. The longest of ragged rows is the first, to whose length batches are filled up."""
    even, ragged = trained[TOKENS], trained[RAGGED]
    assert even["perf/tokens_per_s"] == pytest.approx(8 * even["perf/samples_per_s"])
    assert {"perf/tokens_per_s", "perf/tflops_per_device"} <= even.keys() - ragged.keys()
    assert ragged["perf/samples_per_s"] > 0


def test_a_loss_may_read_plain_values_of_the_model() -> None:
    model = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = Net(4)
    model.module.penalty = 0.5
    for seen in (OnlyCalled(model, "f"), OnlyCalled(model.module, "f")):
        assert seen.penalty == 0.5 and seen.training and not hasattr(seen, "module")
        with pytest.raises(UserError, match=r"f uses model\.parameters outside"):
            seen.parameters()


AUGMENTED = [*NET.split(), f"data._target_={HERE}.data.Augmented", LOSS, "training.epochs=2", "checkpoint.mode=sync"]


def on_one_rank(folder: str) -> tuple[list[list[str]], list[tuple[list[float], list[dict[str, float]]]]]:
    """The phases of three trials, and what five others learn, the last two in one folder."""
    from fsdp_lab.training.train import train

    collected = []
    for words in (THEIRS, NO_DATA, NO_MODEL):
        memo = Memo()
        with tempfile.TemporaryDirectory() as own, suppress(UserError):
            train(config(*words.split(), "training.max_steps=1"), Path(own), memo)
        collected.append(memo.phases)
    trained = train_all([[*AUGMENTED, *more] for more in ([], ["data.loader_workers=1"], ["training.seed=1"])])
    return collected, [*trained, *train_all([[*AUGMENTED, "training.max_steps=3"], AUGMENTED], folder)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(1, on_one_rank, str(tmp_path_factory.mktemp("resumed")))[0]


def test_what_may_get_stuck_before_the_first_step_is_named(one_rank: Any) -> None:
    """Where one of them fails it is the last that was told."""
    every = ["loading the data", "building the model", "initialising the weights (init=rank0)", "loading a checkpoint"]
    assert one_rank[0] == [every, every[:1], every[:2]]


def test_what_a_data_set_draws_is_the_same_anywhere_and_resumed(one_rank: Any) -> None:
    """Eight steps of two epochs, and the same with a stop after the third."""
    here, there, other, (before, _), (after, output) = one_rank[1]
    assert len(here[0]) == 8 and len(set(here[0])) == 8
    assert here[0] == there[0] != other[0] and here[1][-1]["val/loss"] == there[1][-1]["val/loss"]
    assert before + after == here[0]
    assert output[-1]["val/loss"] == here[1][-1]["val/loss"]


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
def test_a_model_that_wants_values_may_be_given_its_flops(net: str) -> None:
    """`Reads` wants them in its constructor, `Asks` in its forward pass. Neither ends a training on a GPU."""
    for more, flops in (([], None), (["model.flops_per_unit=7.0"], 7.0)):
        trial = config(f"model._target_={HERE}.net.{net}", "model.width=8", DATA, LOSS, *more)
        assert build_workload(trial.model, trial.data, trial.task).train_flops_per_sample() == flops


def test_a_digest_is_of_the_ends_of_the_data() -> None:
    def digest(items: list[Any]) -> str:
        return digest_of([Collated(items, torch.utils.data.default_collate, None)])

    items = [{"x": torch.full((3,), float(i)), "text": f"item {i}", "y": i % 3} for i in range(20)]
    changed = [[*items[:i], {**items[i], "y": 7}, *items[i + 1 :]] for i in (0, 10, 19)]
    assert digest(items) == digest([*items]) == digest(changed[1]), "the middle is not read"
    assert digest(items) not in {digest(changed[0]), digest(changed[2]), digest([*items, items[-1]])}


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


DROPOUT = [*WORKLOADS["user"].words, *VIT, "model.dropout=0.5", "training.global_batch_size=8"]
SHARDINGS = (
    "sharding=ddp",
    "sharding=root",
    "sharding=per_block",
    "sharding=per_layer",
    "sharding=size_based sharding.min_num_params=80",
    "sharding=per_block init=meta",
    "sharding=per_block activation_checkpointing=full",
)


@pytest.mark.ci
def test_dropout_is_the_same_in_every_sharding() -> None:
    """Of as many workers: other workers draw other masks, as docs/your-model.md says."""
    first, *others = (losses for losses, _ in run_ranks(2, train_all, [[*DROPOUT, *s.split()] for s in SHARDINGS])[0])
    assert [words for words, losses in zip(SHARDINGS[1:], others, strict=True) if apart(losses, first) > 1e-5] == []
    cases = [[*DROPOUT, SHARDINGS[0], *more] for more in ([], ["model.dropout=0"])]
    alone, without = (losses for losses, _ in run_ranks(1, train_all, cases)[0])
    assert apart(first, alone) > 1e-3
    assert apart(alone, without) > 1e-2, "it does drop"


@pytest.mark.ci
@pytest.mark.parametrize("sharding", ["sharding=ddp", "sharding=per_block"])
def test_dropout_goes_on_in_an_epoch_as_if_never_stopped(tmp_path: Path, sharding: str) -> None:
    """To the bit, after a stop at three of eight steps."""
    words = [*DROPOUT, sharding, "checkpoint.mode=sync"]
    (whole, _), *_ = run_ranks(2, train_all, [words])[0]
    (begun, _), (resumed, _) = run_ranks(2, train_all, [[*words, "training.max_steps=3"], words], str(tmp_path))[0]
    assert len(whole) == 16 and [*begun, *resumed] == whole
