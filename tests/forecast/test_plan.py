"""The plan of a step: by hand, against what ranks send, as a file, and what a check names when something differs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_lab.config import UserError
from fsdp_lab.forecast.plan import Part, StepPlan, group_text, make_plan, request_of
from fsdp_lab.forecast.plan_lock import TOLERANCES, Lock, changes, lock_of, markdown, read_lock, write_lock
from tests import forked
from tests.conftest import ROOT
from tests.forecast.command import plan_here
from tests.ranks import config, run_ranks, train_all
from tests.workloads.hf.cases import plain_model

LM = ("task=language", "model=lm_tiny", "data=synthetic_tokens", "data.vocab_size=256", "data.seq_len=64")
FOUR = (*LM, "training.global_batch_size=16", "cluster.num_workers=4")
BLOCK = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64  # parameters: q and o, k and v, feed-forward, norms
OUTER = 2 * 256 * 64 + 64  # embedding, head, norm


def plan_of(*words: str) -> StepPlan:
    return make_plan(request_of(config(*words)))


def calls(plan: StepPlan, phase: str, operation: str) -> dict[str, tuple[int, int]]:
    """The number and bytes of collectives, by unit."""
    chosen = [one for one in plan.collectives if (one.phase, one.operation) == (phase, operation)]
    return {one.unit: (one.calls, one.bytes) for one in chosen}


@pytest.mark.parametrize(
    ("policy", "again"), [("default", ["blocks.*"]), ("always", ["blocks.*", "<root>"]), ("never", [])]
)
def test_units_and_what_they_send_by_hand(policy: str, again: list[str]):
    """Two blocks and the root of a model in float32, gathered in bfloat16 by four ranks and reduced in float32."""
    plan = plan_of(*FOUR, "sharding=per_block", "precision=bf16_mixed", f"reshard_after_forward={policy}")
    rows = [(u.unit, u.count, u.module, u.parameters, u.stored, u.sharded, u.dtype, u.gathered) for u in plan.units]
    assert rows == [
        ("blocks.*", 2, "Block", BLOCK, "float32", BLOCK, "bfloat16", 2 * BLOCK),
        ("<root>", 1, "Llama", OUTER, "float32", OUTER, "bfloat16", 2 * OUTER),
    ]
    gathers = {"<root>": (1, 2 * OUTER), "blocks.*": (2, 2 * BLOCK)}
    assert calls(plan, "forward", "all_gather") == gathers
    assert calls(plan, "backward", "all_gather") == {unit: gathers[unit] for unit in again}
    assert calls(plan, "backward", "reduce_scatter") == {"blocks.*": (2, 4 * BLOCK), "<root>": (1, 4 * OUTER)}
    assert {(one.dtype, one.group) for one in plan.collectives if one.unit != "-"} == {
        ("bfloat16", "0-3"), ("float32", "0-3"),
    }  # fmt: skip
    order = [(one.phase, one.operation, one.unit) for one in plan.collectives][:2]
    assert order == [("forward", "all_gather", "<root>"), ("forward", "all_gather", "blocks.*")]


def test_a_rank_stores_padded_parts():
    """Of the head of 10 x 1024 and its 10 biases, four ranks have rows of three each; FSDP1 divides one flat tensor."""
    words = ("model=mlp", "sharding=per_layer", "cluster.num_workers=4", "training.global_batch_size=16")
    head = [next(u for u in plan_of(*words, *api).units if u.unit == "head") for api in ([], ["sharding.api=fsdp1"])]
    assert [unit.sharded for unit in head] == [4 * (3 * 1024 + 3), 4 * -(-10 * 1025 // 4)]
    assert [unit.gathered for unit in head] == [4 * 10 * 1025] * 2
    (whole,) = plan_of("model=mlp", "sharding=ddp", "cluster.num_workers=4").units
    assert (whole.sharded, whole.gathered) == (4 * whole.parameters, 0)


def test_the_peak_is_that_of_the_forecast_and_its_largest_tensors_are_named():
    plan = plan_of(*FOUR, "sharding=per_block")
    (device, host) = plan.peaks
    for peak in (device, host):
        assert sum(one.bytes for one in plan.categories if one.place == peak.place) == peak.bytes
    largest = [one.bytes for one in plan.largest if one.place == "device"]
    assert len(largest) == 5 and largest == sorted(largest, reverse=True)
    assert all(one.unit in ("blocks.*", "<root>") for one in plan.largest if one.place == "device")
    kept = {one.category: one.unit for one in plan.categories if one.category in ("param", "input", "unsharded_grad")}
    assert kept == {"param": "-", "input": "-", "unsharded_grad": "<root>"}, (
        "the head's; what was there before has none"
    )


def test_ranks_are_named_by_their_distance():
    assert [group_text(ranks) for ranks in ((0, 1, 2), (0, 8, 16), (0, 1, 5), (3,))] == ["0-2", "0-16:8", "0,1,5", "3"]


# What a dispatch mode sees -> the operation, and which of its tensors has the bytes of all ranks.
_SENT = {
    "_allgather_base_": ("all_gather", lambda args, result: args[0]),
    "allgather_": ("all_gather", lambda args, result: args[0]),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args, result: args[1]),
    "allreduce_": ("all_reduce", lambda args, result: args[0]),
    "all_gather_into_tensor": ("all_gather", lambda args, result: result),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args, result: args[0]),
    "all_reduce": ("all_reduce", lambda args, result: args[0]),
}


class Sends(TorchDispatchMode):
    """Counts collectives by operation and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[tuple[str, int]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ in _SENT:
            operation, whole = _SENT[func.overloadpacket.__name__]
            tensors = torch.utils._pytree.tree_leaves(whole(args, result))
            self.seen[operation, sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))] += 1
        return result


