"""The memory of a step: how it is followed, what is left of it on disk and in the metrics, and what allocators add."""

from __future__ import annotations

import json
import resource
import tempfile
from collections import OrderedDict
from contextlib import nullcontext
from itertools import accumulate, islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.config.metrics import declared
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.memory.allocator_profile import Change, allocator_changes
from fsdp_lab.memory.profile import CATEGORIES, Event, Profile
from fsdp_lab.memory.recorder import record_step
from fsdp_lab.training import memory_profiler as module
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.memory_profiler import MemoryProfiler, metrics_of_ranks
from tests.ranks import Memo, config, parallel_of, run_ranks, train_all, train_leaving

CPU = torch.device("cpu")
STEPS = ("training.max_steps=3", "model.num_layers=2")


@pytest.mark.parametrize(
    "words",
    [
        "sharding=root training.max_grad_norm=1 activation_checkpointing=full",
        pytest.param("sharding=ddp precision=fp16", marks=pytest.mark.ci),
        pytest.param(
            "sharding=per_block sharding.dp_replicate=2 precision=grad_bf16 training.grad_accum_steps=2",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_following_a_step_changes_nothing_that_is_learned(words: str) -> None:
    cases = [[*STEPS, *words.split(), f"memory_profile={profile}"] for profile in ("off", "peaks")]
    (off, (*_, before)), (peaks, (*_, after)) = run_ranks(2, train_all, cases)[0]
    assert off == peaks, "the losses, to the bit"
    assert before["val/loss"] == after["val/loss"]
    assert [key for key in before if key.startswith("memory/")] == []


def test_peaks_are_in_the_metrics_and_on_disk_for_every_rank() -> None:
    """Where an epoch has one step, they are those of the second: the first has no optimizer state yet."""
    one_step = ["model=mlp", "sharding=ddp", "training.global_batch_size=128", "training.epochs=3"]
    cases = [["memory_profile=timeline", *STEPS], ["memory_profile=peaks", *one_step]]
    results = run_ranks(2, train_leaving, "memory_*", cases)
    on_disk = []
    for rank, ((_, (metrics,), files), _) in enumerate(results):
        assert set(files) == {f"memory_peaks_rank{rank}.json", f"memory_timeline_rank{rank}.html"}
        page = files[f"memory_timeline_rank{rank}.html"].decode()
        assert "encoder.layers.encoder_layer_1.mlp" in page and f"{rank} of 2" in page
        on_disk.append(json.loads(files[f"memory_peaks_rank{rank}.json"]))
        assert metrics == results[0][0][1][0], "every rank is told the same"
    totals = [content["peaks"]["device"]["total"] for content in on_disk]
    assert [content["step"] for content in on_disk] == [2, 2]
    assert [metrics[f"memory/rank{rank}/peak_bytes"] for rank in (0, 1)] == totals
    assert metrics["memory/peak_bytes"] == max(totals) == sum(metrics[f"memory/{name}_bytes"] for name in CATEGORIES)
    assert "memory/host_peak_bytes" not in metrics, "on a CPU the device is the host"

    _, epochs, files = results[0][1]
    peaks = json.loads(files["memory_peaks_rank0.json"])["peaks"]["device"]
    assert peaks == forecast_profile(config(*one_step), 2, cuda=False).peaks["device"]
    first, *later = [epoch["memory/peak_bytes"] for epoch in epochs]
    assert later == [peaks["total"]] * 2 and first < peaks["total"]
    assert epochs[-1]["memory/optimizer_bytes"] == peaks["optimizer"] > 0


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
    model = nn.Linear(4, 4)
    for rank in range(9):
        profiler = MemoryProfiler(config(), "", DistributedContext(rank, rank, 9, CPU), tmp_path)
        with profiler.track(parallel_of(config(), model), [torch.optim.SGD(model.parameters())], []):
            model(torch.ones(1, 4)).sum().backward()
        assert {key.split("/")[1] for key in profiler.figures() if "/rank" in key} == {"rank_smallest", "rank_median"}
        content = json.loads((tmp_path / f"memory_peaks_rank{rank}.json").read_text())
        assert content["rank"] == rank and content["peaks"]["device"]["param"] == 4 * (4 * 4 + 4)


def test_a_gpus_memory_is_that_of_steps_that_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """864 bytes were requested in the later steps, 64 of which are cuBLAS's; the followed step explains 700. The
    allocator, which an earlier trial has used, has the highest of what is held since its last reset."""
    peaks = dict.fromkeys(("requested", "active", "reserved"), 9999)

    def hold(*held: int) -> None:
        peaks.update({name: max(peaks[name], new) for name, new in zip(peaks, held, strict=True)})

    profile = Profile([Event(0, "device", "param", 700, "", "forward")]).with_peaks()
    monkeypatch.setattr(module, "record_step", lambda *_: nullcontext(SimpleNamespace(finish=lambda: profile)))
    monkeypatch.setattr(module, "free_cublas_workspaces", lambda device: 64)
    monkeypatch.setattr(module, "gather", lambda mine: [mine])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peaks.update(dict.fromkeys(peaks, 0)))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {f"{k}_bytes.all.peak": v for k, v in peaks.items()})
    gpu = torch.device("cuda", 0)
    profiler = MemoryProfiler(config("memory_profile=peaks"), "", DistributedContext(0, 0, 1, gpu), tmp_path)
    while profiler.tracks():
        with profiler.track(parallel_of(config(), nn.Linear(1, 1)), [torch.optim.SGD([torch.ones(1)])], []):
            hold(1000, 2000, 4000)
    assert profiler.figures()["memory/reserved_bytes"] == 4000, "no other step was taken"
    profiler.step_done()
    hold(800, 1536, 2048)
    with profiler.apart():
        hold(1900, 1900, 2048)  # the validation that is compared with a plain loop's
    hold(864, 1500, 2048)
    profiler.step_done()
    expected = {"peak_bytes": 864 - 64, "workspace_bytes": 64, "active_bytes": 1536, "reserved_bytes": 2048}
    figures = profiler.figures()
    assert {name: figures[f"memory/{name}"] for name in expected} == expected
    assert figures["memory/other_bytes"] == 800 - 700
    hold(1700, 1800, 2100)  # an evaluation
    profiler.epoch_begins()
    hold(900, 1500, 2100)  # smaller blocks, of which one more is kept
    profiler.step_done()
    later = {**expected, "peak_bytes": 900 - 64, "reserved_bytes": 2100}
    assert {name: profiler.figures()[f"memory/{name}"] for name in later} == later
    written = json.loads((tmp_path / "memory_peaks_rank0.json").read_text())
    assert written["allocator"] == later and written["peaks"]["device"]["total"] == 700


def run_out(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Train with little more memory than an evaluation takes. The notes of the error, and the files."""
    from fsdp_lab.engine.failures import code_of
    from fsdp_lab.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        torch.ones(1, requires_grad=True).sum().backward()  # reserves the addresses of autograd's threads
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 700 * 2**20, resource.RLIM_INFINITY))
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            train(config(*words), Path(folder), Memo())
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert code_of(raised.value) == "out_of_memory", raised.value
        return raised.value.__notes__, {path.name: path.read_text() for path in Path(folder).glob("memory_*")}


@pytest.mark.ci
def test_a_trial_that_dies_of_memory_leaves_its_profile() -> None:
    """And tells the module."""
    words = ["data=synthetic", "data.num_train=8192", "training.global_batch_size=8192", "model.num_layers=8"]
    ((notes, files),) = run_ranks(1, run_out, [*words, "memory_profile=timeline"])
    assert notes[0] == "step 1" and notes[1].startswith("forward of encoder.layers.encoder_layer_")
    content = json.loads(files["memory_peaks_rank0.json"])
    assert content["step"] == 1
    assert 50 * 2**20 < content["peaks"]["device"]["total"] < 800 * 2**20
    assert "encoder_layer" in files["memory_timeline_rank0.html"]


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


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_added_up_as_in_training(shared: bool) -> None:
    """The recorder follows as many bytes as PyTorch's profiler reports without it: there is no tensor for the sum."""
    model, x, changes, learned = Residual(shared), torch.randn(ROWS, WIDTH), list[Change](), []
    with allocator_changes(changes):
        model(x).backward()
    learned.append([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    with record_step(parallel_of(config(), model), [torch.optim.SGD(model.parameters())], [x]) as recorder:
        model(x).backward()
    learned.append([p.grad for p in model.parameters() if p.grad is not None])
    profile = recorder.finish()
    before, *during = (sum(sums.values()) for sums, _ in islice(profile.states(), profile.begun - 1, None))
    reported = max(accumulate(change.num_bytes for change in changes))
    assert abs(max(during) - before - reported) < TENSOR // 8
    assert learned[0] and all(torch.equal(a, b) for a, b in zip(*learned, strict=True))


class Block(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.proj, self.rotary = nn.Linear(8, 8), rotary

    def forward(self, x: Tensor) -> Tensor:
        return self.rotary(self.proj(x))


def test_a_change_is_of_the_innermost_module_by_its_users_name() -> None:
    """Two blocks have one rotary embedding, and at the end a part returns what another returns."""
    rotary, ends = nn.Sequential(nn.Sigmoid()), nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Dropout(0.0))
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(Block(rotary), Block(rotary)), ends=ends))
    x = torch.ones(4, 8)
    with record_step(parallel_of(config(), model), [torch.optim.SGD(model.parameters())], [x]) as recorder:
        model(x).sum().backward()
    made = [e for e in recorder.profile.events[recorder.profile.begun :] if e.num_bytes == 4 * 8 * 4]
    forward = ["blocks.0.proj", "blocks.0.rotary.0", "blocks.1.proj", "blocks.1.rotary.0", "ends.0.0"]
    assert [e.module for e in made if e.phase == "forward"] == forward
    assert [e.module for e in made if e.phase == "backward"] == ["ends.0.0", *reversed(forward[1:4])]
