"""The profile of a step: what is left on disk, in the metrics, and when a trial dies of memory."""

from __future__ import annotations

import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.profile import CATEGORIES, Event, Holder, Profile
from tests.ranks import Memo, config, run_ranks, train_all


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


def test_deltas_are_what_each_change_adds():
    assert SMALL.deltas() == [100, 7, 40, 20, 10, 0, -60, 30]


def test_the_peak_is_where_most_is_held_and_categories_are_settled():
    assert SMALL.peak_index() == 5
    peak = SMALL.at_peak()
    assert {k: v for k, v in peak.items() if v} == {"param": 100, "activation": 60, "grad": 10, "total": 170}
    assert SMALL.holders() == [
        Holder("param", "m0", 100, 1), Holder("activation", "m2", 60, 1), Holder("grad", "m3", 10, 1),
    ]  # fmt: skip


def test_what_was_there_before_counts_whichever_place_it_ends_with():
    assert SMALL.peak_index("host") == 1
    assert SMALL.at_peak("host")["total"] == 7
    shrinking = profile_of((0, "device", "param", 100), (1, "host", "input", 5), (0, "device", "param", 0), begun=2)
    assert shrinking.peak_index() == 1 and shrinking.at_peak()["total"] == 100


def test_a_place_that_holds_nothing_has_no_peak():
    assert profile_of((0, "device", "param", 1)).at_peak("host") == {}
    assert Profile().peak_index() == -1


STEPS = ("training.max_steps=3",)


@pytest.mark.parametrize(
    "words",
    [
        ["sharding=per_block", "precision=bf16_mixed", "training.grad_accum_steps=2"],
        ["sharding=ddp", "precision=fp16"],
        ["sharding=per_block", "sharding.dp_replicate=2", "precision=grad_bf16"],
        ["sharding=root", "training.max_grad_norm=1", "activation_checkpointing=full"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_following_a_step_changes_nothing_that_is_learned(words: list[str]):
    off, peaks = run_ranks(2, train_all, [[*words, *STEPS, f"memory_profile={p}"] for p in ("off", "peaks")])[0]
    assert off[0] == peaks[0], "the losses, to the bit"
    assert off[1][-1]["val/loss"] == peaks[1][-1]["val/loss"]


def leftover(words: list[str]) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Train on this rank; the metrics told, and the profile's files by name."""
    from fsdp_lab.training import train

    memo = Memo()
    with tempfile.TemporaryDirectory() as folder:
        train(config(*STEPS, *words), Path(folder), memo)
        return memo.reported, {path.name: path.read_text() for path in Path(folder).glob("memory_*")}


def test_peaks_are_in_the_metrics_and_on_disk_for_every_rank():
    first, second = run_ranks(2, leftover, ["memory_profile=peaks"])
    assert set(first[1]) == {"memory_peaks_rank0.json"} and set(second[1]) == {"memory_peaks_rank1.json"}
    on_disk = [json.loads(text) for _, files in (first, second) for text in files.values()]
    assert [content["step"] for content in on_disk] == [2, 2]
    metrics = first[0][-1]
    totals = [content["peaks"]["device"]["total"] for content in on_disk]
    assert [metrics[f"memory/rank{rank}/peak_bytes"] for rank in (0, 1)] == totals
    assert metrics["memory/peak_bytes"] == max(totals) == sum(metrics[f"memory/{name}_bytes"] for name in CATEGORIES)
    assert metrics["memory/param_bytes"] > 0 < metrics["memory/optimizer_bytes"]
    assert "memory/host_peak_bytes" not in metrics, "on a CPU the device is the host"
    assert second[0][-1] == metrics, "every rank is told the same"


def test_a_timeline_is_a_page_for_every_rank():
    first, second = run_ranks(2, leftover, ["memory_profile=timeline"])
    for rank, (_, files) in enumerate((first, second)):
        page = files[f"memory_timeline_rank{rank}.html"]
        assert "encoder.layers.encoder_layer_1.mlp" in page
        assert f"{rank} of 2" in page
        assert "http" not in page.replace("http://www.w3.org", ""), "no network is needed"


def test_off_leaves_nothing():
    ((reported, files),) = run_ranks(1, leftover, ["memory_profile=off"])
    assert files == {}
    assert not [key for key in reported[-1] if key.startswith("memory/")]


def test_a_run_of_one_step_has_figures_too():
    ((reported, _),) = run_ranks(1, leftover, ["memory_profile=peaks", "training.max_steps=1"])
    assert reported[-1]["memory/peak_bytes"] > reported[-1]["memory/param_bytes"] > 0


def test_the_peak_is_that_of_the_second_step_where_an_epoch_has_one():
    words = ["model=mlp", "sharding=ddp", "training.global_batch_size=128", "training.epochs=3"]
    ((reported, files),) = run_ranks(1, leftover, ["memory_profile=peaks", *words])
    peaks = json.loads(files["memory_peaks_rank0.json"])["peaks"]["device"]
    assert peaks == forecast_profile(config(*words), 1, cuda=False).peaks["device"]
    first, *later = [figures["memory/peak_bytes"] for figures in reported]
    assert later == [peaks["total"]] * 2 and first < peaks["total"], "the first step has no optimizer state yet"
    assert reported[-1]["memory/optimizer_bytes"] == peaks["optimizer"] > 0


def run_out(words: list[str]) -> dict[str, Any]:
    """Train with little more memory than this process has now."""
    from fsdp_lab.engine.failures import is_out_of_memory
    from fsdp_lab.training import train

    with tempfile.TemporaryDirectory() as folder:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 500 * 2**20, resource.RLIM_INFINITY))
        try:
            train(config(*words), Path(folder), Memo())
            raised = None
        except (RuntimeError, MemoryError) as error:
            raised = error
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert raised is not None and is_out_of_memory(raised), raised
        files = {path.name: path.read_text() for path in Path(folder).glob("memory_*")}
    return files


def test_a_trial_that_dies_of_memory_leaves_the_profile_up_to_there():
    words = ["data=synthetic", "data.num_train=8192", "training.global_batch_size=8192", "model.num_layers=8"]
    (files,) = run_ranks(1, run_out, [*words, "memory_profile=timeline"])
    content = json.loads(files["memory_peaks_rank0.json"])
    assert content["step"] == 1
    assert 50 * 2**20 < content["peaks"]["device"]["total"] < 600 * 2**20
    assert "encoder_layer" in files["memory_timeline_rank0.html"]