def sent_by_a_rank(cases: Sequence[Sequence[str]]) -> list[Counter[tuple[str, int]]]:
    """What a step of each case sends that comes right after another one."""
    from fsdp_lab.training import loop

    take, counted = loop.train_step, []
    for words in cases:
        steps, sends = [0], Sends()

        def step(*args: Any, steps: list[int] = steps, sends: Sends = sends, **options: Any) -> Any:
            steps[0] += 1
            if (
                steps[0] != 6
            ):  # after an evaluation, as before the first and the fourth, FSDP2 prefetches a unit too many
                return take(*args, **options)
            with sends:
                return take(*args, **options)

        with mock.patch.object(loop, "train_step", step):
            train_all([[*words]])
        counted.append(sends.seen)
    return counted


def test_the_collectives_are_those_that_ranks_send_in_every_sharding():
    kinds = ["root", "per_block", "per_layer", "size_based sharding.min_num_params=20000", "ddp",
             "per_block sharding.api=fsdp1", "per_block sharding.embeddings=own", "per_block sharding.dp_replicate=2",
             "per_block sharding.tp=2", "per_block sharding.blocks_per_unit=2 precision=bf16_mixed",
             "per_layer activation_checkpointing=full", "per_block training.grad_accum_steps=2"]  # fmt: skip
    cases = [(*LM, "training.global_batch_size=16", *f"sharding={kind}".split()) for kind in kinds]
    for words, seen in zip(cases, run_ranks(2, sent_by_a_rank, cases)[0], strict=True):
        plan = plan_of(*words, "cluster.num_workers=2", "forecast.device=cpu")
        planned = Counter[tuple[str, int]]()
        for one in plan.collectives:
            planned[one.operation, one.bytes] += one.calls
        assert planned == seen, words


def test_a_lock_is_read_as_written_with_a_line_a_unit(tmp_path: Path):
    plan, file = plan_of(*FOUR, "sharding=per_block", "forecast.device=h100_sxm"), tmp_path / "plan.lock.json"
    lock = lock_of([plan], [*FOUR], False)
    write_lock(file, lock)
    assert read_lock(file) == lock and plan.time is not None and plan.time.low_ms < plan.time.ms < plan.time.high_ms
    text = file.read_text()
    write_lock(file, lock_of([plan_of(*FOUR, "sharding=per_block", "forecast.device=h100_sxm")], [*FOUR], False))
    assert file.read_text() == text, "in the same order"
    assert sum('"gathered": ' in line for line in text.splitlines()) == len(plan.units) == 2
    assert sum('"calls": ' in line for line in text.splitlines()) == len(plan.collectives)
    assert changes(lock, lock) == []


