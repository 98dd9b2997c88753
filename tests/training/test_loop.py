"""What a step learns from and reports beside its loss, and how a loss or an error of one rank ends all of them."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import UserError
from fsdp_lab.training import loop, speed
from fsdp_lab.training.checkpoint import Checkpoints
from fsdp_lab.training.data import load_data
from fsdp_lab.training.distributed import setup_distributed
from fsdp_lab.training.divergence import DivergedError, LossCheck
from fsdp_lab.training.loop import token_metrics
from fsdp_lab.workloads.base import DataSpec
from tests.operators import Operators
from tests.parity import WORKLOADS
from tests.ranks import Memo, config, run_ranks, train_all
from tests.training.reference import apart, batches, build_optimizer, digits, first_model, resize

MLP = ("model=mlp", "training.max_steps=1", "memory_profile=off")


def norm_by_hand() -> float:
    """Of the gradients of the first step's 32 digits, by one process, as a sum of squares."""
    trial = config(*MLP)
    model, ((images, labels), _) = first_model(trial), digits()
    first = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:32]
    F.cross_entropy(model(resize(images[first], trial.model.sizes()["image_size"])), labels[first]).backward()
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))


def test_the_norm_of_the_gradients_is_that_before_clipping_over_all_ranks() -> None:
    clipped = ("sharding=ddp", "sharding=per_layer", "sharding=root training.grad_accum_steps=2")
    cases = [[*MLP, "training.max_grad_norm=0.1", *words.split()] for words in clipped]
    cases += [[*MLP, "training.max_grad_norm=1e9", *words] for words in ((), ("precision=fp16",))]
    results = [reported[-1] for _, reported in run_ranks(2, train_all, [*cases, [*MLP]])[0]]
    expected = norm_by_hand()
    assert expected > 0.2, "it is clipped"
    for case, reported in zip(cases[:4], results, strict=False):
        assert reported["train/grad_norm"] == pytest.approx(expected, rel=1e-5), case
    assert results[4]["train/grad_norm"] == pytest.approx(expected, rel=1e-2), "unscaled"
    assert "train/grad_norm" not in results[5], "it would cost a pass over the gradients"
    assert results[3]["val/loss"] == pytest.approx(results[5]["val/loss"], abs=1e-6), "nothing was clipped"


class Slow(nn.Module):
    """A model on a clock of its own, which its data set moves, too: an item takes 1 s, computing a sample takes 3."""

    now: ClassVar[float] = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        Slow.now += 3 * len(x)
        return self.linear(x)


class SlowRows:
    def __init__(self, split: str) -> None:
        pass

    def __len__(self) -> int:
        return 128

    def __getitem__(self, i: int) -> Tensor:
        Slow.now += 1
        return torch.ones(2)


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def train_on_the_slow_clock() -> dict[str, float]:
    speed.time = SimpleNamespace(perf_counter=lambda: Slow.now)
    words = [f"model._target_={__name__}.Slow", f"data._target_={__name__}.SlowRows", f"task.loss={__name__}.mean_of"]
    ((_, reported),) = train_all([[*words, "sharding=root", "training.timing_warmup_steps=0", "data.loader_workers=0"]])
    return reported[-1]


def test_a_step_waits_for_its_batch_and_for_nothing_else() -> None:
    """32 samples a step: 32 s for the batch of 128 s, 0.25 samples/s."""
    (reported,) = run_ranks(1, train_on_the_slow_clock)
    assert reported["perf/data_wait_share"] == pytest.approx(32 / 128)
    assert reported["perf/samples_per_s"] == pytest.approx(32 / 128)


def reductions_of_a_step(cases: list[list[str]]) -> list[dict[str, int]]:
    """The collectives that reduce gradients: of more than a few numbers, which a loss has."""
    results: list[Counter[str]] = []

    def note(name: str, args: Any, _: Any) -> None:
        if name in ("c10d::allreduce_", "c10d::_reduce_scatter_base_"):
            tensor = args[0][0] if name == "c10d::allreduce_" else args[0]
            results[-1][name.removeprefix("c10d::")] += tensor.numel() > 100

    for case in cases:
        results.append(Counter())
        with Operators(note):
            train_all([case])
    return [dict(counts) for counts in results]


