"""The memory of a step: how it is followed, what is left of it on disk and in the metrics, and what allocators add."""

from __future__ import annotations

import gc
import json
import resource
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.config.metrics import declared
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training import memory as module
from fsdp_lab.training.allocator_profile import Change, allocator_changes
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.memory import MemoryProfiler, metrics_of_ranks
from fsdp_lab.training.profile import CATEGORIES, Event, Profile
from fsdp_lab.training.recorder import record_step
from tests.ranks import Memo, config, run_ranks, selected, train_leaving

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

STEPS = ("training.max_steps=3", "model.num_layers=2")
FOLLOWED = {
    "root, clipped": ["sharding=root", "training.max_grad_norm=1", "activation_checkpointing=full"],
    "ddp, fp16": ["sharding=ddp", "precision=fp16"],
    "hybrid": ["sharding=per_block", "sharding.dp_replicate=2", "precision=grad_bf16", "training.grad_accum_steps=2"],
}
ONE_STEP_EPOCHS = ["model=mlp", "sharding=ddp", "training.global_batch_size=128", "training.epochs=3"]
LEFT = {
    "timeline": ["memory_profile=timeline"],
    "off": ["memory_profile=off"],
    "one step an epoch": ["memory_profile=peaks", "training.max_steps=3", *ONE_STEP_EPOCHS],
}