LOCKED = ("model=mlp", "sharding=per_layer", "cluster.num_workers=4")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lock."""
    folder = tmp_path_factory.mktemp("locked")
    done = plan_here(folder, *LOCKED, "lock=plan.lock.json")
    assert done.returncode == 0 and done.stdout.endswith("written: plan.lock.json\n"), done.stderr
    return folder


def edited(text: str, **values: Any) -> str:
    return json.dumps(json.loads(text) | values)


@pytest.mark.parametrize(
    ("damage", "words", "message"),
    [
        (None, ["check=none.json"], "none.json: there is no such file; write it with lock=none.json."),
        (lambda text: text[:99], [], "plan.lock.json cannot be read"),
        (lambda text: edited(text, schema=2), [], "plan.lock.json has schema 2 of fsdp_lab"),
        (lambda text: edited(text, fsdp_lab="99.0"), [], "of fsdp_lab 99.0, and this is schema 1 of fsdp_lab"),
        (lambda text: edited(text, plans=[{"setting": ""}]), [], "plan.lock.json is damaged"),
        (lambda text: edited(text, overrides=["modle=mlp"]), [], "check=plan.lock.json: modle is not a key."),
        (None, ["optimizer.foo=1"], "check=plan.lock.json: optimizer.foo is not a key."),
        (None, ["lock=other.json"], "lock=other.json with check=plan.lock.json: a check writes nothing"),
        (None, ["plan.peak=-1%"], "plan.peak=-1% is not a share"),
        (None, ["--tolerance"], "unrecognized arguments: --tolerance; the options are"),
        (None, ["check=", "sharding=per_layer"], "check= is empty;"),
    ],
)  # fmt: skip
def test_a_lock_that_cannot_be_checked_is_refused(
    locked: Path, tmp_path: Path, damage: Any, words: list[str], message: str
):
    file = tmp_path / "plan.lock.json"
    shutil.copy(locked / file.name, file)
    if damage is not None:
        file.write_text(damage(file.read_text()))
    before = file.read_text()
    done = plan_here(tmp_path, *(words if words and "check=" in words[0] else ["check=plan.lock.json", *words]))
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert file.read_text() == before and [*tmp_path.iterdir()] == [file] and not done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=mlp", "lock=a.json"], "lock=a.json needs cluster.num_workers"),
        (["model=mlp", "plan.peak=1%"], "plan.peak=1% has an effect with check=<a lock> only"),
        ([*LOCKED, "lock=/proc/a.json"], "/proc/"),
        (["diff", "a.json"], "diff needs two locks"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path, words: list[str], message: str):
    done = plan_here(tmp_path, *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert [*tmp_path.iterdir()] == []


def test_an_unchanged_plan_passes_and_a_change_within_its_tolerance_too(locked: Path):
    done = plan_here(locked, "check=plan.lock.json")
    assert (done.returncode, done.stdout) == (0, "plan.lock.json: nothing has changed\n")
    (locked / "more.json").write_text((locked / "plan.lock.json").read_text())
    lock = read_lock(locked / "more.json")
    (plan,) = lock.plans
    larger = replace(plan, peaks=[replace(peak, bytes=int(peak.bytes * 1.01)) for peak in plan.peaks])
    write_lock(locked / "more.json", replace(lock, plans=[larger]))
    done = plan_here(locked, "check=more.json")
    assert done.returncode == 3 and "peak" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-2].endswith(": python -m fsdp_lab.plan lock=more.json")
    done = plan_here(locked, "check=more.json", "plan.peak=2%")
    assert (done.returncode, done.stdout) == (0, "more.json: nothing has changed beyond plan.peak=0.02\n")
    write_lock(locked / "more.json", replace(lock, torch="2.0.0", plans=[larger]))
    done = plan_here(locked, "check=more.json")
    assert done.returncode == 3 and "some of this may come from PyTorch: a check with 2.0.0, which" in done.stdout


def test_a_lock_is_written_again_with_its_overrides(locked: Path, tmp_path: Path):
    """And with those that are typed. Else a change that is accepted would make a plan of the default model."""
    shutil.copy(locked / "plan.lock.json", tmp_path)
    before = read_lock(tmp_path / "plan.lock.json")
    done = plan_here(tmp_path, "check=plan.lock.json", "model.num_layers=5", "cluster.num_workers=2")
    (accept,) = re.findall("to accept this.*: python -m fsdp_lab.plan (.*)", done.stdout)
    done = plan_here(tmp_path, *accept.split())
    assert done.returncode == 0, done.stderr
    assert "differs: model.num_layers=5 was not set\ndiffers: cluster.num_workers=2 was 4\n" in done.stdout
    assert "\nmatmul FLOPs in forward: " in done.stdout and done.stdout.endswith("\nwritten: plan.lock.json\n")
    after = read_lock(tmp_path / "plan.lock.json")
    assert {*before.overrides} - {"cluster.num_workers=4"} < {*after.overrides}
    assert plan_here(tmp_path, "check=plan.lock.json").returncode == 0
    done = plan_here(tmp_path, "lock=plan.lock.json", "model.foo=1")
    assert done.returncode == 2 and "lock=plan.lock.json, which has model=mlp sharding=per_layer" in done.stderr


def test_a_merge_that_was_not_finished_is_named(locked: Path, tmp_path: Path):
    text = (locked / "plan.lock.json").read_text()
    file = tmp_path / "plan.lock.json"
    file.write_text(text.replace('"plans"', f"\n<<<<<<< HEAD\n{text[:40]}\n=======\n>>>>>>> other\n" + '"plans"'))
    before = file.read_text()
    for words in (["check=plan.lock.json"], ["lock=plan.lock.json", "cluster.num_workers=8"]):
        done = plan_here(tmp_path, *words)
        assert done.returncode == 2 and "has conflict markers of git; take one side" in done.stderr
    assert file.read_text() == before, "its overrides would be lost"


def lock_by(torch_version: str, plan: StepPlan, *overrides: str) -> Lock:
    return replace(lock_of([plan], [*overrides], False), torch=torch_version)


def test_what_no_sum_shows_is_a_change_too(tmp_path: Path):
    """One unit of two with equal bytes is gathered twice, the other not; another class; another order."""
    plan = plan_of(*FOUR, "sharding=per_layer")
    sent = {(one.phase, one.operation, one.unit): one for one in plan.collectives}
    head, embedding = (sent["forward", "all_gather", unit] for unit in ("head", "embedding"))
    assert head.bytes == embedding.bytes
    swapped = [replace(one, calls=2) if one == head else one for one in plan.collectives if one != embedding]
    (line,) = changes(lock_by("2", plan), lock_by("2", replace(plan, collectives=swapped)))
    assert line.startswith("all_gather in forward: 21 calls, 513 KiB: ")
    assert "head 1 → 2 calls" in line and "embedding 1 → 0 calls" in line
    classes = [replace(plan.units[0], module="Other"), *plan.units[1:]]
    for other, name in ((replace(plan, units=classes), "units"),
                        (replace(plan, collectives=plan.collectives[::-1]), "collectives")):  # fmt: skip
        assert changes(lock_by("2", plan), lock_by("2", other)) == [f"lines of {name} differ, and no sum does"]
        unrelated = TOLERANCES | {"plan.step": 0.5, "plan.flops": 0.5}
        assert changes(lock_by("2", plan), lock_by("2", other), unrelated), "a tolerance hides no other change"


@pytest.mark.parametrize("figure", ["NaN", "Infinity", "-1", "1" + "0" * 400])
def test_a_figure_that_is_none_is_refused(figure: str, tmp_path: Path):
    write_lock(tmp_path / "a.json", lock_by("2", plan_of(*LOCKED)))
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(re.sub(r'"gathered": \d+', f'"gathered": {figure}', text, count=1))
    with pytest.raises(UserError, match="is damaged"):
        read_lock(tmp_path / "a.json")


def test_a_unit_that_is_there_twice_is_refused(tmp_path: Path):
    plan = plan_of(*LOCKED)
    write_lock(tmp_path / "a.json", lock_by("2", replace(plan, units=[*plan.units, plan.units[0]])))
    with pytest.raises(UserError, match="is there twice"):
        read_lock(tmp_path / "a.json")


def check(folder: Path, made: Sequence[str], changed: Sequence[str]) -> list[str]:
    """Write a lock, check it with other words, and return what is said to have changed, the largest first."""
    assert plan_here(folder, *made, "lock=plan.lock.json").returncode == 0
    done = plan_here(folder, "check=plan.lock.json", *changed)
    assert done.returncode == 3, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines()[:-1] if not line.startswith("differs: ")]


def test_an_untied_vocabulary_in_the_root_is_named_as_the_cause_of_a_peak(tmp_path: Path):
    """Embedding and head have 248,320 x 64 parameters each, which the root's reduction holds in float32 at the end."""
    made = [*LM, "data.vocab_size=248320", "model.vocab_size=248320", "data.seq_len=8", "training.global_batch_size=4",
            "cluster.num_workers=4", "precision=bf16_mixed", "sharding.embeddings=own"]  # fmt: skip
    first = check(tmp_path, made, ["sharding.embeddings=root"])[0]
    more = 248320 * 64 * 4 / 2**20
    assert first.startswith("peak 197 → 273 MiB: ")
    cause = f"reduce_scatter +{more:.1f} MiB at the end of backward, unit <root> (embedding.weight, head.weight)"
    assert first.partition("; all else ")[0].endswith(cause)


