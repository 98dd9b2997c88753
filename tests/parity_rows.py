"""The table of `tests/training/test_parity.py`: which settings of which workloads are compared, and in which tier.

`make test` has each value of each setting and each kind of workload once, `make ci` every sharding with every
reshard_after_forward and every pair of the other settings, `make test-all` the rest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

from tests.parity import CLIP, NEED_TRANSFORMERS, OF_TRANSFORMERS, PRECISIONS, RESHARDS, SGD, SHARDINGS, Row, Tier

AXES: dict[str, Sequence[str]] = {
    "sharding": ("ddp", "root", "per_block", "per_layer", "size_based"),
    "precision": ("fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed", "grad_bf16"),
    "offload": ("none", "cpu"),
    "reshard_after_forward": ("always", "never", "default", "to_size"),
    "optimizer": ("adam", "adamw", "sgd", "custom"),
    "training.grad_accum_steps": ("1", "2"),
    "activation_checkpointing": ("none", "full", "every_n", "selective"),
    "training.max_grad_norm": ("null", "0.1"),
    "sharding.blocks_per_unit": ("1", "2"),
    "sharding.forward_prefetch": ("null", "2"),
    "sharding.backward_prefetch": ("null", "1"),
    "init": ("rank0", "meta", "device"),
    "training.sync_each_microbatch": ("false", "true"),
    "sharding.separate_reduce_scatter_group": ("false", "true"),
}
Case = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

# What can stand beside some values of others.
_ONLY_PLAIN_WITH_DDP = {
    "offload": "none",
    "reshard_after_forward": "default",
    "sharding.forward_prefetch": "null",
    "sharding.backward_prefetch": "null",
    "sharding.separate_reduce_scatter_group": "false",
}
_PER_BLOCK_ALONE = {"sharding.blocks_per_unit": "1"}


def can_stand_together(pair: Pair) -> bool:
    values = dict(pair)
    sharding = values.get("sharding")
    plain = _ONLY_PLAIN_WITH_DDP if sharding == "ddp" else {}
    plain = plain | (_PER_BLOCK_ALONE if sharding not in ("per_block", None) else {})
    if sharding in ("per_layer", "size_based") and values.get("activation_checkpointing") == "selective":
        return False
    return all(values.get(axis, only) == only for axis, only in plain.items())


def has_a_meaning(case: Case) -> bool:
    return all(map(can_stand_together, pairs(case)))


def overrides(case: Case) -> list[str]:
    """As they are typed, with what some options want besides."""
    more = {
        "size_based": ["sharding.min_num_params=1000"],
        "adam": ["optimizer.lr=0.01"],
        "adamw": ["optimizer.lr=0.01"],
        "custom": ["optimizer._target_=torch.optim.RAdam", "optimizer.lr=0.01"],
        "to_size": ["reshard_after_forward.size=2"],
    }
    return [f"{key}={value}" for key, value in case.items()] + [
        word for value in case.values() for word in more.get(value, ())
    ]


def pairs(case: Case) -> set[Pair]:
    return set(itertools.combinations(case.items(), 2))


@cache
def pairwise(seed: int = 0) -> list[Case]:
    """Return cases in which every two values of different axes that can stand together do so at least once.

    Greedy: of some random cases with the first pair that is missing, the one with the most that are missing.
    """
    rng = random.Random(seed)
    axes = itertools.combinations(AXES.items(), 2)
    every = (((a, x), (b, y)) for (a, of_a), (b, of_b) in axes for x, y in itertools.product(of_a, of_b))
    left = set(filter(can_stand_together, every))
    chosen = []
    while left:
        some = [_random_case(rng, min(left)) for _ in range(20)]
        chosen.append(max(some, key=lambda case: len(pairs(case) & left)))
        left -= pairs(chosen[-1])
    return chosen


def _random_case(rng: random.Random, fixed: Sequence[tuple[str, str]]) -> Case:
    while True:
        case = {axis: rng.choice(values) for axis, values in AXES.items()} | dict(fixed)
        if has_a_meaning(case):
            return case


def every_four_axes() -> list[Case]:
    """Every sharding x precision x offload x reshard_after_forward that has a meaning, the other axes at random."""
    rng = random.Random(0)
    four = (dict(zip(AXES, values, strict=False)) for values in itertools.product(*list(AXES.values())[:4]))
    return [_random_case(rng, tuple(case.items())) for case in four if has_a_meaning(case)]


ACCUMULATE = "training.grad_accum_steps=2"
SIZE_BASED = " ".join(SHARDINGS["size_based"])
SMALLEST_UNITS = "sharding=size_based sharding.min_num_params=80"  # of the user's modules
GRID = [
    "sharding=ddp",
    *(f"{' '.join(SHARDINGS[s])} {reshard}" for s, reshard in product(SHARDINGS, RESHARDS) if s != "ddp"),
]
OWN = "optimizer=custom optimizer._target_="
RADAM = f"{OWN}torch.optim.RAdam optimizer.lr=0.01 optimizer.betas=[0.8,0.95] optimizer.weight_decay=0.1"
ADAGRAD = f"{OWN}torch.optim.Adagrad optimizer.lr=0.01 optimizer.initial_accumulator_value=0.1"
LION = f"{OWN}tests.workloads.user.optim.Lion optimizer.lr=0.001 optimizer.weight_decay=0.3"
HALF = {s: [f"sharding={s} precision={p} {SGD}" for p in PRECISIONS] for s in ("per_block", "per_layer", "ddp")}
SETTINGS = (
    "sharding=per_block init=meta",
    f"sharding=per_block activation_checkpointing=full {ACCUMULATE}",
    "sharding=per_layer reshard_after_forward=always",
    "sharding=root init=device",
)
IN_HALF = (
    f"sharding=ddp precision=bf16_mixed {CLIP}",
    "sharding=per_block precision=bf16 offload=cpu activation_checkpointing=full",
    f"sharding=root precision=fp16_mixed precision.init_scale=8 {ACCUMULATE}",
)
Cells = dict[str, Sequence[str]]

IN_MAKE_TEST: Cells = {
    # A covering array: each value of each setting once, with those that it interacts with.
    "mlp": (
        f"sharding=ddp {CLIP} {ACCUMULATE} activation_checkpointing=every_n optimizer.implementation=fused",
        "sharding=root reshard_after_forward=always offload=cpu init=meta activation_checkpointing=full",
        "sharding=root reshard_after_forward=default optimizer.implementation=foreach optimizer.beta1=0.8 "
        "optimizer.beta2=0.95 training.max_steps=3 precision=tf32",  # on a CPU it is fp32
        "sharding=per_block reshard_after_forward=never offload=cpu_unpinned sharding.forward_prefetch=2 "
        f"sharding.backward_prefetch=1 {SGD} activation_checkpointing=selective init=device",
        f"sharding=per_block reshard_after_forward=always {CLIP} {ACCUMULATE} sharding.blocks_per_unit=2 "
        f"sharding.separate_reduce_scatter_group=true {RADAM}",
        "sharding=per_block memory_profile=off data.loader_workers=1 training.seed=5 training.epochs=2",
        f"sharding=per_layer {RESHARDS[4]} training.sync_each_microbatch=true {ACCUMULATE} {LION}",
        f"{SIZE_BASED} {RESHARDS[3]} init=meta optimizer=adamw optimizer.lr=0.01 optimizer.weight_decay=0.3 "
        "optimizer.implementation=for_loop",
    ),
    "wide mlp": HALF["per_block"],
    "vit": (
        "sharding=per_block activation_checkpointing=every_n activation_checkpointing_every=1 "
        "sharding.blocks_per_unit=2",
    ),
    "language": ("sharding=per_block activation_checkpointing=selective task.loss_chunks=3",),
    "language, tied": ("sharding=root reshard_after_forward=always activation_checkpointing=full task.loss_chunks=3",),
    "user": (
        "sharding=ddp",
        # the norm is inside of the block
        "sharding=per_block model.block_classes=[tests.workloads.user.odd.Block,torch.nn.LayerNorm] "
        "activation_checkpointing=full",
    ),
    "user, as T5": ("sharding=per_block reshard_after_forward=always",),
    # of 31 items on two ranks, 3 at a time: the last batch of one rank is padding alone
    "net": ("sharding=ddp training.global_batch_size=6",),
    # 30 at a time: the last batches of the two differ in size
    "model_loss": ("sharding=per_block training.global_batch_size=60",),
    "complex": (f"sharding=per_layer {SGD}",),
    "methods": (
        "sharding=per_block reshard_after_forward=always model.forward_methods=[encode] activation_checkpointing=full",
    ),
    **dict.fromkeys(
        ("float64", "transposed", "frozen in bfloat16", "some share a module", "objects", "changed in place", "kept"),
        ("sharding=per_block reshard_after_forward=always",),
    ),
    "seq2seq": ("sharding=per_block reshard_after_forward=never training.grad_accum_steps=4 model.as_dict=true",),
    **dict.fromkeys(OF_TRANSFORMERS, ("sharding=per_block",)),
    "hf t5": ("sharding=ddp",),
}  # fmt: skip
LATER: Cells = {
    "mlp": (
        *GRID,
        *(" ".join(overrides(case)) for case in pairwise()),
        *(f"{' '.join(SHARDINGS[s])} {own}" for s, own in product(SHARDINGS, (RADAM, ADAGRAD, LION))),
        f"sharding=per_block precision=fp16 offload=cpu {LION} {CLIP}",
    ),
    "vit": (f"sharding=ddp {ACCUMULATE}",),
    "language": (
        f"sharding=per_block compile=true {ACCUMULATE}",
        "sharding=per_layer reshard_after_forward=always",
        "sharding=root reshard_after_forward=always task.loss_chunks=3 activation_checkpointing=full",
    ),
    "language, tied": ("sharding=ddp task.loss_chunks=3", *IN_HALF),
    "user": (
        "sharding=root reshard_after_forward=never",
        "sharding=per_layer reshard_after_forward=always",
        f"{SMALLEST_UNITS} reshard_after_forward=never init=meta",
        *SETTINGS[:2], *IN_HALF,
    ),
    "user, as T5": ("sharding=ddp",),
    "complex": ("sharding=ddp",),
    "seq2seq": (
        f"sharding=ddp {ACCUMULATE}",
        "sharding=per_block reshard_after_forward=always activation_checkpointing=full model.as_dict=true",
    ),
    "t5_tiny": (f"sharding=per_block {ACCUMULATE}",), "hf t5": ("sharding=per_block",),
}  # fmt: skip
OFFLOADED = [f"{cell} offload={place}" for cell, place in product(GRID[1:], ("cpu", "cpu_unpinned"))]
AT_NIGHT: Cells = {
    "mlp": OFFLOADED, "user, as T5": (*GRID, *SETTINGS[:2]),
    "wide mlp": (*HALF["per_layer"], *HALF["ddp"]),
    "language, tied": (
        *GRID, *SETTINGS[:2], "sharding=per_block reshard_after_forward=never task.loss_chunks=3",
    ),
    "user": (
        *(cell.replace(SIZE_BASED, SMALLEST_UNITS) for cell in GRID),
    ),
    "language": (
        *GRID,
        "sharding=per_layer reshard_after_forward=never task.loss_chunks=3",
        *(f"{' '.join(SHARDINGS[s])} compile=true" for s in ("ddp", "root", "per_block", "size_based")),
        *(f"sharding=per_block compile=true activation_checkpointing={mode}" for mode in ("full", "selective")),
        "sharding=per_block compile=true precision=bf16_mixed reshard_after_forward=never",
    ),
    "vit": (
        *GRID, *OFFLOADED,
        *(" ".join(overrides(case)) for case in pairwise()[::6]),
        "sharding=per_block model.num_layers=4 sharding.blocks_per_unit=3 training.epochs=2",
        "sharding=per_layer model.num_layers=4 sharding.forward_prefetch=1 sharding.backward_prefetch=3",
        "sharding=per_block compile=true activation_checkpointing=full",
    ),
    **dict.fromkeys(NEED_TRANSFORMERS, ("sharding=root", *GRID, *SETTINGS, *IN_HALF)),
    "hf gpt2": ("sharding=root", *GRID, *SETTINGS, *IN_HALF, "sharding=per_block compile=true"),
}  # fmt: skip

ON_FOUR = (
    f"sharding=per_block {RESHARDS[4]}",
    f"{SIZE_BASED} sharding.dp_replicate=2 {RESHARDS[3]} {ACCUMULATE} init=meta",
    f"sharding=per_block sharding.dp_replicate=2 training.sync_each_microbatch=true {ACCUMULATE} {CLIP} "
    "sharding.separate_reduce_scatter_group=true",
)
ON_FOUR_LATER = (
    "sharding=ddp",
    f"sharding=root sharding.dp_replicate=4 {CLIP}",
    f"sharding=per_layer {ACCUMULATE}",
    f"sharding=per_layer sharding.dp_replicate=2 {RESHARDS[4]}",
    f"sharding=per_block sharding.dp_replicate=2 precision=bf16_mixed {ACCUMULATE} {SGD}",
)
ON_ONE = ("sharding=per_block",)
ON_ONE_LATER = ("sharding=ddp", "sharding=per_layer training.grad_accum_steps=4")
CHECKPOINTED = "sharding=per_block activation_checkpointing=full"
CHECKPOINTED_LATER = (
    "sharding=ddp activation_checkpointing=selective",
    "sharding=per_layer activation_checkpointing=every_n activation_checkpointing_every=1",
)


def _rows() -> Iterator[Row]:
    tiers: dict[Tier, Cells] = {"test": IN_MAKE_TEST, "ci": LATER, "full": AT_NIGHT}
    for tier, cells in tiers.items():
        yield from (Row(workload, cell, tier=tier) for workload, of_one in cells.items() for cell in of_one)
    for ranks, cell in [*product((4,), ON_FOUR), *product((1,), ON_ONE)]:
        yield Row("mlp", cell, ranks)
    yield Row("user, with state", CHECKPOINTED, 1)
    yield from (Row("user, with state", cell, 1, "ci") for cell in CHECKPOINTED_LATER)
    for ranks, cell in [*product((4,), ON_FOUR_LATER), *product((1,), ON_ONE_LATER)]:
        yield from (Row("mlp", cell, ranks, "ci"), Row("vit", cell, ranks, "full"))


# A row of two tiers is in the first.
_FIRST = {(row.workload, frozenset(row.cell.split()), row.ranks): row for row in reversed([*_rows()])}
ROWS = [*reversed(_FIRST.values())]


PER_BLOCK, DDP = "sharding=per_block", "sharding=ddp"
# For `tests/gpu/`: each value of each setting, of workloads that need no library but PyTorch. Rows of the second table
# need two ranks.
GPU_CELLS: Cells = {
    "language": (
        DDP, PER_BLOCK, "sharding=root", "sharding=per_layer", SIZE_BASED,
        *(f"{PER_BLOCK} {reshard}" for reshard in RESHARDS[:4]),
        *(f"{PER_BLOCK} precision={p} {SGD}" for p in PRECISIONS), *(f"{DDP} precision={p} {SGD}" for p in PRECISIONS),
        f"{PER_BLOCK} precision=tf32 {SGD}", f"{DDP} precision=tf32 {SGD}",
        f"{PER_BLOCK} offload=cpu", f"sharding=root offload=cpu_unpinned {CLIP}",
        f"{PER_BLOCK} precision=fp16 offload=cpu {SGD} {CLIP}", f"{PER_BLOCK} precision=fp16_mixed {ACCUMULATE} {SGD}",
        *(f"{PER_BLOCK} activation_checkpointing={mode}" for mode in ("full", "selective", "every_n")),
        f"{DDP} activation_checkpointing=selective",
        f"{DDP} {ACCUMULATE}", f"{PER_BLOCK} {ACCUMULATE}", f"{DDP} {CLIP}", f"{PER_BLOCK} {CLIP}",
        f"{PER_BLOCK} init=meta", f"{PER_BLOCK} task.loss_chunks=3",
        *(f"{PER_BLOCK} optimizer.implementation={way}" for way in ("fused", "foreach", "for_loop")),
        f"{PER_BLOCK} sharding.blocks_per_unit=2 sharding.forward_prefetch=1 sharding.backward_prefetch=1",
        f"{PER_BLOCK} data.loader_workers=1", f"{PER_BLOCK} memory_profile=peaks",
        f"{PER_BLOCK} compile=true", f"{DDP} compile=true", "sharding=root compile=true precision=bf16_mixed",
        f"{PER_BLOCK} compile=true activation_checkpointing=full",
    ),
    "language, tied": ("sharding=root activation_checkpointing=full",),
    "noise": (PER_BLOCK, f"{DDP} precision=bf16_mixed {SGD}", "sharding=per_layer offload=cpu"),
    "user": (f"{PER_BLOCK} init=meta", "sharding=per_layer"),
    "net": (f"{DDP} training.global_batch_size=6",), "seq2seq": (PER_BLOCK,),
}  # fmt: skip
GPU_CELLS_OF_TWO: Cells = {
    "language": (
        f"{PER_BLOCK} {RESHARDS[4]}", f"{PER_BLOCK} sharding.dp_replicate=2",
        f"{PER_BLOCK} sharding.separate_reduce_scatter_group=true",
        f"{PER_BLOCK} sharding.dp_replicate=2 training.sync_each_microbatch=true {ACCUMULATE}",
    ),
}  # fmt: skip
