"""The profile of a step: what is left on disk, in the metrics, and when a trial dies of memory."""

from __future__ import annotations

import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_lab.config.metrics import declared
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.memory import metrics_of_ranks
from fsdp_lab.training.profile import CATEGORIES, Event, Held, Profile
from tests.ranks import Memo, config, run_ranks, selected, train_leaving


def profile_of(*events: tuple[int, str, str, int], begun: int = 0) -> Profile:
    """Events as `(storage, place, category, bytes)`; each storage in a module of its own number."""
    return Profile([Event(s, place, c, n, f"m{s}", "forward") for s, place, c, n in events], begun)


SMALL = profile_of(
    (0, "device", "param", 100),
    (1, "host", "input", 7),
    (2, "device", "activation", 40),
    (2, "device", "activation", 60),  # grows
    (3, "device", "temp", 10),
    (3, "device", "grad", 10),  # finds its category
    (2, "device", "activation", 0),
    (4, "device", "temp", 30),
    begun=2,
)


def test_each_state_is_what_the_changes_add_up_to():
    assert [sum(sums.values()) for sums, _ in SMALL.states()] == [100, 100, 140, 160, 170, 170, 110, 140]


def test_the_peak_is_where_most_is_held_and_categories_are_settled():
    peak = SMALL.peak()
    assert peak is not None and peak.index == 5 and peak.total == 170
    assert {k: v for k, v in peak.sums.items() if v} == {"param": 100, "activation": 60, "grad": 10}
    assert peak.held == [Held("param", 100, "m0"), Held("activation", 60, "m2"), Held("grad", 10, "m3")]


def test_what_was_there_before_counts_whichever_place_it_ends_with():
    host = SMALL.peak("host")
    assert host is not None and (host.index, host.total) == (1, 7)
    shrinking = profile_of((0, "device", "param", 100), (1, "host", "input", 5), (0, "device", "param", 0), begun=2)
    peak = shrinking.peak()
    assert peak is not None and (peak.index, peak.total) == (1, 100)


def test_a_place_that_holds_nothing_has_no_peak():
    assert profile_of((0, "device", "param", 1)).peak("host") is None
    assert Profile().peak() is None


STEPS = ("training.max_steps=3", "model.num_layers=2")
FOLLOWED = {
    "ddp, fp16": ["sharding=ddp", "precision=fp16"],
    "root, clipped": ["sharding=root", "training.max_grad_norm=1", "activation_checkpointing=full"],
    "per_block, accumulated": ["sharding=per_block", "precision=bf16_mixed", "training.grad_accum_steps=2"],
    "hybrid, grad_bf16": ["sharding=per_block", "sharding.dp_replicate=2", "precision=grad_bf16"],
}
ONE_STEP_EPOCHS = ["model=mlp", "sharding=ddp", "training.global_batch_size=128", "training.epochs=3"]
LEFT = {
    "peaks": ["memory_profile=peaks"],
    "timeline": ["memory_profile=timeline"],
    "off": ["memory_profile=off"],
    "one step": ["memory_profile=peaks", "training.max_steps=1"],
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
    "followed", [pytest.param(name, marks=[] if "clipped" in name else pytest.mark.ci) for name in FOLLOWED]
)
def test_following_a_step_changes_nothing_that_is_learned(left: dict[str, list[Any]], followed: str):
    off, peaks = left[f"{followed} off"][0], left[f"{followed} peaks"][0]
    assert off[0] == peaks[0], "the losses, to the bit"
    assert off[1][-1]["val/loss"] == peaks[1][-1]["val/loss"]


def test_peaks_are_in_the_metrics_and_on_disk_for_every_rank(left: dict[str, list[Any]]):
    (_, reported, first), (_, also, second) = left["peaks"]
    assert set(first) == {"memory_peaks_rank0.json"} and set(second) == {"memory_peaks_rank1.json"}
    on_disk = [json.loads(text) for files in (first, second) for text in files.values()]
    assert [content["step"] for content in on_disk] == [2, 2]
    metrics = reported[-1]
    totals = [content["peaks"]["device"]["total"] for content in on_disk]
    assert [metrics[f"memory/rank{rank}/peak_bytes"] for rank in (0, 1)] == totals
    assert metrics["memory/peak_bytes"] == max(totals) == sum(metrics[f"memory/{name}_bytes"] for name in CATEGORIES)
    assert metrics["memory/param_bytes"] > 0 < metrics["memory/optimizer_bytes"]
    assert "memory/host_peak_bytes" not in metrics, "on a CPU the device is the host"
    assert also[-1] == metrics, "every rank is told the same"


