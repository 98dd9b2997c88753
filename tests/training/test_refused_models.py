"""Models that cannot be sharded, or compute something else when they are, are refused with the names of what to change:
on `meta`, under fake tensors, and in the first steps. What the others learn: `test_parity.py`."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_lab.config import ModelError, UserError
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training import unit_hooks
from fsdp_lab.training.blocks import find_block_classes
from fsdp_lab.training.parallelize import in_groups, sharding_units
from fsdp_lab.training.shardable import check_parameters
from fsdp_lab.training.step_checks import FIRST_STEPS
from fsdp_lab.training.unit_hooks import call_by_methods, tensors_inside
from fsdp_lab.workloads.construct import Blueprint
from tests.ranks import config, run_ranks, train_all
from tests.training.reference import apart
from tests.workloads.user import unusual
from tests.workloads.user.odd import VOCABULARY, WIDTH, Rows, loss

__all__ = ["Rows", "loss"]  # named in the commands below
BLOCK, ROOT, LAYER = "sharding=per_block", "sharding=root", "sharding=per_layer"

# On meta.
COMPLEX = "the parameter blocks.0.inner.filter is complex64: .*optimizer=sgd precision=fp32.*view_as_real"
UNSHARDABLE = [
    *((unusual.scalar, words, "the parameter blocks.0.inner.scale is a scalar, .*x.reshape(1).*sharding=ddp")
      for words in (ROOT, BLOCK, LAYER, f"{BLOCK} sharding.blocks_per_unit=2")),
    (unusual.SparseGradient, ROOT, "table (Embedding) has sparse=True.*sparse=False"),
    (unusual.two_dtypes, BLOCK, "blocks.2.inner.scale is bfloat16 and blocks.2.inner.inner.weight is float32.*unit, "
     "here blocks.2,.*per_layer"),
    (unusual.two_dtypes, ROOT, "blocks.2.inner.scale is bfloat16.*here the root"),
    (unusual.complex_filters, f"{BLOCK} optimizer=sgd", "filter is complex64 and .*unit, here blocks.0"),
    (unusual.complex_filters, f"{LAYER} optimizer=adam", COMPLEX),
    (unusual.complex_filters, "sharding=ddp precision=grad_bf16", COMPLEX),
    (unusual.complex_filters, "sharding=ddp optimizer.implementation=fused", COMPLEX),
    (unusual.in_float64, f"{ROOT} precision=bf16_mixed", "first.weight is float64.*precision=fp32"),
    (unusual.scalar, "sharding=ddp", ""),
    (unusual.SparseGradient, "sharding=ddp", ""),
    (unusual.two_dtypes, LAYER, ""),
    (unusual.frozen_bfloat16, BLOCK, ""),
    (unusual.whole_numbers, f"{BLOCK} precision=bf16", ""),
    (unusual.in_float64, "sharding=ddp precision=bf16_mixed", ""),
    (unusual.complex_filters, f"{LAYER} optimizer=sgd", ""),
]  # fmt: skip


@pytest.mark.parametrize(("build", "words", "expected"), UNSHARDABLE)
def test_what_cannot_be_sharded_is_refused_by_its_name(build: Any, words: str, expected: str) -> None:
    """Where no message is expected, it can be sharded."""
    trial, model, said = config(*words.split()), Blueprint(build, seed=0).model, ""
    groups: list[list[nn.Module]] = []
    if "sharding=ddp" not in words:
        units = sharding_units(model, find_block_classes(model), trial.sharding)
        groups = in_groups(model, units, trial.sharding.blocks_per_unit)
    try:
        check_parameters(model, groups, trial)
    except ModelError as error:
        said = str(error)
    pattern = ".*".join(re.escape(part) for part in expected.split(".*"))
    assert re.search(pattern, said) if expected else not said, said


# By the hooks of units, under fake tensors.
HERE = unusual.__name__
ALWAYS = f"{BLOCK} reshard_after_forward=always"
LOST = {
    f"methods {ALWAYS}": r"sharding=per_block: a weight of a unit is used outside of it "
    r"\(.*unusual\.py:\d+: return .*\).*model\.forward_methods=\[",
    f"methods {ALWAYS} activation_checkpointing=full": r"outside of it .*unusual\.py:\d+: .*forward_methods",
    f"UsesWeight {ALWAYS}": r"a weight of a unit is used outside .*self\.blocks\[1\]\.inner\.weight",
    f"only_weights {LAYER}": r"a weight of a unit is used outside .*self\.layer\.weight.*such as root",
    f"keeps model.of_weight=true {ALWAYS}": r"blocks\.0 keeps in kept a view of its parameter inner\.weight.*clone",
    f"collects {ALWAYS}": r"blocks\.0 changes a list that it gets, of which FSDP2 hands it a copy.*sharding=root",
    f"ReturnsWeight task.loss={HERE}.loss_of_weight {ALWAYS}": r"ReturnsWeight returns a view of .* first\.weight",
    f"methods {ALWAYS} model.forward_methods=[encod]": r"model\.forward_methods=\[encod\]: no module",
    # what cannot be sharded, by a step of the trial
    f"scalar {BLOCK}": r"blocks\.0\.inner\.scale is a scalar",
    "complex_filters sharding=ddp precision=grad_bf16": r"filter is complex64",
}
# What tensors without values do not show.
LOST_IN_TRAINING = {
    f"returns model.what=function {ALWAYS}": r"reshard_after_forward=always: a tensor of a unit "
    r"is used after its parameters were freed.*reshard_after_forward=never",
    f"float32_buffer {ALWAYS} precision=bf16_mixed": r"param_dtype=bfloat16: .* in blocks\.0\.inner\.inner \(Linear\).*"
    r"buffer\.to\(x\.dtype\)",
}


def unusual_words(case: str) -> list[str]:
    model, *words = case.split()
    return [f"model._target_={HERE}.{model}", f"data._target_={HERE}.Rows", f"task.loss={HERE}.loss", *words]


@pytest.mark.parametrize("case", LOST)
def test_what_fsdp2_would_lose_is_refused_by_name(case: str) -> None:
    with pytest.raises(ModelError) as error:
        forecast_profile(config(*unusual_words(case)), 2, cuda=False)
    assert re.search(LOST[case], str(error.value)), error.value


def refusals(cases: list[list[str]]) -> list[str]:
    """Of each case the message and the step on this rank; in one process group, since ranks end together."""
    found = []
    for case in cases:
        try:
            train_all([case])
            found.append("")
        except UserError as error:
            found.append(f"{error} {getattr(error, '__notes__', '')}")
    return found


def test_what_is_found_in_the_first_step_is_named_too() -> None:
    ends = run_ranks(1, refusals, [unusual_words(case) for case in LOST_IN_TRAINING])[0]
    for case, end in zip(LOST_IN_TRAINING, ends, strict=True):
        assert re.search(LOST_IN_TRAINING[case], end), f"{case}: {end}"


def test_a_weight_that_the_root_keeps_may_be_returned() -> None:
    model = f"ReturnsWeight task.loss={HERE}.loss_of_weight"
    cases = [unusual_words(f"{model} {sharding}") for sharding in ("sharding=ddp", ROOT, BLOCK)]
    ddp, *sharded = (losses for losses, _ in run_ranks(2, train_all, cases)[0])
    assert all(apart(losses, ddp) <= 1e-5 for losses in sharded)


class KeepsLater(nn.Linear):
    """Keeps its output from a pass on, and counts how often its modules are gone through."""

    searched, passes, kept = 0, 0, None

    def __init__(self, since: int) -> None:
        super().__init__(2, 2)
        self.since = since

    def modules(self) -> Iterator[nn.Module]:
        self.searched += 1
        return super().modules()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        out = super().forward(x)
        self.kept = out if self.passes >= self.since else None
        return out.clone()


@pytest.mark.parametrize("since", [1, 9])
def test_what_a_unit_keeps_is_looked_for_in_two_passes(monkeypatch: pytest.MonkeyPatch, since: int) -> None:
    hooked: list[Tensor] = []
    monkeypatch.setattr(unit_hooks, "gather_before_gradient_of", lambda tensor, module: hooked.append(tensor))
    unit = KeepsLater(since)
    unit_hooks.UnitHooks(unit, "unit", config())
    for number in range(1, 5):
        hooked.clear()
        unit(torch.ones(1, 2))
        assert unit.searched == min(number, 2)
        assert any(tensor is unit.kept for tensor in hooked) == (number >= since)


def test_tensors_are_found_in_any_object_once() -> None:
    tensor, loop = torch.ones(1), unusual.Result(torch.ones(2))
    loop.again = loop
    nested: Any = {"a": [unusual.Result(UserDict(x=tensor)), (unusual.Named(tensor), {})], "b": loop}
    found = list(tensors_inside([nested, "text", None, nn.Linear(1, 1), lambda: tensor]))
    assert [each.shape[0] for each in found] == [1, 2] and found[0] is tensor


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hooks = 0
        self.register_forward_hook(lambda *_: setattr(self, "hooks", self.hooks + 1))

    def encode(self, x: Tensor, by: int) -> Tensor:
        return x * by

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x, by=3)


def test_a_method_runs_the_hooks_once_and_not_inside_of_forward() -> None:
    module = Counts()
    call_by_methods(module, ["encode", "decode"])
    assert module.encode(torch.ones(1), by=2).item() == 2 and module.hooks == 1
    assert module(torch.ones(1)).item() == 3 and module.hooks == 2
    assert not hasattr(module, "decode")


# In the steps of a trial.
class Block(nn.Module):
    """Two layers, of which a kind of block uses one on a rank, writes to one, or unfreezes one after five calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.calls = kind, 0
        self.first.requires_grad_(kind != "unfreezes")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.changed(x))

    def changed(self, x: Tensor) -> Tensor:
        # in step 5 alone the gradients are of the same size, so the reductions do not differ
        if self.kind == "gated" or (self.kind == "gated once" and self.calls == 5):
            return self.first(x) if dist.get_rank() else self.second(x)
        if self.kind == "uneven" and dist.get_rank():
            return self.first(x)
        if self.kind == "writes":
            with torch.no_grad():
                self.first.weight.mul_(0.9)
        if self.kind == "unfreezes" and self.calls > 5:
            self.first.bias.requires_grad_(True)
        return self.second(self.first(x))