@pytest.fixture(scope="module")
def left(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """Name of the case -> what each of two ranks is left with."""
    cases = {name: [*STEPS, *words] for name, words in LEFT.items()}
    for name in selected(request, "followed"):
        cases |= {f"{name} {p}": [*STEPS, *FOLLOWED[name], f"memory_profile={p}"] for p in ("off", "peaks")}
    results = run_ranks(2, train_leaving, "memory_*", list(cases.values()))
    return {name: list(ranks) for name, *ranks in zip(cases, *results, strict=True)}


@pytest.mark.parametrize(
    "followed", ["root, clipped", *(pytest.param(name, marks=pytest.mark.ci) for name in ("ddp, fp16", "hybrid"))]
)
def test_following_a_step_changes_nothing_that_is_learned(left: dict[str, list[Any]], followed: str) -> None:
    off, peaks = left[f"{followed} off"][0], left[f"{followed} peaks"][0]
    assert off[0] == peaks[0], "the losses, to the bit"
    assert off[1][-1]["val/loss"] == peaks[1][-1]["val/loss"]


def test_peaks_are_in_the_metrics_and_on_disk_for_every_rank(left: dict[str, list[Any]]) -> None:
    (_, reported, first), (_, also, second) = left["timeline"]
    for rank, files in enumerate((first, second)):
        assert set(files) == {f"memory_peaks_rank{rank}.json", f"memory_timeline_rank{rank}.html"}
        page = files[f"memory_timeline_rank{rank}.html"].decode()
        assert "encoder.layers.encoder_layer_1.mlp" in page and f"{rank} of 2" in page
    on_disk = [json.loads(files[f"memory_peaks_rank{rank}.json"]) for rank, files in enumerate((first, second))]
    assert [content["step"] for content in on_disk] == [2, 2]
    metrics = reported[-1]
    totals = [content["peaks"]["device"]["total"] for content in on_disk]
    assert [metrics[f"memory/rank{rank}/peak_bytes"] for rank in (0, 1)] == totals
    assert metrics["memory/peak_bytes"] == max(totals) == sum(metrics[f"memory/{name}_bytes"] for name in CATEGORIES)
    assert "memory/host_peak_bytes" not in metrics, "on a CPU the device is the host"
    assert also[-1] == metrics, "every rank is told the same"
    for _, figures, files in left["off"]:
        assert files == {} and not [key for key in figures[-1] if key.startswith("memory/")]


def test_the_peak_is_that_of_the_second_step_where_an_epoch_has_one(left: dict[str, list[Any]]) -> None:
    _, reported, files = left["one step an epoch"][0]
    peaks = json.loads(files["memory_peaks_rank0.json"])["peaks"]["device"]
    assert peaks == forecast_profile(config("model.num_layers=2", *ONE_STEP_EPOCHS), 2, cuda=False).peaks["device"]
    first, *later = [figures["memory/peak_bytes"] for figures in reported]
    assert later == [peaks["total"]] * 2 and first < peaks["total"], "the first step has no optimizer state yet"
    assert reported[-1]["memory/optimizer_bytes"] == peaks["optimizer"] > 0


@pytest.mark.parametrize("ranks", [8, 9, 512])
def test_many_ranks_have_no_metrics_of_their_own(ranks: int) -> None:
    """Peaks rise and reserved bytes fall with the rank: each of the four totals has its own smallest, median and
    largest, which is all that is left of more than eight ranks: two of each, beside the largest."""
    peaks = [{"peak_bytes": float(r), "active_bytes": r + 0.5, "reserved_bytes": 9999.0 - r, "host_peak_bytes": 7.0,
              "param_bytes": 2.0 * r} for r in range(ranks)]  # fmt: skip
    metrics, last = metrics_of_ranks(peaks), ranks - 1
    of_ranks = {key: value for key, value in metrics.items() if key.startswith("memory/rank")}
    assert len(of_ranks) == (4 * 8 if ranks == 8 else 4 * 2)
    assert {key: value for key, value in metrics.items() if key not in of_ranks} == {
        "memory/peak_bytes": last, "memory/active_bytes": last + 0.5, "memory/reserved_bytes": 9999,
        "memory/host_peak_bytes": 7, "memory/param_bytes": 2 * last,
    }  # fmt: skip
    if ranks > 8:
        assert of_ranks["memory/rank_smallest/reserved_bytes"] == 9999 - last
        assert of_ranks["memory/rank_median/peak_bytes"] == last / 2
    assert all(declared(key) for key in metrics)


def test_every_one_of_nine_ranks_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks one after the other: each is told what nine such ranks hold."""
    monkeypatch.setattr(module, "gather", lambda mine: [mine] * 9)
    for rank in range(9):
        profiler = MemoryProfiler(config(), "a model", DistributedContext(rank, rank, 9, CPU), tmp_path)
        model = nn.Linear(4, 4)
        with profiler.track(model, torch.optim.SGD(model.parameters()), []):
            model(torch.ones(1, 4)).sum().backward()
        assert {key.split("/")[1] for key in profiler.figures() if "/rank" in key} == {"rank_smallest", "rank_median"}
    files = [json.loads((tmp_path / f"memory_peaks_rank{rank}.json").read_text()) for rank in range(9)]
    assert [content["rank"] for content in files] == [*range(9)]
    assert all(content["peaks"]["device"]["param"] == 4 * (4 * 4 + 4) for content in files)


def run_out(words: list[str]) -> dict[str, str]:
    """Train with little more memory than this process has now."""
    from fsdp_lab.engine.failures import code_of
    from fsdp_lab.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        torch.ones(1, requires_grad=True).sum().backward()  # reserves the addresses of autograd's threads
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 500 * 2**20, resource.RLIM_INFINITY))
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            train(config(*words), Path(folder), Memo())
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert code_of(raised.value) == "out_of_memory", raised.value
        return {path.name: path.read_text() for path in Path(folder).glob("memory_*")}


@pytest.mark.ci
def test_a_trial_that_dies_of_memory_leaves_the_profile_up_to_there() -> None:
    words = ["data=synthetic", "data.num_train=8192", "training.global_batch_size=8192", "model.num_layers=8"]
    (files,) = run_ranks(1, run_out, [*words, "memory_profile=timeline"])
    content = json.loads(files["memory_peaks_rank0.json"])
    assert content["step"] == 1
    assert 50 * 2**20 < content["peaks"]["device"]["total"] < 600 * 2**20
    assert "encoder_layer" in files["memory_timeline_rank0.html"]


# How a step is followed.
ROWS, WIDTH = 4096, 256
TENSOR = ROWS * WIDTH * 4  # bytes of an activation


class Residual(nn.Module):
    """Each activation is used twice, so that gradients are added up. In `shared` the first of the two is at that time
    also that of another tensor, whose own backward pass has still to come."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.shared:
            others = self.second(x), self.third(x)
            return (2 * (h + others[0])).sum() + (3 * (h + others[1])).sum()
        return (2 * h).sum() + (3 * h).sum()


def followed_most(model: nn.Module, x: Tensor) -> int:
    """The most that a forward and a backward pass hold in addition, as followed."""
    with record_step(model, torch.optim.SGD(model.parameters()), [x], CPU) as recorder:
        model(x).backward()
    profile = recorder.finish()
    before, *during = (sum(sums.values()) for sums, _ in islice(profile.states(), profile.begun - 1, None))
    return max(during) - before


def reported_most(model: nn.Module, x: Tensor) -> int:
    """The same without a mode, by PyTorch's profiler."""
    changes: list[Change] = []
    with allocator_changes(changes):
        model(x).backward()
    held = most = 0
    for change in changes:
        held += change.num_bytes
        most = max(most, held)
    return most


def test_gradients_are_added_up_in_place_as_in_training() -> None:
    x = torch.randn(ROWS, WIDTH)
    difference = followed_most(Residual(), x) - reported_most(Residual(), x)
    assert abs(difference) < TENSOR // 8, "a third tensor for the sum"


@pytest.mark.parametrize("shared", [False, True])
def test_a_gradient_that_another_tensor_has_too_is_not_overwritten(shared: bool) -> None:
    torch.manual_seed(0)
    model, x = Residual(shared), torch.randn(ROWS, WIDTH)
    model(x).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    followed_most(model, x)
    learned = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert plain and all(torch.equal(a, b) for a, b in zip(plain, learned, strict=True))


class Shared(nn.Module):
    """Two blocks with one rotary embedding, and a part that returns what another returns."""

    def __init__(self) -> None:
        super().__init__()
        rotary = nn.Sequential(nn.Sigmoid())
        self.blocks = nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(8, 8), "rotary": rotary}) for _ in range(2)])
        self.ends = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Dropout(0.0))
        for block in self.blocks:
            block.forward = partial(self.through, block)

    @staticmethod
    def through(block: Any, x: Tensor) -> Tensor:
        return block["rotary"](block["proj"](x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.ends(x)


def test_a_change_is_of_the_innermost_module_as_its_user_calls_it() -> None:
    model, x = Shared(), torch.ones(4, 8)
    with record_step(model, torch.optim.SGD(model.parameters()), [x], CPU) as recorder:
        model(x).sum().backward()
    made = [e for e in recorder.profile.events[recorder.profile.begun :] if e.num_bytes == 4 * 8 * 4]
    forward = ["blocks.0.proj", "blocks.0.rotary.0", "blocks.1.proj", "blocks.1.rotary.0", "ends.0.0"]
    assert [e.module for e in made if e.phase == "forward"] == forward
    assert [e.module for e in made if e.phase == "backward"] == ["ends.0.0", *reversed(forward[1:4])]


class Full(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(2**40, *x.shape).clone()  # more than any address


def test_out_of_memory_names_the_module(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Full()), torch.randn(4, 8)
    profiler = MemoryProfiler(config(), "a model", DistributedContext(0, 0, 1, CPU), tmp_path)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RuntimeError, match="allocate"), profiler.track(model, optimizer, [x]):
        model(x)
    assert profiler.failed_at == "forward of 1"
    assert (tmp_path / "memory_peaks_rank0.json").is_file(), "the last profile"


class Allocator:
    """Stands for a GPU's allocator, whose peaks a test sets; `done` are the calls. `tests/gpu/` reads a real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peaks = {"requested_bytes": 0, "active_bytes": 0, "reserved_bytes": 0}
        self.done: list[str] = []
        monkeypatch.setattr(gc, "collect", lambda: self.done.append("collect"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.done.append("empty"))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.done.append("reset"))
        monkeypatch.setattr(
            torch.cuda, "memory_stats", lambda device: {f"{k}.all.peak": v for k, v in self.peaks.items()}
        )
        monkeypatch.setattr(module, "free_cublas_workspaces", lambda device: 64)
        monkeypatch.setattr(module, "gather", lambda mine: [mine])

    def hold(self, *peaks: int) -> None:
        """Let the peaks of bytes requested, active and reserved since the last reset be these."""
        self.peaks = dict(zip(self.peaks, peaks, strict=True))


class FakeRecorder:
    def __enter__(self) -> FakeRecorder:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def finish(self) -> Profile:
        return Profile([Event(0, "device", "param", 700, "", "forward")]).with_peaks()


def test_requested_active_and_reserved_bytes_of_steps_that_are_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """864 bytes were requested in the later steps, 64 of which are cuBLAS's; the followed step explains 700."""
    allocator = Allocator(monkeypatch)
    monkeypatch.setattr(module, "record_step", lambda *args: FakeRecorder())
    profiler = MemoryProfiler(config("memory_profile=peaks"), "", DistributedContext(0, 0, 1, GPU), tmp_path)
    while profiler.tracks():
        with profiler.track(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), []):
            allocator.hold(1000, 2000, 4000)
    assert allocator.done == ["collect", "empty", "reset"] * 2, "before the first step, and after the last followed"
    assert profiler.figures()["memory/reserved_bytes"] == 4000, "no other step was taken"
    profiler.step_done()
    allocator.hold(864, 1536, 2048)
    expected = {"peak_bytes": 864 - 64, "workspace_bytes": 64, "active_bytes": 1536, "reserved_bytes": 2048}
    figures = profiler.figures()
    assert {name: figures[f"memory/{name}"] for name in expected} == expected
    assert figures["memory/other_bytes"] == 800 - 700
    written = json.loads((tmp_path / "memory_peaks_rank0.json").read_text())
    assert written["allocator"] == expected and written["peaks"]["device"]["total"] == 700