@pytest.mark.parametrize(("ranks", "expected"), [(8, 4 * 8), (9, 2 * 4), (512, 2 * 4)])
def test_many_ranks_have_no_metrics_of_their_own(ranks: int, expected: int):
    """Peaks rise and reserved bytes fall with the rank: each total has its own smallest, median and largest."""
    peaks = [{"peak_bytes": float(r), "active_bytes": r + 0.5, "reserved_bytes": 9999.0 - r, "host_peak_bytes": 7.0,
              "param_bytes": 2.0 * r} for r in range(ranks)]  # fmt: skip
    metrics = metrics_of_ranks(peaks)
    assert len([key for key in metrics if key.startswith("memory/rank")]) == expected
    last = ranks - 1
    totals = {"peak_bytes": last, "active_bytes": last + 0.5, "reserved_bytes": 9999, "host_peak_bytes": 7,
              "param_bytes": 2 * last}  # fmt: skip
    assert {key: value for key, value in metrics.items() if not key.startswith("memory/rank")} == {
        f"memory/{key}": value for key, value in totals.items()
    }
    if ranks > 8:
        assert metrics["memory/rank_smallest/reserved_bytes"] == 9999 - last
        assert metrics["memory/rank_median/peak_bytes"] == last / 2
    else:
        assert metrics["memory/rank3/reserved_bytes"] == 9996
    assert all(declared(key) for key in metrics)


def test_a_timeline_is_a_page_for_every_rank(left: dict[str, list[Any]]):
    for rank, (_, _, files) in enumerate(left["timeline"]):
        page = files[f"memory_timeline_rank{rank}.html"].decode()
        assert "encoder.layers.encoder_layer_1.mlp" in page
        assert f"{rank} of 2" in page
        assert "http" not in page.replace("http://www.w3.org", ""), "no network is needed"


def test_off_leaves_nothing(left: dict[str, list[Any]]):
    for _, reported, files in left["off"]:
        assert files == {}
        assert not [key for key in reported[-1] if key.startswith("memory/")]


def test_a_run_of_one_step_has_figures_too(left: dict[str, list[Any]]):
    _, reported, _ = left["one step"][0]
    assert reported[-1]["memory/peak_bytes"] > reported[-1]["memory/param_bytes"] > 0


def test_the_peak_is_that_of_the_second_step_where_an_epoch_has_one(left: dict[str, list[Any]]):
    _, reported, files = left["one step an epoch"][0]
    peaks = json.loads(files["memory_peaks_rank0.json"])["peaks"]["device"]
    assert peaks == forecast_profile(config("model.num_layers=2", *ONE_STEP_EPOCHS), 2, cuda=False).peaks["device"]
    first, *later = [figures["memory/peak_bytes"] for figures in reported]
    assert later == [peaks["total"]] * 2 and first < peaks["total"], "the first step has no optimizer state yet"
    assert reported[-1]["memory/optimizer_bytes"] == peaks["optimizer"] > 0


def run_out(words: list[str]) -> dict[str, Any]:
    """Train with little more memory than this process has now."""
    from fsdp_lab.engine.failures import code_of
    from fsdp_lab.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        torch.ones(1, requires_grad=True).sum().backward()  # reserves the addresses of autograd's threads
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 500 * 2**20, resource.RLIM_INFINITY))
        try:
            train(config(*words), Path(folder), Memo())
            raised = None
        except (RuntimeError, MemoryError) as error:
            raised = error
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert raised is not None and code_of(raised) == "out_of_memory", raised
        files = {path.name: path.read_text() for path in Path(folder).glob("memory_*")}
    return files


@pytest.mark.ci
def test_a_trial_that_dies_of_memory_leaves_the_profile_up_to_there():
    words = ["data=synthetic", "data.num_train=8192", "training.global_batch_size=8192", "model.num_layers=8"]
    (files,) = run_ranks(1, run_out, [*words, "memory_profile=timeline"])
    content = json.loads(files["memory_peaks_rank0.json"])
    assert content["step"] == 1
    assert 50 * 2**20 < content["peaks"]["device"]["total"] < 600 * 2**20
    assert "encoder_layer" in files["memory_timeline_rank0.html"]