class Model(nn.Module):
    """Three blocks. From a step on, or only in an evaluation, each rank may use one of two ("experts"), or fewer.

    "frozen" is allowed: a block that is frozen later, and a teacher whose shards are written."""

    def __init__(self, kind: str, since: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.kind, self.since, self.steps = kind, since, 0
        if kind == "unfreezes blocks":
            self.blocks.requires_grad_(False)
        if kind == "frozen":
            self.teacher = Block("").requires_grad_(False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += self.training
        x = self.hidden(self.embedding(tokens))
        return self.head(x), x

    def hidden(self, x: Tensor) -> Tensor:
        if self.kind == "experts":
            differs = not self.training if self.since is None else self.steps >= self.since
            return self.blocks[2](self.blocks[dist.get_rank() if differs else 0](x))
        if self.kind == "unfreezes blocks" and self.steps > 5:
            self.blocks.requires_grad_(True)
        if self.kind == "frozen":
            self.blocks[0].requires_grad_(self.steps <= 5)
            with torch.no_grad():
                for mine, other in zip(self.teacher.parameters(), self.blocks[1].parameters(), strict=True):
                    mine.lerp_(other, 0.5)
            x = x + self.teacher(x)
        for block in self.blocks[: 3 - dist.get_rank() if self.kind == "dropped" else 3]:
            x = block(x)
        return x


class Forces(Model):
    """Takes the gradient of a block inside of its forward pass; its embedding has sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__("")
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)

    def hidden(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_(True)
            (force,) = torch.autograd.grad(super().hidden(at).pow(2).sum(), at, create_graph=True)
        return super().hidden(x - 0.1 * force)


DATA = (f"data._target_={__name__}.Rows", f"task.loss={__name__}.loss", "data.num_train=64", "data.num_val=8",
        "training.global_batch_size=4", "training.epochs=2")  # fmt: skip


def words(kind: str, *more: str) -> list[str]:
    return [f"model._target_={__name__}.Model", f"model.kind={kind}", *DATA, *more]


GRADIENT, WRITTEN = (
    r"blocks\.0\.first\.weight has a gradient on rank 1",
    r"blocks\.0\.first\.weight was written in a forward",
)
UNFROZEN = r"blocks\.0\.first\.(bias|weight) requires a gradient by step 6,.*checkpoint\.resume_from"
REFUSED: list[tuple[list[str], str]] = [
    (words("experts", "model.since=1", BLOCK),
     r"step 1 rank 0 gathers the weights of blocks\.0, and rank 1 gathers the weights of blocks\.1"),
    (words("experts", "model.since=5", BLOCK, "memory_profile=peaks"),
     r"up to step 10 rank 0 gathers the weights of blocks\.[01] \d+ times and rank 1 \d+ times.*use sharding=ddp"),
    (words("experts", BLOCK), r"step 16 rank 0 gathers .* blocks\.0, and rank 1 .* blocks\.1"),
    (words("dropped", BLOCK), r"step 1 rank 0 gathers the weights of blocks\.2, and rank 1 has ended its forward pass"),
    (words("gated", ROOT, "training.grad_accum_steps=2"), GRADIENT),
    (words("gated once", BLOCK), f"{GRADIENT} and none on rank 0"),
    (words("uneven", BLOCK), r"rank 0 reduces 144 gradients of blocks\.2, and rank 1 reduces 72 gradients of"),
    (words("writes", BLOCK, "reshard_after_forward=never"), WRITTEN),
    (words("writes", ROOT, "memory_profile=peaks"), WRITTEN),
    (words("writes", BLOCK, "activation_checkpointing=full", "precision=bf16"), WRITTEN),
    (words("unfreezes", "sharding=ddp"), UNFROZEN),
    (words("unfreezes blocks", BLOCK), UNFROZEN),
]  # fmt: skip


def test_what_computes_something_else_is_refused_by_its_name() -> None:
    for of_rank in run_ranks(2, refusals, [case for case, _ in REFUSED]):
        for (case, expected), message in zip(REFUSED, of_rank, strict=True):
            assert re.search(expected, message), f"{case}: {message}"


def test_what_is_kept_is_not_refused() -> None:
    """DDP keeps writes and lets ranks differ; FSDP2 allows to freeze, and to write shards."""
    of_ddp = [words(model, "sharding=ddp") for model in ("writes", "dropped", "gated")]
    cases = [*of_ddp, words("frozen", BLOCK)]
    assert run_ranks(2, refusals, cases) == [[""] * len(cases)] * 2


def test_all_settings_are_timed_over_the_same_steps() -> None:
    cases = [["model=mlp", "training.timing_warmup_steps=0", sharding] for sharding in ("sharding=ddp", BLOCK, ROOT)]
    trained = run_ranks(2, train_all, cases)[0]
    assert [epochs[-1]["perf/timed_steps"] for _, epochs in trained] == [4 - FIRST_STEPS] * 3


def test_gradients_in_a_forward_pass_and_sparse_ones_are_followed() -> None:
    """The tracker failed each of these trials; with it they learn what they learn without."""
    sgd = ("optimizer=sgd", "optimizer.weight_decay=0", "optimizer.lr=0.05", "training.max_steps=3")
    forces = [f"model._target_={__name__}.Forces", *DATA, *sgd]
    settings = (["model.sparse=true", "sharding=ddp"], ["model.sparse=false", ROOT])
    cases = [[*forces, *setting, f"memory_profile={each}"] for setting in settings for each in ("off", "peaks")]
    plain_ddp, ddp, plain_root, root = run_ranks(2, train_all, cases)[0]
    for plain, tracked in ((plain_ddp, ddp), (plain_root, root)):
        assert plain[0] == tracked[0]
        assert tracked[1][-1]["memory/peak_bytes"] > 0
