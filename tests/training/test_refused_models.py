"""Models that cannot be sharded, or compute something else when they are, are refused with the names of what to change:
on `meta`, under fake tensors, and in the first steps. What the others learn: `test_parity.py`."""

from __future__ import annotations

import random
import re
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_lab.config import ModelError, UserError
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.blocks import call_by_methods
from fsdp_lab.training.parallel import fsdp2
from fsdp_lab.training.parallel.sharded import tensors_inside
from fsdp_lab.training.parallel.tensor import apply_tensor_parallel
from fsdp_lab.training.step_checks import FIRST_STEPS
from fsdp_lab.workloads.examples.language.llama import Llama
from tests.ranks import config, run_ranks, train_all
from tests.training.reference import apart
from tests.workloads.user import unusual
from tests.workloads.user.odd import VOCABULARY, WIDTH, Rows, loss

__all__ = ["Rows", "loss"]  # named in the commands below
BLOCK, ROOT, LAYER, DDP = "sharding=per_block", "sharding=root", "sharding=per_layer", "sharding=ddp"
ALWAYS = f"{BLOCK} reshard_after_forward=always"
HERE = unusual.__name__

HEADS = 'model.tp_plan={"blocks.*.inner.query":colwise,"blocks.*.inner.out":rowwise}'
INNER = 'sharding.tp=2 model.tp_plan={"blocks.*.inner":colwise_gathered}'
LONE = 'sharding.tp=2 model.tp_plan={"blocks.*.inner":colwise}'
MISSPELT = 'sharding.tp=2 model.tp_plan={"blocks.*.iner":colwise}'
NORM = 'sharding.tp=2 model.tp_plan={"blocks.*":sequence}'
COMPLEX = r"parameter blocks\.0\.inner\.filter is complex64: .*optimizer=sgd precision=fp32.*view_as_real"
# A model of `unusual.py` and a setting: what a forecast of it says.
UNSHARDABLE = {
    f"scalar {BLOCK}": r"blocks\.0\.inner\.scale is a scalar, .*x\.reshape\(1\).*sharding=ddp",
    f"SparseGradient {ROOT}": r"table \(Embedding\) has sparse=True.*sparse=False",
    f"two_dtypes {BLOCK}": r"blocks\.2\.inner\.scale is bfloat16 and blocks\.2\.inner\.inner\.weight is float32.*unit, "
    r"here blocks\.2,.*per_layer",
    f"two_dtypes {ROOT}": r"blocks\.2\.inner\.scale is bfloat16.*here the root",
    f"complex_filters {LAYER} optimizer=adam": COMPLEX,
    f"complex_filters {DDP} precision=grad_bf16": COMPLEX,
    f"complex_filters {DDP} optimizer.implementation=fused": COMPLEX,
    f"complex_filters {DDP} precision=bf16_pure": r"blocks\.0\.inner\.filter is complex, and has no such type.*view_as",
    f"in_float64 {ROOT} precision=bf16_mixed": r"first\.weight is float64.*precision=fp32",
    # by the hooks of units
    f"methods {ALWAYS}": r"sharding=per_block: a weight of a unit is used outside of it "
    r"\(.*unusual\.py:\d+: return .*\).*model\.forward_methods=\[",
    f"methods {ALWAYS} activation_checkpointing=full": r"outside of it .*unusual\.py:\d+: .*forward_methods",
    f"UsesWeight {ALWAYS}": r"a weight of a unit is used outside .*self\.blocks\[1\]\.inner\.weight",
    f"UsesWeight {LAYER}": r"a weight of a unit is used outside .*, here blocks\.1\.inner\.weight, .*such as root",
    f"UsesWeight {BLOCK} sharding.api=fsdp1": r"fsdp1: blocks\.1\.inner\.weight is used outside of its unit \(.*unu",
    f"UsesWeight {ALWAYS} {INNER}": r"sharding\.tp=2: a tensor that is divided .* whole one .*\.inner\.weight.*plan",
    f"UsesWeight {BLOCK} {LONE}": r"sharding\.tp=2: .*broadcast.*name both layers in model\.tp_plan, and",
    f"UsesWeight {BLOCK} {MISSPELT}": r"has no module of that name\. Did you mean blocks\.\*\.inner\?",
    f"UsesWeight {BLOCK} {NORM}": r"has blocks\.0: sequence, but that is a \w+; sequence is for norms, whose class has",
    f"normed_weights {BLOCK} {LONE}": r"blocks\.0\.inner: colwise, but this \w+ computes its weight or bias from other",
    f"keeps model.of_weight=true {ALWAYS}": r"blocks\.0 keeps in kept a view of its parameter inner\.weight.*clone",
    f"collects {ALWAYS}": r"blocks\.0 changes a list that it gets, of which FSDP2 hands it a copy.*sharding=root",
    f"collects {BLOCK} sharding.api=fsdp1 precision=bf16_mixed": r"blocks\.0 changes a list .* FSDP1 hands it a copy",
    f"ReturnsWeight task.loss={HERE}.loss_of_weight {ALWAYS}": r"ReturnsWeight returns a view of .* first\.weight",
    f"methods {ALWAYS} model.forward_methods=[encod]": r"model\.forward_methods=\[encod\]: no module",
}
ALLOWED = (
    f"generators {BLOCK} activation_checkpointing=full",
    f"scalar {DDP}",
    f"two_dtypes {LAYER}",
    f"whole_numbers {BLOCK} precision=bf16",
)