def test_children_of_checkpointed_blocks_that_became_units_are_named(tmp_path: Path):
    made = [*FOUR, "sharding=per_block", "activation_checkpointing=full"]
    lines = check(tmp_path, made, ["sharding=per_layer"])
    (became,) = (line for line in lines if line.startswith("units: blocks.*"))
    assert became.startswith("units: blocks.* (2 of 192 KiB) became blocks.*.attention_norm (2 of 256 bytes), ")
    (again,) = (line for line in lines if line.startswith("all_gather in backward"))
    assert again.startswith("all_gather in backward: 2 → 21 calls, ") and "blocks.* 2 → 0 calls" in again


def test_a_head_that_is_gathered_for_each_chunk_of_the_loss_is_named(tmp_path: Path):
    """Its 256 x 64 parameters in float32, in the place of one of four times, forwards and backwards."""
    lines = check(tmp_path, [*FOUR, "sharding=per_layer"], ["task.loss_chunks=4"])
    for phase in ("forward", "backward"):
        (line,) = (line for line in lines if line.startswith(f"all_gather in {phase}: "))
        assert line.endswith(": head 1 → 4 calls")


def test_blocks_that_share_a_unit_and_what_is_kept_of_them_are_named(tmp_path: Path):
    made = [*FOUR, "model.num_layers=4", "sharding=per_block", "reshard_after_forward=always"]
    lines = check(tmp_path, made, ["sharding.blocks_per_unit=2"])
    assert "units: blocks.* (4 of 192 KiB) became blocks.*, blocks.* (2 of 385 KiB)" in lines
    (again,) = (line for line in lines if line.startswith("all_gather in backward"))
    assert again.startswith("all_gather in backward: 5 → 3 calls, 898 KiB: blocks.* 4 → 0 calls")
    lines = check(tmp_path, [*made, "sharding.blocks_per_unit=2"], ["reshard_after_forward=never"])
    (again,) = (line for line in lines if line.startswith("all_gather in backward"))
    assert "blocks.*, blocks.* 2 → 0 calls" in again and "<root> 1 → 0 calls" in again
    (peak,) = (line for line in lines if line.startswith("peak "))
    assert "activation +577 KiB (blocks.*.ffn +192 KiB, " in peak and ") and unsharded_param +" in peak


