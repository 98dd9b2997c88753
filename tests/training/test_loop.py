"""What a step reports beside its loss, and how a loss or an error of one rank ends all of them."""

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
from torch import Tensor, nn

from fsdp_lab.config import UserError
from fsdp_lab.training import loop, speed
from fsdp_lab.training.checkpoint import Checkpoints
from fsdp_lab.training.data import load_data
from fsdp_lab.training.distributed import setup_distributed
from fsdp_lab.training.divergence import DivergedError
from fsdp_lab.workloads.base import DataSpec
from tests.operators import Operators
from tests.parity import WORKLOADS
from tests.ranks import Memo, config, parallel_of, run_ranks, train_all
from tests.workloads.user.my_project.net import labels

MLP = ("model=mlp", "training.max_steps=1")


class Slow(nn.Module):
    """On a clock of its own, which its data set moves, too. An item takes 1 s, and to compute a sample 3 s. In a
    validation, and before the clock has 80,000 s (in the third step), a sample takes 1000 s."""

    now: ClassVar[float] = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        Slow.now += len(x) * (3 if self.training and Slow.now > 80_000 else 1000)
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


def train_on_the_slow_clock() -> list[dict[str, float]]:
    speed.time = SimpleNamespace(perf_counter=lambda: Slow.now)
    here = f"model._target_={__name__}.Slow data._target_={__name__}.SlowRows task.loss={__name__}.mean_of"
    words = "sharding=root training.timing_warmup_steps=3 data.loader_workers=0 training.epochs=2"
    ((_, reported),) = train_all([[*here.split(), *words.split()]])
    return reported


def test_a_step_waits_for_its_batch_and_for_nothing_else() -> None:
    """32 samples a step: 32 s for the batch of 128 s, 0.25 samples/s, without the warm-up and validations."""
    (reported,) = run_ranks(1, train_on_the_slow_clock)
    assert [epoch["perf/timed_steps"] for epoch in reported] == [1, 5]
    for epoch in reported:
        assert epoch["perf/data_wait_share"] == pytest.approx(32 / 128)
        assert epoch["perf/samples_per_s"] == pytest.approx(32 / 128)


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


def test_the_type_of_a_loss_is_recorded_where_it_rounds() -> None:
    """A user's cross entropy of FSDP2's bfloat16 outputs; under DDP autocast computes it in float32, and so do ours."""
    theirs = [*MLP[:1], "training.max_steps=3", f"task.loss={labels.__module__}.labels"]
    ours = [*WORKLOADS["language"].words, "training.max_steps=1", "precision=bf16"]
    cases = {
        "sharding=per_block precision=bf16": (theirs, 2.0**-7),
        "sharding=per_block precision=fp16 training.grad_accum_steps=2": (theirs, 2.0**-10),
        "sharding=per_block precision=fp32": (theirs, None),
        "sharding=ddp precision=bf16": (theirs, None),
        "task.loss_chunks=1": (ours, None),
        "task.loss_chunks=2": (ours, None),
    }
    words = [[*of_whom, *case.split()] for case, (of_whom, _) in cases.items()]
    for (losses, (reported,)), (_, eps) in zip(run_ranks(2, train_all, words)[0], cases.values(), strict=True):
        assert reported.get("train/loss_eps") == eps
        assert reported["train/first_loss"] == losses[0]
        assert reported.get("train/early_loss") == (pytest.approx(fmean(losses[1:])) if losses[1:] else None)