def unusual_words(case: str) -> list[str]:
    model, *words = case.split()
    return [f"model._target_={HERE}.{model}", f"data._target_={HERE}.Rows", f"task.loss={HERE}.loss", *words]


@pytest.mark.parametrize("case", UNSHARDABLE)
def test_what_cannot_be_sharded_is_refused_by_its_name(case: str) -> None:
    with pytest.raises(ModelError, match=UNSHARDABLE[case]):
        forecast_profile(config(*unusual_words(case)), 2, cuda=False)


@pytest.mark.parametrize("case", ALLOWED)
def test_what_can_be_sharded_is_not_refused(case: str) -> None:
    forecast_profile(config(*unusual_words(case)), 2, cuda=False)


def test_a_weight_that_the_root_keeps_may_be_returned() -> None:
    model = f"ReturnsWeight task.loss={HERE}.loss_of_weight"
    cases = [unusual_words(f"{model} {sharding}") for sharding in (DDP, ROOT, BLOCK)]
    ddp, *sharded = (losses for losses, _ in run_ranks(2, train_all, cases)[0])
    assert all(apart(losses, ddp) <= 1e-5 for losses in sharded)


class Shortens(Llama):
    """It gets one token more than its layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens[:, :-1])


def lengths() -> list[str]:
    model = Shortens(vocab_size=8, dim=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=8)
    apply_tensor_parallel(model, Llama._tp_plan, init_device_mesh("cpu", (2,)))
    found = []
    for length in (9, 8):
        try:
            model(torch.zeros(1, length, dtype=torch.long))
        except ModelError as error:
            found.append(str(error))
    return found


@pytest.mark.ci
def test_a_sequence_that_ranks_cannot_share_equally_is_refused() -> None:
    """Eight tokens of nine are shared, seven of eight are not."""
    for (found,) in run_ranks(2, lengths):
        assert found.startswith("sharding.tp=2 does not divide the 7 positions that embedding gets, and the plan")


def test_what_a_unit_keeps_is_looked_for_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "gather_before_gradient_of", lambda tensor, module: None)
    unit, searched = nn.Linear(2, 2), list[nn.Module]()
    fsdp2.UnitHooks(unit, "unit", config())
    monkeypatch.setattr(unit, "modules", lambda: searched.append(unit) or [unit])
    for count in (1, 2, 2, 2):
        unit(torch.ones(1, 2))
        assert len(searched) == count


def test_tensors_are_found_in_any_object_once() -> None:
    tensor, loop = torch.ones(1), unusual.Result(torch.ones(2))
    loop.again = loop
    nested: Any = {"a": [unusual.Result(UserDict(x=tensor)), (tensor, {})], "b": loop}
    found = list(tensors_inside([nested, "text", None, nn.Linear(1, 1), lambda: tensor]))
    assert [each.shape[0] for each in found] == [1, 2] and found[0] is tensor


def test_a_method_runs_the_hooks_once_and_not_inside_of_forward() -> None:
    module, calls = unusual.Encodes(), []
    module.register_forward_hook(lambda *_: calls.append(1))
    call_by_methods(module, ["encode", "decode"])
    x = torch.ones(1, WIDTH)
    encoded = module.encode(x)
    assert len(calls) == 1
    assert torch.equal(module(x), encoded) and len(calls) == 2
    assert not hasattr(module, "decode")


# In the steps of a trial.
class Block(nn.Module):
    """Two layers, of which a kind of block uses one on a rank, or writes to one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.kind == "writes":
            with torch.no_grad():
                self.first.weight.mul_(0.9)
        return x + torch.tanh(self.used(x))

    def used(self, x: Tensor) -> Tensor:
        # in step 5 alone the gradients are of the same size, so the reductions do not differ
        if self.kind == "gated" or (self.kind == "gated once" and self.calls == 5):
            return self.first(x) if dist.get_rank() else self.second(x)
        if self.kind == "uneven" and dist.get_rank():
            return self.first(x)
        return self.second(self.first(x))