def test_another_type_is_named_with_what_it_was(tmp_path: Path):
    lines = check(tmp_path, [*FOUR, "sharding=per_block", "precision=bf16_mixed"], ["precision=fp32"])
    assert "gathered bytes of blocks.*: 96.2 → 192 KiB (float32 was bfloat16)" in lines
    sizes = ["peak", "all_gather in forward", "all_gather in backward"]
    assert [next(size for size in sizes if line.startswith(size)) for line in lines[:2]] == sizes[:2]


BLOCKS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(4)), nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))
"""
INIT = "range(4)), nn.Linear(width, 10)"


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (INIT, f"{INIT}\n        self.blocks[0].requires_grad_(False)",
         "blocks.*: 2,048 → 1,536 of 2,048 parameters are trained"),
        ("self.down(torch.relu(self.up(x)))",
         "nn.functional.linear(torch.relu(self.up(x)).float(), self.down.weight.float()).to(x)",
         "matmul in forward: 49.8 % of its FLOPs are float32, 0 % were (now blocks.*)"),
        ("torch.relu(self.up(x))", "torch.relu(self.up(x).float()).to(x)", "activation +28.0 KiB (blocks.* +28.0 KiB)"),
        (INIT, f"{INIT}\n        self.register_buffer('mask', torch.zeros(1024, 1024))", "buffer +4.00 MiB"),
    ],
)  # fmt: skip
def test_what_a_colleague_edits_in_a_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, named: str
):
    """A frozen block has 2 x 16 x 16 parameters. In float32: 4 of 8 products of 16 rows and 16 x 16, and a head.

    A ReLU in float32 saves 8 KiB more a block (8 x 16 x 16 x 4 bytes), and the last one's copy in bfloat16 is free.
    """
    monkeypatch.delitem(sys.modules, "net", raising=False)
    (tmp_path / "net.py").write_text(BLOCKS)
    own = ["model._target_=net.Net", "data._target_=tests.forecast.models.Rows", "task=classification",
           "cluster.num_workers=2", "training.global_batch_size=16", "precision=bf16_mixed",
           "sharding=per_block"]  # fmt: skip
    assert (done := plan_here(tmp_path, *own, "lock=plan.lock.json")).returncode == 0, done.stderr
    assert BLOCKS.count(before) == 1
    (tmp_path / "net.py").write_text(BLOCKS.replace(before, after))
    monkeypatch.delitem(sys.modules, "net")
    done = plan_here(tmp_path, "check=plan.lock.json")
    assert done.returncode == 3 and named in done.stdout, done.stdout + done.stderr


def test_recomputed_arithmetic_is_named(tmp_path: Path):
    lines = check(tmp_path, [*FOUR, "sharding=per_block"], ["activation_checkpointing=full"])
    (line,) = (line for line in lines if line.startswith("matmul FLOPs in backward: "))
    assert line.endswith(": parts of the forward pass are computed again, or more is trained")


def test_locks_of_two_versions_are_compared_in_a_terminal_and_as_markdown(tmp_path: Path):
    plan = plan_of(*LOCKED)
    more = replace(plan, categories=[*plan.categories, Part("device", "other", plan.peaks[0].bytes, "head")],
                   peaks=[replace(plan.peaks[0], bytes=2 * plan.peaks[0].bytes), *plan.peaks[1:]])  # fmt: skip
    locks = lock_by("2.14.0", plan, "model=mlp"), lock_by("2.15.0", more, "model=mlp", "precision=fp32")
    for name, lock in zip("ab", locks, strict=True):
        write_lock(tmp_path / f"{name}.json", lock)
    done = plan_here(tmp_path, "diff", "a.json", "b.json")
    assert done.returncode == 0 and "differs: torch=2.15.0 was 2.14.0\n" in done.stdout
    assert "other +" in done.stdout and ", unit head (head.weight, head.bias)" in done.stdout
    assert "+100 %" in next(line for line in done.stdout.splitlines() if line.startswith("peak "))
    text = markdown(["a.json", "b.json"], *locks)
    assert plan_here(tmp_path, "diff", "a.json", "b.json", "--markdown").stdout == f"{text}\n"
    head, because, table = text.split("\n\n")[:3]
    of = "predicted for one of 4 ranks with `model=mlp precision=fp32`"
    assert head == f"**Plan of a step**, {of}: `a.json` → `b.json`"
    assert because == "`precision=fp32 was not set`; `torch=2.15.0 was 2.14.0`"
    assert {line.count("|") for line in table.splitlines()} == {5}


@pytest.mark.ci
def test_a_grid_is_one_file_of_which_a_setting_is_named(tmp_path: Path):
    grid = ["-m", "model=mlp", "sharding=per_block,ddp", "precision=fp32", "offload=none",
            "reshard_after_forward=always", "cluster.num_workers=2"]  # fmt: skip
    done = plan_here(tmp_path, *grid, "lock=plan.lock.json")
    assert done.returncode == 0, done.stderr
    assert [plan.setting for plan in read_lock(tmp_path / "plan.lock.json").plans] == [
        "sharding=per_block",
        "sharding=ddp",
    ]
    done = plan_here(tmp_path, "check=plan.lock.json", "training.global_batch_size=128")
    assert done.returncode == 3 and all(f"sharding={kind}: peak " in done.stdout for kind in ("per_block", "ddp"))


def test_a_model_of_the_users_own():
    own = ["model._target_=tests.forecast.models.Mean", "data._target_=tests.forecast.models.Rows",
           "task=classification", "cluster.num_workers=2", "training.global_batch_size=16"]  # fmt: skip
    plan = plan_of(*own, "sharding=per_layer", "model=custom", "data=custom")
    assert [(unit.unit, unit.parameters) for unit in plan.units[:2]] == [
        ("embed", 16 * 64 + 64),
        ("head", 64 * 10 + 10),
    ]


@pytest.mark.ci
def test_a_compiled_step_sends_what_an_eager_one_does():
    eager, compiled = (plan_of(*FOUR, "sharding=per_block", f"compile={c}") for c in ("false", "true"))
    assert eager.units == compiled.units and eager.collectives == compiled.collectives


@pytest.mark.ci
def test_a_model_of_transformers_by_its_config(tmp_path: Path):
    plain_model("llama").save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    words = [
        "task=language",
        "model=hf_causal_lm",
        f"model.config={tmp_path}/llama",
        "data.seq_len=16",
        "cluster.num_workers=2",
    ]
    done = plan_here(tmp_path, *words, "lock=plan.lock.json")
    assert done.returncode == 0, done.stderr
    units = {unit.unit for unit in read_lock(tmp_path / "plan.lock.json").plans[0].units}
    assert "model.layers.*" in units and "<root>" in units


def test_the_command_in_a_process_of_its_own(locked: Path):
    done = forked.run(locked, "fsdp_lab.plan", "check=plan.lock.json", "precision=bf16_mixed", seconds=200)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("differs: precision=bf16_mixed was not set\n")
    assert done.stdout.endswith("plan.lock.json: changed\n") and not done.stderr


@pytest.mark.ci
@pytest.mark.documents(
    "python -m fsdp_lab.plan model=llama3_8b ... lock=plan.lock.json",
    "python -m fsdp_lab.plan check=plan.lock.json",
    "python -m fsdp_lab.plan check=plan.lock.json sharding.embeddings=root",
    "python -m fsdp_lab.plan diff old.lock.json plan.lock.json",
    "python -m fsdp_lab.plan diff old.lock.json plan.lock.json --markdown",
)
def test_the_page_shows_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs/plan.md").read_text()
    writes = re.search(
        r"^python -m fsdp_lab\.plan (model=.* lock=plan.lock.json)$", page.replace("\\\n", ""), re.MULTILINE
    )
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    monkeypatch.setenv("COLUMNS", "100")
    assert writes is not None
    made = plan_here(tmp_path, *writes[1].split())
    checked = plan_here(tmp_path, "check=plan.lock.json")
    changed = plan_here(tmp_path, "check=plan.lock.json", "sharding.embeddings=root")
    assert [done.returncode for done in (made, checked, changed)] == [0, 0, 3]
    for text, done in zip(shown, (made, changed), strict=True):
        lines = [".*" if line == "..." else re.escape(line.rstrip()) + " *\n" for line in text.splitlines()]
        assert re.search("".join(lines), done.stdout, re.DOTALL), done.stdout
    shutil.copy(tmp_path / "plan.lock.json", tmp_path / "old.lock.json")
    for more, end in ((["--markdown"], "Nothing has changed.\n"), ([], "plan.lock.json: nothing has changed\n")):
        done = plan_here(tmp_path, "diff", "old.lock.json", "plan.lock.json", *more)
        assert done.returncode == 0 and done.stdout.endswith(end)
