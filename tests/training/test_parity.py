"""A sharded run learns what one unsharded process learns, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product

import pytest
import torch

from fsdp_lab.config import TrialConfig
from fsdp_lab.workloads.construct import Blueprint
from tests.ranks import config, run_ranks, train_all
from tests.training.reference import Run, apart, first_weights, train_unsharded

Case = tuple[str, ...]
Results = dict[Case, tuple[list[float], list[dict[str, float]]]]

FP32_TOLERANCE = 1e-5  # measured: 5e-7
NARROW_TOLERANCE = 2e-4  # measured: 2e-5
HALF_TOLERANCE = 5e-3  # measured: bf16 1.4e-3, bf16_mixed 1.0e-3, grad_bf16 5e-4, fp16 and fp16_mixed 3.5e-4

# Weight decay inside Adam's gradient, and a large step: without them Adam would forgive a gradient that is
# wrong by a factor, and four steps would hardly move the ViT, whose head starts at zero.
VIT = ("optimizer=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
MLP = ("model=mlp", "optimizer=sgd")

SHARDINGS: dict[str, Case] = {
    "ddp": ("sharding=ddp",),
    "root": ("sharding=root",),
    "per_block": ("sharding=per_block",),
    "per_layer": ("sharding=per_layer",),
    "size_based": ("sharding=size_based", "sharding.min_num_params=10000"),
}
SHARDED = [name for name in SHARDINGS if name != "ddp"]
RESHARDS: list[Case] = [
    *((f"reshard_after_forward={policy}",) for policy in ("always", "never", "default")),
    *(("reshard_after_forward=to_size", f"reshard_after_forward.size={size}") for size in (1, 2)),
]
TWO_BLOCKS = ("model.num_layers=2",)  # of all combinations: to gather one ahead of another takes no more
GRID: list[Case] = [
    (*SHARDINGS[sharding], f"offload={offload}", *reshard, *VIT, *TWO_BLOCKS)
    for sharding, offload, reshard in product(SHARDINGS, ("none", "cpu", "cpu_unpinned"), RESHARDS)
    if sharding != "ddp" or offload == "none"
]
PRECISIONS = ("bf16", "bf16_mixed", "fp16", "fp16_mixed", "grad_bf16")
HALF: list[Case] = [
    (f"precision={p}", *SHARDINGS[s], *MLP) for p, s in product(PRECISIONS, ("per_block", "ddp", "per_layer"))
]
CLIP = "training.max_grad_norm=0.1"
_NO_MATTER = (
    "training.grad_accum", "training.sync_each", "optimizer.implementation", "optimizer.state_dtype", "data.loader",
)  # fmt: skip
NARROW: list[Case] = [(*SHARDINGS[s], "optimizer.state_dtype=bf16", "model=mlp") for s in SHARDINGS]
EACH = "training.sync_each_microbatch=true"
FEATURES: list[Case] = [
    *((*SHARDINGS[s], "training.grad_accum_steps=2", *VIT) for s in SHARDINGS),
    *((*SHARDINGS[s], "training.grad_accum_steps=2", EACH, *VIT) for s in ("ddp", "per_block")),
    *((*SHARDINGS[s], CLIP, *MLP) for s in SHARDINGS),
    *((*SHARDINGS[s], "activation_checkpointing=full", *VIT) for s in SHARDINGS),
    *((*SHARDINGS[s], "activation_checkpointing=selective", *VIT) for s in ("ddp", "root", "per_block")),
    *((*SHARDINGS[s], "activation_checkpointing=every_n", *VIT) for s in ("ddp", "per_block")),
    *((*SHARDINGS[s], "init=meta", *VIT) for s in SHARDINGS),
    *((*SHARDINGS[s], "memory_profile=peaks", *VIT, *TWO_BLOCKS) for s in SHARDINGS),
    (*SHARDINGS["per_block"], "sharding.forward_prefetch=2", "sharding.backward_prefetch=1", *VIT),
    (*SHARDINGS["per_layer"], "sharding.separate_reduce_scatter_group=true", *VIT),
    (*SHARDINGS["per_block"], "sharding.blocks_per_unit=2", "sharding.forward_prefetch=1", *VIT),
    (*SHARDINGS["per_block"], "sharding.blocks_per_unit=3", "memory_profile=peaks", "training.epochs=2", *VIT),
    (*SHARDINGS["per_layer"], "sharding.forward_prefetch=1", "sharding.backward_prefetch=3", *VIT),
    (*SHARDINGS["per_block"], CLIP, "training.grad_accum_steps=2", "offload=cpu", *MLP),
    (*SHARDINGS["per_block"], "optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.3"),
    (*SHARDINGS["per_block"], "optimizer.implementation=foreach", *VIT),
    (*SHARDINGS["per_block"], "optimizer.implementation=for_loop", *VIT),
    (*SHARDINGS["per_block"], "data.loader_workers=1", *VIT),
    (*SHARDINGS["per_block"], "training.epochs=2", "training.seed=5", *VIT),
]
FOUR: list[Case] = [
    (*SHARDINGS["per_block"], *VIT),
    (*SHARDINGS["ddp"], *VIT),
    (*SHARDINGS["per_layer"], "training.grad_accum_steps=2", *VIT),
    (*SHARDINGS["per_block"], "reshard_after_forward=to_size", "reshard_after_forward.size=2", *VIT),
    (*SHARDINGS["per_block"], "sharding.dp_replicate=2", "sharding.separate_reduce_scatter_group=true", *VIT),
    (*SHARDINGS["per_layer"], "sharding.dp_replicate=2", "reshard_after_forward=to_size",
     "reshard_after_forward.size=2", *VIT),
    (*SHARDINGS["size_based"], "sharding.dp_replicate=2", "reshard_after_forward=to_size",
     "reshard_after_forward.size=1", "training.grad_accum_steps=2", "init=meta", *VIT),
    (*SHARDINGS["root"], "sharding.dp_replicate=4", CLIP, *MLP),
]  # fmt: skip
ONE: list[Case] = [
    (*SHARDINGS["per_block"], *VIT),
    (*SHARDINGS["ddp"], *VIT),
    (*SHARDINGS["per_layer"], "training.grad_accum_steps=4", *VIT),
]


def run(world_size: int, cases: list[Case]) -> Results:
    by_rank = run_ranks(world_size, train_all, [list(case) for case in cases])
    for rank, results in enumerate(by_rank):
        for case, (losses, _), (first, _) in zip(cases, results, by_rank[0], strict=True):
            assert losses == first, f"rank {rank} reports other losses than rank 0: {case}"
    return dict(zip(cases, by_rank[0], strict=True))


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run(2, [*GRID, *HALF, *NARROW, *FEATURES])


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run(4, FOUR)


@pytest.fixture(scope="module")
def one_rank() -> Results:
    return run(1, ONE)


# What a float32 run on one process depends on; the other settings must change nothing.
_MATTERS = ("model", "optimizer", "training", "data")


def unsharded(case: Case, wrong: str = "") -> Run:
    keys = [o for o in case if o.split("=")[0].split(".")[0] in _MATTERS]
    keys = [o for o in keys if not o.startswith(_NO_MATTER)]
    return _unsharded(tuple(keys), wrong)


@lru_cache
def _unsharded(keys: Case, wrong: str) -> Run:
    torch.set_num_threads(1)
    return train_unsharded(config(*keys), wrong)


def name(case: Case) -> str:
    return " ".join(o for o in case if o not in (*VIT, *TWO_BLOCKS))


def assert_same(results: Results, case: Case, tolerance: float) -> None:
    losses, reported = results[case]
    plain = unsharded(case)
    difference = apart(losses, plain.losses)
    assert difference <= tolerance, f"a step's loss is off by {difference:.2e}\n{losses}\n{plain.losses}"
    assert abs(reported[-1]["val/loss"] - plain.val_loss) <= tolerance
    assert reported[-1]["train/loss"] == pytest.approx(sum(losses[-4:]) / 4, abs=1e-9)


@pytest.mark.parametrize("case", GRID, ids=name)
def test_every_sharding_offload_and_reshard(two_ranks: Results, case: Case) -> None:
    assert_same(two_ranks, case, FP32_TOLERANCE)
    assert two_ranks[case][1][-1]["val/accuracy"] == pytest.approx(unsharded(case).val_accuracy)


@pytest.mark.parametrize("case", FEATURES, ids=name)
def test_features(two_ranks: Results, case: Case) -> None:
    assert_same(two_ranks, case, FP32_TOLERANCE)


@pytest.mark.parametrize("case", HALF, ids=name)
def test_half_precision(two_ranks: Results, case: Case) -> None:
    assert_same(two_ranks, case, HALF_TOLERANCE)


def test_moments_in_bfloat16(two_ranks: Results) -> None:
    """Near the float32 run, apart from it, and the same for every sharding."""
    first = two_ranks[NARROW[0]][0]
    for case in NARROW:
        assert_same(two_ranks, case, NARROW_TOLERANCE)
        assert apart(two_ranks[case][0], first) <= FP32_TOLERANCE, case
        assert apart(two_ranks[case][0], unsharded(case).losses) > 1e-6, case


@pytest.mark.parametrize("case", FOUR, ids=name)
def test_four_ranks(four_ranks: Results, case: Case) -> None:
    assert_same(four_ranks, case, FP32_TOLERANCE)


@pytest.mark.parametrize("case", ONE, ids=name)
def test_one_rank(one_rank: Results, case: Case) -> None:
    assert_same(one_rank, case, FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("case", "wrong", "tolerance"),
    [
        (VIT, "sum", FP32_TOLERANCE),
        (VIT, "one_rank", FP32_TOLERANCE),
        (VIT, "last_microbatch", FP32_TOLERANCE),
        ((*MLP, CLIP), "no_clip", FP32_TOLERANCE),
        ((*MLP, CLIP), "one_rank", FP32_TOLERANCE),
        (MLP, "sum", HALF_TOLERANCE),
        (MLP, "one_rank", HALF_TOLERANCE),
    ],
)
def test_a_wrong_reduction_would_be_seen(case: Case, wrong: str, tolerance: float) -> None:
    """The tolerances are worth something: each mistake lies far outside of the one that has to catch it."""
    assert apart(unsharded(case, wrong).losses, unsharded(case).losses) > 100 * tolerance


@pytest.mark.parametrize("sharding", ["per_block", "per_layer"])
def test_each_precision_does_its_own_arithmetic(two_ranks: Results, sharding: str) -> None:
    """The reduction's dtype is used, not only the computation's: no two of the settings agree."""
    rows = [two_ranks[(f"precision={p}", *SHARDINGS[sharding], *MLP)][0] for p in PRECISIONS]
    rows.append(unsharded(MLP).losses)
    assert all(apart(a, b) > 1e-6 for i, a in enumerate(rows) for b in rows[:i])


def test_the_memory_tracker_changes_no_digit(two_ranks: Results) -> None:
    for sharding in SHARDINGS:
        tracked = two_ranks[(*SHARDINGS[sharding], "memory_profile=peaks", *VIT, *TWO_BLOCKS)]
        plain = two_ranks[(*SHARDINGS[sharding], "offload=none", "reshard_after_forward=default", *VIT, *TWO_BLOCKS)]
        assert tracked[0] == plain[0], sharding
        assert tracked[1][-1]["memory/peak_bytes"] > 0
        assert "memory/peak_bytes" not in plain[1][-1]


def initial_weights(cases: list[Case]) -> list[tuple[dict[str, torch.Tensor], int]]:
    """`(full first weights, number of parameters whose values this rank built)` of each case."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fsdp_lab.training.build import build
    from fsdp_lab.training.distributed import build_parallel_dims, setup_distributed
    from fsdp_lab.training.weights import init_weights
    from fsdp_lab.workloads.build import build_model_spec

    values, given = Blueprint.values, [0]

    def counted(blueprint: Blueprint) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in values(blueprint):
            given[0] += 1
            yield name, value

    Blueprint.values = counted  # type: ignore[method-assign]
    ranks, results = setup_distributed(), []
    for case in cases:
        given[0] = 0
        trial = config(*case)
        spec, dims = build_model_spec(trial.model), build_parallel_dims(trial.sharding, ranks)
        init = partial(init_weights, config=trial, device=ranks.device)
        state = build(spec, trial, dims, ranks.device, materialize=init)
        full = get_model_state_dict(state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        results.append((dict(full), given[0]))
    return results


def test_every_sharding_and_init_starts_from_the_same_bits() -> None:
    cases = [
        (*SHARDINGS[s], f"init={init}", *more)
        for s, init, more in product(
            SHARDINGS, ("rank0", "meta"), ((), ("training.seed=7", "activation_checkpointing=full"))
        )
    ]
    cases += [("offload=cpu", f"init={init}", "model=mlp") for init in ("rank0", "meta")]
    first, second = run_ranks(2, initial_weights, cases)
    for case, (got, built_first), (_, built_second) in zip(cases, first, second, strict=True):
        expected = first_weights(config(*case))
        assert got.keys() == expected.keys(), case
        assert all(torch.equal(got[key], expected[key]) for key in expected), case
        assert built_first == len(expected), case
        assert built_second == (0 if "init=rank0" in case else len(expected)), case


def test_the_seed_changes_the_weights() -> None:
    a, b = (first_weights(TrialConfig()), first_weights(config("training.seed=1")))
    assert not torch.equal(a["conv_proj.weight"], b["conv_proj.weight"])


@pytest.mark.ci
def test_compiled_blocks() -> None:
    case = (*SHARDINGS["per_block"], "compile=true", "activation_checkpointing=full", *VIT)
    assert_same(run(2, [case]), case, FP32_TOLERANCE)


@pytest.mark.ci
@pytest.mark.parametrize("more", ["compile_memory_budget=0.3", "activation_checkpointing=selective"])
def test_compiled_blocks_that_keep_some_activations(more: str) -> None:
    case = (*SHARDINGS["per_block"], "compile=true", more, *VIT)
    assert_same(run(2, [case]), case, FP32_TOLERANCE)