class Model(nn.Module):
    """Three blocks. From a step on, or only in an evaluation, each rank may use one of two ("experts"), or fewer.

    "frozen" is allowed: a block that is frozen later, and a teacher whose shards are written."""

    def __init__(
        self, kind: str, since: int | None = None, sparse: bool = False, max_norm: float | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse, max_norm=max_norm)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3)).requires_grad_(kind != "unfreezes")
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.kind, self.since, self.steps = kind, since, 0
        if kind == "frozen":
            self.teacher = Block("").requires_grad_(False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += self.training
        x = self.embedding(tokens)
        x = self.forced(x) if self.kind == "forces" else self.hidden(x)
        return self.head(x), x

    def hidden(self, x: Tensor) -> Tensor:
        used = [*self.blocks]
        if self.kind == "experts":
            differs = not self.training if self.since is None else self.steps >= self.since
            used = [self.blocks[dist.get_rank() if differs else 0], self.blocks[2]]
        if self.kind == "dropped":
            used = used[: 3 - dist.get_rank()]
        if self.kind == "layerdrop" and self.training:
            used = [block for block in used if random.random() > 0.3]
        if self.kind == "unfreezes" and self.steps > 5:
            self.blocks.requires_grad_(True)
        if self.kind == "frozen":
            self.blocks[0].requires_grad_(self.steps <= 5)
            with torch.no_grad():
                for mine, other in zip(self.teacher.parameters(), self.blocks[1].parameters(), strict=True):
                    mine.lerp_(other, 0.5)
            used.append(self.teacher)
        for block in used:
            x = block(x)
        return x

    def forced(self, x: Tensor) -> Tensor:
        """Take the gradient of the blocks inside of the forward pass."""
        with torch.enable_grad():
            at = x.detach().requires_grad_(True)
            (force,) = torch.autograd.grad(self.hidden(at).pow(2).sum(), at, create_graph=True)
        return self.hidden(x - 0.1 * force)


def words(kind: str, *more: str) -> list[str]:
    return [
        f"model._target_={__name__}.Model", f"model.kind='{kind}'", f"data._target_={__name__}.Rows",
        f"task.loss={__name__}.loss", "data.num_train=64", "data.num_val=8", "training.global_batch_size=4",
        "training.epochs=2", *more,
    ]  # fmt: skip


MARGIN, POINTS = nn.Parameter(torch.ones(3)), torch.ones(2, requires_grad=True)


def with_margin(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) + MARGIN.sum()


def with_leaf(model: nn.Module, batch: Any) -> Tensor:
    """Gradients of inputs are wanted, as those of positions are for forces, and of points that are kept."""
    return loss(model, batch) * torch.ones((), requires_grad=True) * POINTS.mean()


GRADIENT = r"blocks\.0\.first\.weight has a gradient on rank 1"
WRITTEN = r"blocks\.0\.first\.weight was written in a forward"
UNTRAINED = r"with_margin: the loss of step 1 has a parameter \(3 float32\) that the model does not hold.*Move it into"
DRIFTED = r"has the norm [\d.]+ on rank 0 and [\d.]+ on rank 1, which should .*:"
NOISY = "optimizer._target_=tests.workloads.user.optim.Langevin"
UNFROZEN = r"blocks\.0\.first\.weight requires a gradient by step 6,.*from the constructor on"
REFUSED: list[tuple[list[str], str]] = [
    (words("experts", "model.since=1", BLOCK),
     r"step 1 rank 0 gathers the weights of blocks\.0, and rank 1 gathers the weights of blocks\.1"),
    (words("experts", "model.since=5", BLOCK, "memory_profile=peaks"),
     r"up to step 10 rank 0 gathers the weights of blocks\.[01] \d+ times and rank 1 \d+ times.*or sharding=ddp"),
    (words("experts", BLOCK), r"step 0 rank 0 gathers .* blocks\.0, and rank 1 .* blocks\.1"),
    (words("dropped", BLOCK), r"step 0 rank 0 gathers the weights of blocks\.2, and rank 1 has ended its forward pass"),
    (words("gated", ROOT, "training.grad_accum_steps=2"), GRADIENT),
    (words("gated once", BLOCK), f"{GRADIENT} and none on rank 0"),
    (words("uneven", BLOCK), r"rank 0 reduces 144 gradients of blocks\.2, and rank 1 reduces 72 gradients of"),
    (words("writes", BLOCK, "reshard_after_forward=never"), WRITTEN),
    (words("writes", ROOT, "activation_checkpointing=full", "precision=bf16", "memory_profile=peaks"), WRITTEN),
    (words("", BLOCK, "model.max_norm=1"), r"embedding\.weight was written in a forward.*ddp keeps .*on all ranks"),
    (words("", DDP, "model.max_norm=1"), rf"ddp: by step 1 embedding\.weight {DRIFTED} forward by a rank's own"),
    (words("", DDP, NOISY), rf"by step 1 embedding\.weight {DRIFTED}.*an optimizer that draws random numbers"),
    (words("", BLOCK, "sharding.dp_replicate=2", NOISY), DRIFTED),
    (words("forces", BLOCK, "memory_profile=off"),
     r"freed during its forward pass \(.*self\.head\(x\), x\), here head\.weight, .* take it in task\.loss"),
    (words("unfreezes", DDP), UNFROZEN),
    (words("unfreezes", BLOCK), UNFROZEN),
    (words("", DDP, f"task.loss={__name__}.with_margin"), UNTRAINED),
    (words("", BLOCK, f"task.loss={__name__}.with_margin", "activation_checkpointing=full"), UNTRAINED),
    (words("", ROOT, "sharding.api=fsdp1", f"task.loss={__name__}.with_margin"), UNTRAINED),
    # what tensors without values do not show
    (unusual_words(f"returns model.what=function {ALWAYS}"),
     r"always: a tensor of a unit is used after its parameters were freed.*reshard_after_forward=never"),
    (unusual_words(f"float32_buffer {ALWAYS} precision=bf16_mixed"),
     r"param_dtype=bfloat16: .* \(.*unusual\.py:\d+: .*no buffers \(here blocks\.0\.inner\.scale\).*\.to\(x\.dtype\)"),
    ([*unusual_words(f"head_norms {BLOCK} sharding.tp=2"), HEADS],
     r"tp=2: the gradient of blocks\.0\.inner\.of_head\.weight is not the same .* by `heads`"),
]  # fmt: skip


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


def test_what_computes_something_else_is_refused_by_its_name() -> None:
    for of_rank in run_ranks(2, refusals, [case for case, _ in REFUSED]):
        for (case, expected), message in zip(REFUSED, of_rank, strict=True):
            assert re.search(expected, message), f"{case}: {message}"


def test_what_is_kept_is_not_refused() -> None:
    """DDP keeps writes and lets ranks differ; FSDP2 allows to freeze, and to write shards."""
    cases = [words("writes", DDP), words("dropped", DDP), words("gated", DDP), words("layerdrop", DDP)]
    cases.append(words("frozen", BLOCK))
    leaf = (f"task.loss={__name__}.with_leaf", "training.max_steps=3")
    cases += [
        words("", *each.split(), *leaf) for each in (DDP, f"{BLOCK} precision=bf16", f"{ROOT} sharding.api=fsdp1")
    ]
    assert run_ranks(2, refusals, cases) == [[""] * len(cases)] * 2


def test_ranks_may_leave_out_other_parameters_where_zeros_are_reduced() -> None:
    sgd = ("optimizer=sgd", "optimizer.lr=0.05", "training.max_steps=5", "data.num_val=4")
    zeros = "sharding.find_unused_parameters=true"
    kinds = ("gated", "uneven", "dropped", "gated once")
    cases = [words(kind, *sgd, each, zeros) for kind in kinds for each in (DDP, ROOT)]
    cases += [words("gated", *sgd, BLOCK, zeros), words("", *sgd, DDP, zeros), words("", *sgd, DDP)]
    losses = [[epoch["train/loss"] for epoch in epochs] for _, epochs in run_ranks(2, train_all, cases)[0]]
    for of_ddp, of_root in zip(losses[:8:2], losses[1:8:2], strict=True):
        assert of_root == pytest.approx(of_ddp, rel=1e-6)
    assert losses[8] == pytest.approx(losses[0], rel=1e-6) and losses[9] == losses[10]


def test_all_settings_are_timed_over_the_same_steps() -> None:
    cases = [["model=mlp", "training.timing_warmup_steps=0", sharding] for sharding in (DDP, BLOCK, ROOT)]
    trained = run_ranks(2, train_all, cases)[0]
    assert [epochs[-1]["perf/timed_steps"] for _, epochs in trained] == [4 - FIRST_STEPS] * 3


def test_gradients_in_forward_and_sparse_ones_are_followed() -> None:
    """The tracker failed each of these trials; with it they learn what they learn without."""
    sgd = ("optimizer=sgd", "optimizer.weight_decay=0", "optimizer.lr=0.05", "training.max_steps=3")
    settings = (["model.sparse=true", DDP], [ROOT])
    cases = [words("forces", *sgd, *setting, f"memory_profile={each}") for setting in settings
             for each in ("off", "peaks")]  # fmt: skip
    plain_ddp, ddp, plain_root, root = run_ranks(2, train_all, cases)[0]
    for plain, tracked in ((plain_ddp, ddp), (plain_root, root)):
        assert plain[0] == tracked[0]
        assert tracked[1][-1]["memory/peak_bytes"] > 0