def test_replicas_reduce_once_a_step_and_shards_each_microbatch() -> None:
    """Two blocks and the root, four microbatches: only what `sync_each_microbatch` promises grows with these."""
    hybrid = (*MLP, "model.num_layers=2", "sharding.dp_replicate=2", "training.grad_accum_steps=4")
    cases = [[*hybrid, f"training.sync_each_microbatch={each}"] for each in ("true", "false")]
    for each, last in run_ranks(4, reductions_of_a_step, cases):
        assert each == {"allreduce_": 3, "_reduce_scatter_base_": 12}
        assert last == {"allreduce_": 3, "_reduce_scatter_base_": 3}


OURS = {
    "classification": MLP,
    "language": (*WORKLOADS["language"].words, *MLP[1:]),
    "language in chunks": (*WORKLOADS["language"].words, *MLP[1:], "task.loss_chunks=2"),
    "seq2seq": (*WORKLOADS["seq2seq"].words, *MLP[1:]),
}
THEIRS = (*MLP, "task.loss=tests.workloads.user.my_project.net.labels")


def test_the_type_of_a_loss_is_recorded_where_it_rounds() -> None:
    """A user's cross entropy of FSDP2's bfloat16 outputs; under DDP autocast computes it in float32."""
    theirs = {
        "sharding=per_block precision=bf16": 2.0**-7,
        "sharding=per_block precision=fp16 training.grad_accum_steps=2": 2.0**-10,
        "sharding=per_block precision=fp32": None,
        "sharding=ddp precision=bf16": None,
    }
    cases = [[*THEIRS, *words.split()] for words in theirs]
    ours = [[*words, "precision=bf16"] for words in OURS.values()]
    trained = run_ranks(2, train_all, [*cases, *ours])[0]
    results = [reported[-1].get("train/loss_eps") for _, reported in trained]
    assert results[: len(theirs)] == list(theirs.values())
    assert results[len(theirs) :] == [None] * len(ours), "our losses are float32"
    for losses, reported in trained:
        assert reported[0]["train/first_loss"] == losses[0]
        assert reported[0].get("train/early_loss") == (pytest.approx(fmean(losses[1:3])) if losses[1:] else None)


def test_ranks_may_have_other_metrics_and_none_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`a` is of the other rank alone, `b` of this one alone; of `empty` nothing counts. Each is a sum and a count."""
    mine, theirs = {"loss": (1, 1), "b": (4, 1), "empty": (0, 0)}, {"a": (6, 2), "loss": (3, 1)}
    task = SimpleNamespace(forward=lambda model, batch: batch, metrics=lambda outputs, batch: mine)
    state = SimpleNamespace(model=nn.Identity(), step=1)
    added = torch.tensor([theirs.get(name, (0, 0)) for name in ("a", "b", "empty", "loss")])
    dims = SimpleNamespace(sum=lambda totals: totals + added)
    monkeypatch.setattr(loop, "gather", lambda names: [names, [*theirs]])
    reported = loop.evaluate(state, task, [torch.zeros(1)], config(), torch.device("cpu"), dims)
    assert reported == {"val/a": 3.0, "val/b": 4.0, "val/loss": 2.0}


def test_perplexity_and_bits_per_byte() -> None:
    """A loss of ln 8 is a choice among 8 tokens: three bits, for four bytes."""
    assert token_metrics(math.log(8), 4.0) == pytest.approx({"val/perplexity": 8, "val/bits_per_byte": 0.75})
    assert token_metrics(math.log(8), None) == pytest.approx({"val/perplexity": 8})
    assert math.isfinite(token_metrics(1e6, 1.0)["val/perplexity"])


# Labels that do not count.
COUNT, WIDTH, KINDS = 24, 6, 5
WORDS = [f"data._target_={__name__}.Rows", "data.num_train=null", "data.num_val=null", "training.epochs=2",
         "training.global_batch_size=8", "optimizer=sgd", "optimizer.lr=0.1"]  # fmt: skip
DIVIDED = ("sharding=per_block", "sharding=ddp training.grad_accum_steps=2", "training.grad_accum_steps=4")


class Net(nn.Module):
    """Of tokens, or of rows for one class each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table = nn.Embedding(KINDS, WIDTH) if kind == "tokens" else nn.Identity()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        out: Tensor = self.head(x)
        return out


