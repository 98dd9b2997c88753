"""Loaders as people write them: each trains as a loop by hand, in every way to shard, and goes on where it was."""

from __future__ import annotations

import multiprocessing
import re
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.report.pytorch import to_pytorch
from fsdp_lab.training.layout import Layout
from fsdp_lab.training.plain import run
from fsdp_lab.training.train import train
from fsdp_lab.workloads.build import build_workload
from tests import forked
from tests.conftest import HERE, ROOT
from tests.parity import differences
from tests.ranks import Memo, config, outcomes, run_ranks, train_all
from tests.servers import lay_store
from tests.training.checkpoints import Job, train_in

BATCH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    _tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.words(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_word(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def counted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["rows"][:, 1:].masked_fill(~batch["counts"][:, 1:], -100)
    logits = model(batch["rows"][:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels >= 0).sum()


def texts(split: str, seed: int = 0) -> Iterator[Tensor]:
    """Without an end."""
    generator = torch.Generator().manual_seed(seed + len(split))
    while True:
        yield torch.randint(16, (int(torch.randint(3, 12, (), generator=generator)),), generator=generator)


class Packed(IterableDataset[Tensor]):
    """Rows of nine words from texts of any length: those of this rank."""

    def __init__(self, split: str, rank: int, world_size: int, rows: int) -> None:
        self.split, self.rows, self.place = split, rows, (rank, None, world_size)

    def __iter__(self) -> Iterator[Tensor]:
        return islice(self.all(), *self.place)

    def all(self) -> Iterator[Tensor]:
        words, source = torch.empty(0, dtype=torch.int64), texts(self.split)
        for _ in range(self.rows):
            while len(words) < 9:
                words = torch.cat([words, next(source)])
            yield words[:9]
            words = words[9:]


def packed(split: str, *, batch_size: int, rank: int, world_size: int, seed: int, rows: int = 90) -> Any:
    items = Packed(split, rank, world_size, rows if split == "train" else 19)
    return DataLoader(items, batch_size=batch_size, drop_last=split == "train")


def in_processes(split: str, *, batch_size: int, rank: int, world_size: int, seed: int) -> Any:
    return DataLoader(Packed(split, rank, world_size, 40), batch_size=batch_size, num_workers=1)


def bucketed(split: str, *, batch_size: int, rank: int, world_size: int, seed: int, batches: int = 9) -> Any:
    """Batches of texts of similar length: of unequal sizes, and one more for rank 0 than for rank 1."""
    generator, made = torch.Generator().manual_seed(seed + len(split)), []
    for i in range(batches if split == "train" else 3):
        size = (batch_size - i % 3, 4 + 2 * (i % 4))
        rows = torch.randint(16, size, generator=generator)
        made.append({"rows": rows, "counts": torch.rand(size, generator=generator) < 0.2 + 0.2 * (i % 4)})
    return made[rank::world_size]


def longest(size: int, batches: int = 9) -> Any:
    return {"rows": torch.zeros(size, 10, dtype=torch.int64), "counts": torch.ones(size, 10, dtype=torch.bool)}


class Shuffled:
    """Another order in each pass, by a generator of its own; goes on where a state was."""

    def __init__(self, split: str, batch_size: int, rank: int, world_size: int, seed: int) -> None:
        self.rows = torch.stack([*Packed(split, rank, world_size, 80)])
        self.generator, self.size = torch.Generator().manual_seed(seed + 10 * rank), batch_size
        self.before, self.taken = self.generator.get_state(), 0

    def __len__(self) -> int:
        return len(self.rows) // self.size

    def __iter__(self) -> Iterator[Tensor]:
        start, self.taken = self.taken, 0
        self.before = self.before if start else self.generator.get_state()
        self.generator.set_state(self.before)
        order = torch.randperm(len(self.rows), generator=self.generator)
        for i in range(start, len(self)):
            self.taken = i + 1
            yield self.rows[order[i * self.size : (i + 1) * self.size]]
        self.taken = 0


class Resumable(Shuffled):
    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before if self.taken else self.generator.get_state(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self.taken = state["before"], state["taken"]
        self.generator.set_state(self.before)


class Rows:
    def __init__(self, split: str) -> None:
        self.rows = [*Packed(split, 0, 1, 60)]

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


class Noisy(Rows):
    def __getitem__(self, i: int) -> Tensor:
        return (self.rows[i] + torch.randint(4, (9,))) % 16


def sampled(split: str, *, batch_size: int, rank: int, world_size: int, seed: int) -> Any:
    """As scripts with DDP do."""
    items = Rows(split)
    return DataLoader(items, batch_size, sampler=DistributedSampler(items, world_size, rank, seed=seed))


def noisy(split: str, *, batch_size: int, rank: int, world_size: int, seed: int) -> Any:
    items = Noisy(split)
    return DataLoader(Subset(items, range(rank, len(items), world_size)), batch_size, shuffle=True, drop_last=True)


def words(case: str, *more: str) -> list[str]:
    loader, *own = case.split()
    loss = "counted" if loader in ("bucketed", "longest_later") else "next_word"
    return [
        f"model._target_={__name__}.Net", f"model.block_classes=[{__name__}.Block]", f"data.loader={__name__}.{loader}",
        f"task.loss={__name__}.{loss}", "data.num_train=null", "data.num_val=null", "training.epochs=2",
        f"training.global_batch_size={BATCH}", "optimizer.lr=0.01", *own,
        *" ".join(more).split(),
    ]  # fmt: skip


def steps_of(loader: Any, parts: int, passes: int | None, accum: int = 1, **arguments: Any) -> Iterator[Any]:
    """By hand: for each rank the microbatches of each step."""
    size = BATCH // parts // accum
    ranks = [loader("train", batch_size=size, rank=r, world_size=parts, seed=0, **arguments) for r in range(parts)]
    for epoch in count() if passes is None else range(passes):
        for rank in ranks:
            if hasattr(getattr(rank, "sampler", None), "set_epoch"):
                rank.sampler.set_epoch(epoch)
        batches = [iter(rank) for rank in ranks]
        steps = ([[*islice(rank, accum)] for rank in batches] for _ in count())
        yield from takewhile(lambda step: all(len(part) == accum for part in step), steps)


def by_hand(loss: Any, steps: Iterator[Any], val: list[Any]) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model, losses = Net(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in steps:
        parts = [loss(model, batch) for rank in step for batch in rank]
        mean = sum(x for x, _ in parts) / sum(n for _, n in parts) if loss is counted else sum(parts) / len(parts)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses, val_loss_of(model, loss, val)


@torch.no_grad()
def val_loss_of(model: nn.Module, loss: Any, batches: list[Any]) -> float:
    if loss is counted:
        parts = [loss(model, batch) for batch in batches]
    else:
        parts = [(loss(model, batch) * len(batch), len(batch)) for batch in batches]
    return float(sum(total for total, _ in parts) / sum(number for _, number in parts))


CASES = {  # what is typed -> the loader, the passes, microbatches, steps
    "packed training.max_steps=9": (packed, 2, 1, 9),
    "packed training.max_steps=7 training.epoch_steps=3 training.epochs=9": (packed, None, 1, 7),
    "bucketed": (bucketed, 2, 1, None),
    "bucketed training.grad_accum_steps=2 training.epochs=3": (bucketed, 3, 2, None),
    "Shuffled training.epoch_steps=3 training.epochs=3": (Shuffled, None, 1, 9),
    "sampled": (sampled, 2, 1, None),
}
SHARDINGS = ("ddp", "root", "per_block", "per_block sharding.api=fsdp1", "per_block sharding.tp=2")
EACH = [(case, sharding) for case in [*CASES][::3] for sharding in SHARDINGS]
EACH += [(case, sharding) for n, case in enumerate(CASES) if n % 3 for sharding in SHARDINGS[n % 2 :: 3]]


@cache
def expected(case: str, parts: int) -> tuple[list[float], float]:
    loader, passes, accum, most = CASES[case]
    given = {"batch_size": BATCH // parts // accum, "world_size": parts, "seed": 0}
    val = [batch for rank in range(parts) for batch in loader("val", rank=rank, **given)]
    steps = islice(steps_of(loader, parts, passes, accum), most)
    return by_hand(counted if loader is bucketed else next_word, steps, val)


@cache
def plain(case: str, parts: int) -> dict[str, float]:
    result = run(part(config(*words(case)), TrialConfig), parts)
    assert not result["missing"], result
    return result["figures"]  # type: ignore[no-any-return]


def test_each_loader_trains_as_a_loop_by_hand() -> None:
    """And its first steps are those of the plain loop."""
    trained = run_ranks(2, train_all, [words(case, f"sharding={sharding}") for case, sharding in EACH])[0]
    for (case, sharding), (losses, reported) in zip(EACH, trained, strict=True):
        parts = 1 if "tp=2" in sharding else 2
        by_steps, val_loss = expected(case, parts)
        assert losses == pytest.approx(by_steps, rel=2e-5), (case, sharding)
        assert reported[-1]["val/loss"] == pytest.approx(val_loss, rel=2e-5), (case, sharding)
        figures = plain(case, parts)
        assert {key: reported[0][key] for key in figures} == pytest.approx(figures, rel=1e-5), (case, sharding)


def test_a_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    """By its own state, or by reading again; in the middle of a pass, and where one has ended."""
    cases = [
        ("Resumable training.epoch_steps=4 training.epochs=4", 6, "by its state_dict"),
        ("Resumable training.epochs=3", 5, "by its state_dict"),
        ("packed training.max_steps=9", 4, "which were read again"),
        ("sampled training.epochs=3", 6, "which were read again"),
        ("noisy training.epochs=3", 4, "which were read again"),
    ]
    jobs = []
    for n, (case, steps, _) in enumerate(cases):
        typed = words(case, "sharding=per_block checkpoint.mode=sync memory_profile=off")
        for name, more in ((f"{n}/whole", []), (f"{n}/cut", [f"training.max_steps={steps}"]), (f"{n}/cut", [])):
            jobs.append(Job(str(tmp_path / name), [*typed, *more], trial=()))
    done = run_ranks(2, train_in, jobs)[0]
    for n, (case, steps, way) in enumerate(cases):
        whole, cut, rest = done[3 * n : 3 * n + 3]
        assert [each.error for each in (whole, cut, rest)] == [""] * 3
        assert (len(cut.losses), len(rest.losses)) == (steps, len(whole.losses) - steps), case
        assert [*cut.losses, *rest.losses] == pytest.approx(whole.losses, rel=1e-6), case
        assert rest.epochs[-1]["val/loss"] == pytest.approx(whole.epochs[-1]["val/loss"], rel=1e-6), case
        assert any(way in note for note in rest.facts["notes"]), (case, rest.facts["notes"])
    (refused,) = run_ranks(1, train_in, [jobs[1]])[0]
    assert "has the places of 2 workers in data.loader" in refused.error and "trial has 1; resume" in refused.error


def test_speeds_count_what_the_batches_have() -> None:
    """Of the steps that are timed: all but the first two, which compare ranks."""
    ((_, reported),) = run_ranks(2, train_all, [words("bucketed", "training.timing_warmup_steps=0 task.unit=tokens")])[
        0
    ]
    steps = [*islice(steps_of(bucketed, 2, 2), 2, None)]
    batches = [batch["rows"] for step in steps for rank in step for batch in rank]
    last = reported[-1]
    assert last["perf/timed_steps"] == len(steps)
    assert last["perf/samples_per_s"] * last["perf/timed_s"] == pytest.approx(sum(map(len, batches)))
    tokens = sum(rows.numel() for rows in batches)
    assert last["perf/tokens_per_s"] * last["perf/timed_s"] == pytest.approx(tokens)


def test_a_forecast_has_the_bytes_of_the_worst_batch() -> None:
    worst = f"data.example_batch={__name__}.longest data.batches=8"
    cases = [words("longest_later", f"sharding={sharding} {worst}") for sharding in ("ddp", "per_block")]
    items = words("packed", f"data.loader=null data._target_={__name__}.Nine data.example_batch={__name__}.nine")
    assert differences([*cases, [*words("packed"), "training.max_steps=2"], [*items, "data.num_train=64"]]) == []


def longest_later(split: str, *, batch_size: int, rank: int, world_size: int, seed: int, batches: int) -> Any:
    """The second batch is as long as any."""
    first = {name: tensor[:, : 5 - rank] for name, tensor in longest(batch_size).items()}
    return [first, *[longest(batch_size)] * batches]


class Nine(Rows):
    def __init__(self, split: str) -> None:
        self.rows = [*Packed(split, 0, 1, 64)]

    def __len__(self) -> int:
        return 64


def nine(size: int) -> Tensor:
    return torch.zeros(size, 9, dtype=torch.int64)


def test_no_process_of_a_loader_outlives_a_forecast() -> None:
    trial = config(*words("in_processes"))
    batch = build_workload(trial.model, trial.data, trial.task).data.example_batch(4)
    assert batch.shape == (4, 9)
    assert multiprocessing.active_children() == []


class Graphs:
    """Items of different sizes, which a batch concatenates."""

    def __init__(self, split: str) -> None:
        source = texts(split)
        self.items = [next(source) for _ in range(64)]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Tensor:
        return self.items[i]


def concatenated(items: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([0, *map(len, items)])
    return {"rows": torch.cat(items)[None], "cu_seqlens": lengths.cumsum(0)}


def of_graphs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A mean over items of what each sums."""
    ends = batch["cu_seqlens"]
    logits = model(batch["rows"])[0].logsumexp(-1)
    sums = torch.zeros(len(ends) - 1).index_add(0, torch.repeat_interleave(ends.diff()), logits)
    return sums.square().sum(), torch.tensor(len(sums))


def test_a_collate_may_concatenate_items() -> None:
    typed = [
        f"model._target_={__name__}.Net", f"model.block_classes=[{__name__}.Block]", f"data._target_={__name__}.Graphs",
        f"data.collate_fn={__name__}.concatenated", f"task.loss={__name__}.of_graphs", "optimizer.lr=0.01",
        "data.num_train=64", "data.num_val=15", "training.global_batch_size=16", "task.unit=tokens",
    ]  # fmt: skip
    shardings = ["ddp", "per_block", "root sharding.api=fsdp1 training.grad_accum_steps=2"]
    trained = run_ranks(2, train_all, [[*typed, *f"sharding={each}".split()] for each in shardings])[0]
    torch.manual_seed(0)
    model, items, losses = Net(), Graphs("train"), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for part_of in torch.randperm(64, generator=torch.Generator().manual_seed(0)).split(16):
        total, number = of_graphs(model, concatenated([items[i] for i in part_of]))
        (total / number).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / number).item())
    with torch.no_grad():
        total, number = of_graphs(model, concatenated(Graphs("val").items[:15]))
    for sharding, (got, reported) in zip(shardings, trained, strict=True):
        assert got == pytest.approx(losses, rel=2e-5), sharding
        assert reported[-1]["val/loss"] == pytest.approx(float(total / number), rel=2e-5), sharding


def generator(split: str, *, batch_size: int, rank: int, world_size: int, seed: int) -> Any:
    yield torch.zeros(2, 9, dtype=torch.int64)


def empty(split: str, *, batch_size: int, rank: int, world_size: int, seed: int, where: str) -> Any:
    """Nothing in a split, on the last rank or on all."""
    lacks = split == where and (rank == world_size - 1 or split == "val")
    return Unknown([] if lacks else [torch.full((2, 9), rank)] * 3)


class Unknown:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def a_list(split: str, *, batch_size: int, rank: int, world_size: int, seed: int, batches: int) -> Any:
    return [torch.zeros(2, 9, dtype=torch.int64)] * (batches if rank else 2)


def items(split: str, *, batch_size: int, rank: int, world_size: int, seed: int) -> Any:
    return Nine(split)


def words_only(split: str, *, batch_size: int, rank: int, world_size: int, seed: int) -> Any:
    return [["no", "tensor"]]


def breaks(split: str, *, batch_size: int, rank: int, world_size: int, seed: int) -> Any:
    return Breaks(rank)


class Breaks:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(4):
            yield torch.full((2, 9), self.rank) if i < 2 or self.rank == 0 else {}["shard"]


def by_process(split: str, *, batch_size: int, rank: int, world_size: int, seed: int) -> Any:
    return [torch.full((2, 9), torch.distributed.get_rank())] * 4


class Unsafe(Resumable):
    def state_dict(self) -> dict[str, Any]:
        return {"place": Unknown([])}


REFUSED = {
    "Unsafe checkpoint.mode=sync": "its state_dict has more than plain values and tensors",
    "packed": r"data\.loader=.*packed returns a DataLoader without __len__ for split=train, so training\.max_steps="
    r"null leaves the steps of the trial unknown; set training\.max_steps, or training\.epoch_steps",
    "packed training.max_steps=4 lr_schedule=cosine": "lr_schedule=cosine does not know its steps; set training.epoch_",
    "a_list data.batches=4": "gives every rank the same first batch: each must have its own part",
    "generator": "returns a generator for split=train, which can be iterated once",
    "items": "returns a Nine for split=train, which cannot be iterated",
    "words_only": "gives a list without a tensor in it",
    "empty data.where=train training.max_steps=4": "rank 1 has 0 batches of split=train in pass 1, and a step takes 1;",
    "empty data.where=val training.max_steps=4": "gives no rank a batch of split=val",
    "a_list data.batches=0": "rank 1 has 0 batches of split=train in pass 1",
    "a_list data.batches=1 training.grad_accum_steps=2": r"rank 1 has 1 batch of .* takes 2 \(training",
    "breaks": r"breaks: batch 3 of pass 1 of split=train cannot be read: KeyError: 'shard' \(tests/.*\.py:\d+\)",
    "by_process sharding.tp=2": r"rank 1 has another first batch than the ranks that it shares samples with",
}


def test_what_a_loader_lacks_is_told() -> None:
    cases = [words(case, "sharding=per_block") for case in REFUSED]
    for found in run_ranks(2, outcomes, cases):
        for (case, said), one in zip(REFUSED.items(), found, strict=True):
            assert isinstance(one, str) and re.search(said, one), (case, one)


def trained_and_pasted(cases: list[list[str]]) -> list[tuple[list[float], list[float]]]:
    """The losses of each case, and those of its script."""
    results = []
    for typed in cases:
        trial, losses, memo = config(*typed), list[float](), Memo()
        with tempfile.TemporaryDirectory() as folder:
            train(trial, Path(folder), memo, losses.extend)
        facts = memo.known
        layout, steps = Layout(**facts["layout"]), facts["steps_per_epoch"]
        code = to_pytorch("", trial, layout, 2, facts["torch"], steps_per_epoch=steps)
        torch.manual_seed(0)
        names: dict[str, Any] = {"device": torch.device("cpu"), "model": Net()}
        exec(code, names)
        once, step = (textwrap.dedent(each) for each in code.split('"""')[1].split("\n\n") if each.startswith("    "))
        with mock.patch.object(dist, "init_process_group"), mock.patch.object(torch.cuda, "set_device"):
            exec(once, names)
        own = list[Tensor]()
        names["compute_loss"] = lambda model, batch, own=own: own.append(next_word(model, batch)) or own[-1]
        for batch in islice(names["loader"], len(losses)):
            names["batch"] = batch
            exec(step, names)
        total = torch.stack(own).detach()
        dist.all_reduce(total)
        results.append((losses, (total / 2).tolist()))
    return results


def test_the_script_of_a_trial_calls_the_loader_as_the_trial() -> None:
    cases = [
        words("packed training.epoch_steps=4 training.epochs=1 lr_schedule=cosine", "sharding=ddp"),
        words("packed training.max_steps=4 data.rows=70", "sharding=per_block"),
        words("packed training.max_steps=4", "sharding=per_block sharding.tp=2"),
    ]
    for trial, script in run_ranks(2, trained_and_pasted, cases)[0]:
        assert len(trial) == 4 and script == pytest.approx(trial, rel=1e-5)


@pytest.mark.full
@pytest.mark.documents("python -m fsdp_lab -m data.loader=my_project.stream.loader...")
def test_the_stream_of_the_page_trains(tmp_path: Path) -> None:
    code, after = (ROOT / "docs/recipes.md").read_text().partition("# my_project/stream.py\n")[2].split("```\n", 1)
    assert len(code.splitlines()) <= 25
    command = after.partition("python -m ")[2].partition("```")[0].replace("\\\n", " ")
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project/stream.py").write_text(code)
    lay_store(tmp_path)
    done = forked.run(tmp_path, *command.split(), "cluster.num_workers=2", *HERE, seconds=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 settings have the losses of a plain loop of your model" in done.stdout, done.stdout