def test_ranks_may_have_other_metrics_and_none_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`a` is of the other rank alone, `b` of this one alone; of `empty` nothing counts. Each is a sum and a count."""

    def validate(mine: dict[str, tuple[int, int]], theirs: dict[str, tuple[int, int]]) -> dict[str, float]:
        task = SimpleNamespace(forward=lambda model, batch: batch, metrics=lambda outputs, batch: mine)
        parallel = parallel_of(config(), nn.Identity())
        added = torch.tensor([theirs.get(name, (0, 0)) for name in sorted({*mine, *theirs})])
        parallel.dims = SimpleNamespace(sum=lambda totals: totals + added)
        state = SimpleNamespace(parallel=parallel, step=1, eval=lambda: None)
        monkeypatch.setattr(loop, "gather", lambda names: [names, [*theirs]])
        return loop.evaluate(state, task, [torch.zeros(1)])

    reported = validate({"loss": (1, 1), "b": (4, 1), "empty": (0, 0)}, {"a": (6, 2), "loss": (3, 1)})
    assert reported == {"val/a": 3.0, "val/b": 4.0, "val/loss": 2.0}
    with pytest.raises(UserError, match="the validation split has no label that counts"):
        validate({"loss": (0, 0)}, {"loss": (0, 0)})


def test_perplexity_and_bits_per_byte() -> None:
    """A loss of ln 8 is a choice among 8 tokens: three bits, for four bytes."""
    assert loop.token_metrics(math.log(8), 4.0) == pytest.approx({"val/perplexity": 8, "val/bits_per_byte": 0.75})
    assert loop.token_metrics(math.log(8), None) == pytest.approx({"val/perplexity": 8})


class Steps(Memo):
    """Knows which step has begun; the losses of some steps are planted."""

    begun: ClassVar[int]
    bad: ClassVar[tuple[range, dict[int, float]]]  # steps, and by rank what their losses are multiplied by

    def step(self, step: int) -> None:
        Steps.begun = step


def planted(model: nn.Module, batch: list[Tensor]) -> Tensor:
    steps, by_rank = Steps.bad
    return labels(model, batch) * (by_rank.get(dist.get_rank(), 1.0) if Steps.begun in steps else 1.0)


Case = tuple[range, dict[int, float], str]  # what is planted, and a setting


def train_until_it_ends(cases: list[Case]) -> list[tuple[str, int, int]]:
    """Of each case the message, how many of the 16 steps began, and how many epochs were reported."""
    from fsdp_lab.training.train import train

    results = []
    for *bad, setting in cases:
        Steps.begun, Steps.bad = 0, tuple(bad)
        words = ("model=mlp", "sharding=ddp", "training.global_batch_size=8", f"task.loss={__name__}.planted")
        with tempfile.TemporaryDirectory() as folder, pytest.raises(DivergedError) as error:
            train(config(*words, *setting.split()), Path(folder), memo := Steps())
        results.append((str(error.value), Steps.begun, len(memo.reported)))
    return results


def test_a_trial_that_diverges_does_not_finish_its_epoch() -> None:
    """Losses are looked at every ten steps, and at the end of an epoch, which is not reported. A loss scaler skips
    steps, but not 20 in a row, nor all of an epoch."""
    scaled, every = "precision.loss_scaling=true", {0: math.nan}
    cases = [
        (range(1, 2), {1: math.nan}, ""),
        (range(10, 11), {0: math.inf, 1: math.nan}, ""),
        (range(11, 12), {0: math.nan}, ""),
        (range(1, 99), every, scaled),
        (range(5, 99), every, f"{scaled} training.global_batch_size=4"),
    ]
    expected = [
        ("the loss of step 1 is nan on rank 1", 10, 0),
        ("the loss of step 10 is inf on rank 0 and 1 more", 10, 0),
        ("the loss of step 11 is nan on rank 0", 16, 0),
        ("the loss of step 1 is nan on rank 0, and no loss of the next 15 steps is finite", 16, 0),
        ("the loss of step 5 is nan on rank 0, and no loss of the next 19 steps is finite", 30, 0),
    ]
    assert run_ranks(2, train_until_it_ends, cases) == [expected] * 2


class Strange(Exception):
    """Cannot be sent: it is made of two arguments, and passes one on."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


ERRORS = [UserError("nothing there"), OSError(5, "Input/output error"), KeyError("size"), Strange("bent", "the end")]


class FailsOnTheFirst(nn.Module):
    """Only the first rank computes values (`init=rank0`)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        if not self.blocks[1].weight.is_meta:
            raise ZeroDivisionError("of a value")


def fail_where_one_rank_works(folder: str) -> list[str]:
    """What is raised on this rank where the data are prepared, something is saved, and first values are computed."""
    from fsdp_lab.training.train import train

    def throw(error: Exception) -> Any:
        raise error

    ranks, works = setup_distributed(), list[Any]()
    checkpoints = Checkpoints(folder, config("checkpoint.mode=sync"), ranks)
    for error in ERRORS:
        data = DataSpec(lambda error=error: throw(error), lambda: throw(AssertionError()), lambda size: None)
        works.append(lambda data=data: load_data(data, ranks))
        works.append(lambda error=error: checkpoints._on_first_rank(lambda: throw(error)))
    own = ("init=rank0", f"model._target_={__name__}.FailsOnTheFirst", "task=custom", "task.loss=torch.sum")
    works.append(lambda: train(config(*own), Path(folder), Memo()))
    raised = []
    for work in works:
        with pytest.raises(Exception) as info:
            work()
        raised.append(f"{info.type.__name__}: {info.value}")
    return raised


def test_every_kind_of_error_is_raised_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_where_one_rank_works, str(tmp_path))
    expected = [f"{type(error).__name__}: {error}" for error in ERRORS for _ in range(2)]
    assert first == [*expected, "ZeroDivisionError: of a value"]
    assert [each.removeprefix("RuntimeError: ") for each in second] == first, "what cannot be sent has its text"


class Sizes(nn.Linear):
    """Notes how many samples come at once in validation."""

    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            Sizes.seen.append(len(x))
        return super().forward(x)


def validated(cases: list[list[str]]) -> list[tuple[list[int], float]]:
    found = []
    for words in cases:
        Sizes.seen.clear()
        ((_, reported),) = train_all([words])
        found.append(([*Sizes.seen], reported[-1]["val/loss"]))
    return found


def test_validation_takes_as_many_samples_at_once_as_asked() -> None:
    """30 samples of two ranks, each of which counts once; checks of the first steps, before, take microbatches."""
    words = [f"model._target_={__name__}.Sizes", f"data._target_={__name__}.SlowRows", f"task.loss={__name__}.mean_of",
             "sharding=root"]  # fmt: skip
    (by_16, one), (by_4, other) = run_ranks(2, validated, [words, [*words, "data.val_batch_size=4"]])[0]
    assert by_16[-1:] == [15] and by_4[-4:] == [4, 4, 4, 3]
    assert one == pytest.approx(other)