class Rows:
    """Each row has another number of labels, and those of the second step of the first epoch have none at all."""

    def __init__(self, split: str, kind: str, none: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(KINDS, (COUNT, WIDTH + 1), generator=draw)
        self.x, self.labels, self.kind = torch.randn(COUNT, WIDTH, generator=draw), ids[:, 0], kind
        for i in range(COUNT):
            ids[i, 1 + i % WIDTH :] = -1
        self.labels[::3], self.labels[1::6] = -1, -100
        without = batches(config(*WORDS), COUNT)[1]
        ids[without, 1:], self.labels[without] = -1, -1
        if none and split == "val":
            ids[:, 1:] = -1
        self.ids = ids

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        return self.ids[i] if self.kind == "tokens" else (self.x[i], self.labels[i])


def words_of(task: str, kind: str) -> list[str]:
    return [*WORDS, f"task={task}", f"model._target_={__name__}.Net", f"model.kind={kind}", f"data.kind={kind}"]


def plain_losses(kind: str) -> list[float]:
    """The losses of one process in plain PyTorch: a sum over labels, divided by their number."""
    trial, rows, losses = config(*WORDS), Rows("train", kind), list[float]()
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = build_optimizer(model, trial)
    for indices in batches(trial, COUNT):
        ids, labels = rows.ids[indices], rows.labels[indices]
        inputs = ids[:, :-1].clamp(min=0) if kind == "tokens" else rows.x[indices]
        labels = ids[:, 1:].flatten() if kind == "tokens" else labels
        logits = model(inputs).flatten(0, -2)
        pairs = zip(logits, labels, strict=True)
        terms = [F.cross_entropy(each[None], label[None]) for each, label in pairs if label >= 0]
        loss = torch.stack(terms).mean() if terms else (logits * 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_mean_is_over_all_labels_of_the_global_batch() -> None:
    kinds = {"language": "tokens", "classification": "classes"}
    cases = {f"{task} {words}": [*words_of(task, kinds[task]), *words.split()] for task in kinds for words in DIVIDED}
    for case, (losses, (first, _)) in zip(cases, run_ranks(2, train_all, [*cases.values()])[0], strict=True):
        expected = plain_losses(kinds[case.partition(" ")[0]])
        assert expected[1] == 0 and min(expected[:1] + expected[2:]) > 0.01, "one step has no label"
        assert apart(losses, expected) <= 1e-5, case
        assert first["train/loss"] == pytest.approx(sum(expected[:3]) / 3, abs=1e-5), case


def test_a_validation_without_a_label_is_refused_by_name() -> None:
    with pytest.raises(AssertionError, match="UserError: the validation split has no label that counts"):
        run_ranks(1, train_all, [[*words_of("language", "tokens"), "data.none=true"]])


# How all ranks end.
LAST = 60


def steps_until_it_ends(cases: list[tuple[int, dict[int, float]]]) -> list[tuple[int, str]]:
    """Of each case `(step, {rank: loss})`: how many steps this rank took, and the message."""
    results = []
    for bad, by_rank in cases:
        check, step = LossCheck(0, torch.device("cpu")), 0
        try:
            for step in range(1, LAST + 1):
                loss = by_rank.get(dist.get_rank(), 1.0) if step == bad else 1.0
                check.add(torch.tensor(loss))
            check.finish()
            results.append((step, ""))
        except DivergedError as error:
            results.append((step, str(error)))
    return results


def test_it_ends_within_twenty_steps_and_names_the_step_and_the_rank() -> None:
    cases = [(step, {1: math.nan}) for step in range(1, LAST + 1)]
    ranks = run_ranks(2, steps_until_it_ends, [*cases, (7, {0: math.inf, 1: math.nan}), (0, {})])
    assert ranks[0] == ranks[1]
    *seen, both, none = ranks[0]
    for (step, _), (taken, message) in zip(cases, seen, strict=True):
        assert message == f"the loss of step {step} is nan on rank 1"
        assert taken == -(-step // 10) * 10
    assert both == (10, "the loss of step 7 is inf on rank 0 and 1 more")
    assert none == (LAST, "")


class Steps(Memo):
    """Also counts the steps that began."""

    begun = 0

    def step(self, step: int) -> None:
        self.begun = step


def train_with_a_huge_rate() -> tuple[int, int, str]:
    from fsdp_lab.training.train import train

    memo = Steps()
    words = ("model=mlp", "optimizer.lr=1e30", "data.num_train=1280", "training.global_batch_size=16")
    with tempfile.TemporaryDirectory() as folder, pytest.raises(DivergedError) as error:
        train(config(*words), Path(folder), memo)
    return memo.begun, len(memo.reported), str(error.value)


def test_a_trial_that_diverges_does_not_finish_its_epoch() -> None:
    for begun, epochs, message in run_ranks(2, train_with_a_huge_rate):
        assert message == "the loss of step 2 is nan on rank 0 and 1 more"
        assert begun <= 12 and epochs == 0


class Strange(Exception):
    """Cannot be sent: it is made of two arguments, and passes one on."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


ERRORS = [UserError("nothing there"), OSError(5, "Input/output error"), KeyError("size"), MemoryError("of the host"),
          ZeroDivisionError("by zero"), Strange("bent", "the end")]  # fmt: skip


class FailsOnTheFirst(nn.Module):
    """Only the first rank computes values (`init=rank0`)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        if not self.blocks[1].weight.is_meta:
            raise ZeroDivisionError("of a value")


def fail_where_one_rank_works(folder: str) -> list[str]:
    """What is raised on this rank, in turn where the data are prepared, saved, and given their first values."""
    from fsdp_lab.training.train import train

    ranks, raised, prepared = setup_distributed(), list[str](), list[Exception]()

    def note(do: Any) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001 (all are tried)
            raised.append(f"{type(error).__name__}: {error}")

    def throw(error: Exception) -> Any:
        prepared.append(error)
        raise error

    for error in ERRORS:
        data = DataSpec(lambda error=error: throw(error), lambda: throw(AssertionError()), lambda size: None)
        note(lambda data=data: load_data(data, ranks))
        checkpoints = Checkpoints(folder, config("checkpoint.mode=sync"), ranks)
        if ranks.is_first:
            checkpoints.place.begin = lambda step, error=error: throw(error)
        note(lambda each=checkpoints: each._on_first_rank(lambda: each.place.begin(1)))
    assert len(prepared) == (2 * len(ERRORS) if ranks.is_first else 0), "one process works, and nothing goes on"
    own = (f"model._target_={__name__}.FailsOnTheFirst", "task=custom", "task.loss=torch.sum")
    note(lambda: train(config(*own), Path(folder), Memo()))
    return raised


def test_every_kind_of_error_is_raised_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_where_one_rank_works, str(tmp_path))
    expected = [f"{type(error).__name__}: {error}" for error in ERRORS for _ in range(2)]
    assert first == [*expected, "ZeroDivisionError: of a value"]
    assert [each.removeprefix("RuntimeError: ") for each in second] == first, "what cannot be sent has its text"
