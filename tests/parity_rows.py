"""The table of `tests/training/test_parity.py`: which settings of which workloads are compared, and in which tier.

`make test` has each value of each setting and each kind of workload once. `make ci` adds every sharding with every
reshard_after_forward, and every pair of the other settings; `make test-all` the rest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from itertools import product

from tests.parity import OF_TRANSFORMERS, PRECISIONS, SHARDINGS, Row

AXES: dict[str, Sequence[str]] = {
    "sharding": ("ddp", "root", "per_block", "per_layer", "size_based"),
    "precision": ("fp32", "bf16", "bf16_mixed", "bf16_pure", "fp16", "fp16_mixed", "grad_bf16"),
    "offload": ("none", "cpu"),
    "reshard_after_forward": ("always", "never", "default", "to_size"),
    "optimizer": ("adam", "adamw", "sgd", "custom"),
    "training.grad_accum_steps": ("1", "2"),
    "activation_checkpointing": ("none", "full", "every_n", "selective"),
    "training.max_grad_norm": ("null", "0.1"),
    "sharding.blocks_per_unit": ("1", "2"),
    "sharding.embeddings": ("root", "own"),
    "sharding.forward_prefetch": ("null", "2"),
    "sharding.backward_prefetch": ("null", "1"),
    "init": ("plain", "rank0"),
    "training.sync_each_microbatch": ("false", "true"),
    "sharding.separate_reduce_scatter_group": ("false", "true"),
    "sharding.api": ("fsdp2", "fsdp1"),
}
Case = dict[str, str]

# What a sharding leaves no choice for.
_ONE_BLOCK = {"sharding.blocks_per_unit": "1", "sharding.embeddings": "root"}
_WITHOUT_CHOICE: dict[str, Case] = {
    "ddp": {
        "offload": "none", "reshard_after_forward": "default", "sharding.forward_prefetch": "null",
        "sharding.backward_prefetch": "null", "sharding.separate_reduce_scatter_group": "false",
        "sharding.api": "fsdp2", **_ONE_BLOCK,
    },
    "root": _ONE_BLOCK, "per_block": {}, "per_layer": _ONE_BLOCK, "size_based": _ONE_BLOCK,
}  # fmt: skip


def _random_case(rng: random.Random, fixed: Case) -> Case:
    """One that has a meaning; the fixed values may have to give way."""
    case = {axis: rng.choice(values) for axis, values in AXES.items()} | fixed
    if case["sharding"] in ("per_layer", "size_based") and case["activation_checkpointing"] == "selective":
        case["activation_checkpointing"] = "full"  # `selective` cannot recompute units inside of a block
    case |= _WITHOUT_CHOICE[case["sharding"]]
    return _as_fsdp1_can(case) if case["sharding.api"] == "fsdp1" else case


def _as_fsdp1_can(case: Case) -> Case:
    case = case | _ONE_BLOCK | {"sharding.separate_reduce_scatter_group": "false"}
    if case["reshard_after_forward"] == "to_size":
        case["reshard_after_forward"] = "always"
    if case["sharding.forward_prefetch"] == "2":
        case["sharding.forward_prefetch"] = "1"
    if case["offload"] == "cpu" and case["training.grad_accum_steps"] == "2":
        case["training.sync_each_microbatch"] = "false"
    return case


@cache
def pairwise() -> list[Case]:
    """Return cases that have every two values which stand together in any of many random cases.

    One after the other, the case with the most pairs that no other before it has.
    """
    rng = random.Random(0)
    cases = [_random_case(rng, {}) for _ in range(500)]
    pairs = [set(itertools.combinations(case.items(), 2)) for case in cases]
    left, chosen = set[object]().union(*pairs), []
    while left:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & left))
        chosen.append(cases[best])
        left -= pairs[best]
    return chosen


def every_four_axes() -> list[Case]:
    """Every sharding x precision x offload x reshard_after_forward that has a meaning, the other axes at random."""
    rng = random.Random(0)
    four = [dict(zip(AXES, values, strict=False)) for values in product(*list(AXES.values())[:4])]
    return [case for fixed in four if fixed.items() <= (case := _random_case(rng, fixed)).items()]


def overrides(case: Case) -> list[str]:
    """As they are typed, with what some options want besides."""
    more = {
        "size_based": "sharding.min_num_params=1000",
        "adam": "optimizer.lr=0.01",
        "adamw": "optimizer.lr=0.01",
        "custom": "optimizer._target_=torch.optim.RAdam optimizer.lr=0.01",
        "to_size": "reshard_after_forward.size=2",
    }
    return " ".join(f"{key}={value} {more.get(value, '')}" for key, value in case.items()).split()


DDP, ROOT, PER_BLOCK, PER_LAYER = (f"sharding={name}" for name in ("ddp", "root", "per_block", "per_layer"))
SIZE_BASED = " ".join(SHARDINGS["size_based"])
FSDP1 = "sharding.api=fsdp1"
SMALLEST_UNITS = "sharding=size_based sharding.min_num_params=80"  # of the user's modules
OWN_UNITS = f"{PER_BLOCK} sharding.embeddings=own"
ALWAYS, NEVER = "reshard_after_forward=always", "reshard_after_forward=never"
FULL, SELECTIVE = "activation_checkpointing=full", "activation_checkpointing=selective"
EVERY_ONE = "activation_checkpointing=every_n activation_checkpointing_every=1"
MOVED = "activation_offload=cpu"
IN_CHUNKS = "task.loss_chunks=3"
SGD = "optimizer=sgd optimizer.weight_decay=0"
CLIP = "training.max_grad_norm=0.1"
ACCUMULATE = "training.grad_accum_steps=2"
TP = "sharding.tp="
PURE = "precision=bf16_pure precision.reduce_dtype=float32 optimizer.lr=0.001"
TO_SIZE = "reshard_after_forward=to_size reshard_after_forward.size="
RESHARDS = (*(f"reshard_after_forward={p}" for p in ("always", "never", "default")), f"{TO_SIZE}1", f"{TO_SIZE}2")
GRID = [DDP, *(f"{' '.join(SHARDINGS[s])} {r}" for s, r in product(SHARDINGS, RESHARDS) if s != "ddp")]
OWN = "optimizer=custom optimizer._target_="
RADAM = f"{OWN}torch.optim.RAdam optimizer.lr=0.01 optimizer.betas=[0.8,0.95] optimizer.weight_decay=0.1"
ADAGRAD = f"{OWN}torch.optim.Adagrad optimizer.lr=0.01 optimizer.initial_accumulator_value=0.1"
LION = f"{OWN}tests.workloads.user.optim.Lion optimizer.lr=0.001 optimizer.weight_decay=0.3"
HALF = {s: [f"sharding={s} precision={p} {SGD}" for p in PRECISIONS] for s in ("per_block", "per_layer", "ddp")}
SETTINGS = (
    f"{PER_BLOCK} init=rank0",
    f"{PER_BLOCK} {FULL} {ACCUMULATE}",
    f"{PER_LAYER} {ALWAYS}",
    f"{ROOT} init=rank0",
)
IN_HALF = (
    f"{DDP} precision=bf16_mixed {CLIP}",
    f"{PER_BLOCK} precision=bf16 offload=cpu {FULL}",
    f"{ROOT} precision=fp16_mixed precision.init_scale=8 {ACCUMULATE}",
    f"{PER_BLOCK} {PURE} offload=cpu {FULL}",
)
PLANNED = 'model.tp_plan={"blocks.0.0":colwise,"blocks.1.0":rowwise}'
Cells = dict[str, Sequence[str]]  # workload, or "workload on ranks" -> settings

IN_MAKE_TEST: Cells = {
    # A covering array: each value of each setting once, with those that it interacts with.
    "mlp": (
        f"{DDP} {CLIP} {ACCUMULATE} activation_checkpointing=every_n optimizer.implementation=fused",
        f"{ROOT} {ALWAYS} offload=cpu init=rank0 {FULL}",
        f"{ROOT} reshard_after_forward=default optimizer.implementation=foreach optimizer.beta1=0.8 "
        "optimizer.beta2=0.95 training.max_steps=3 precision=tf32",  # on a CPU it is fp32
        f"{PER_BLOCK} {NEVER} offload=cpu_unpinned sharding.forward_prefetch=2 sharding.backward_prefetch=1 {SGD} "
        f"{SELECTIVE} init=rank0",
        f"{PER_BLOCK} {ALWAYS} {CLIP} {ACCUMULATE} sharding.blocks_per_unit=2 "
        f"sharding.separate_reduce_scatter_group=true {RADAM}",
        f"{PER_BLOCK} memory_profile=off data.loader_workers=1 training.seed=5 training.epochs=2 precision=fp32 "
        "offload=none",
        f"{PER_LAYER} {TO_SIZE}2 training.sync_each_microbatch=true {ACCUMULATE} {LION}",
        f"{SIZE_BASED} {TO_SIZE}1 init=rank0 optimizer=adamw optimizer.lr=0.01 optimizer.weight_decay=0.3 "
        "optimizer.implementation=for_loop",
        f"{FSDP1} {PER_BLOCK} {ALWAYS} {CLIP} {ACCUMULATE} {SELECTIVE} init=rank0",
        f"{FSDP1} {PER_BLOCK} {NEVER} offload=cpu sharding.forward_prefetch=1 sharding.backward_prefetch=0 {RADAM} "
        "sharding.limit_all_gathers=false",
        f"{FSDP1} {PER_LAYER} training.sync_each_microbatch=true {ACCUMULATE} {FULL} init=rank0",
        f"{FSDP1} {SIZE_BASED} {NEVER} {ACCUMULATE} optimizer.implementation=for_loop",
        f"{FSDP1} {ROOT} optimizer.implementation=fused",
        f"{PER_BLOCK} {ALWAYS} {ACCUMULATE} {MOVED}",
    ),
    "mlp on 1": (f"{PER_BLOCK} sharding.find_unused_parameters=true", f"{FSDP1} {PER_BLOCK}"),
    "mlp on 4": (
        f"{PER_BLOCK} {TO_SIZE}2",
        f"{SIZE_BASED} sharding.dp_replicate=2 {TO_SIZE}1 {ACCUMULATE} init=rank0",
        f"{PER_BLOCK} sharding.dp_replicate=2 training.sync_each_microbatch=true {ACCUMULATE} {CLIP} "
        "sharding.separate_reduce_scatter_group=true",
        f"{FSDP1} {PER_BLOCK} sharding.dp_replicate=2 {NEVER} {ACCUMULATE} {CLIP}",
    ),
    "wide mlp": (
        *HALF["per_block"],
        *(f"{FSDP1} {cell}" for cell in HALF["per_block"]),
        f"{DDP} precision=bf16_pure {SGD}",
    ),
    "vit": (f"{PER_BLOCK} {EVERY_ONE} sharding.blocks_per_unit=2",),
    "language": (f"{PER_BLOCK} {SELECTIVE} {IN_CHUNKS}", f"{OWN_UNITS} {ACCUMULATE} {CLIP}", f"{DDP} {FULL} {MOVED}"),
    "language, tied on 4": (f"{PER_BLOCK} {TP}2 {PURE} {ACCUMULATE} {CLIP} init=rank0",),
    "language on 4": (f"{PER_BLOCK} {TP}2 {ALWAYS} {FULL} {ACCUMULATE}",),
    "language, 4 kv heads on 4": (f"{ROOT} {TP}4 init=rank0 {CLIP}",),
    "language, tied": (f"{ROOT} {ALWAYS} {FULL} {IN_CHUNKS}",),
    # the norm is inside of the block
    "user": (DDP, f"{PER_BLOCK} model.block_classes=[tests.workloads.user.odd.Block,torch.nn.LayerNorm] {FULL}"),
    "user, with state on 1": (f"{PER_BLOCK} {FULL}",),
    # of 31 items on two ranks, 3 at a time: the last batch of one rank is padding alone
    "net": (f"{DDP} training.global_batch_size=6",),
    # 30 at a time: the last batches of the two differ in size
    "model_loss": (f"{PER_BLOCK} training.global_batch_size=60",),
    "complex": (f"{PER_LAYER} {SGD}",),
    "methods": (f"{PER_BLOCK} {ALWAYS} model.forward_methods=[encode] {FULL}",),
    **dict.fromkeys(
        ("float64", "transposed", "frozen in bfloat16", "some share a module", "objects", "changed in place", "kept"),
        (f"{PER_BLOCK} {ALWAYS}",),
    ),
    # a microbatch of one row, or of two
    "some tokens": (f"{ROOT} training.global_batch_size=4 {ACCUMULATE}",),
    "some classes": (
        f"{DDP} training.global_batch_size=4",
        f'{ROOT} training.global_batch_size=4 {TP}2 model.tp_plan={{"3":loss_parallel}}',
    ),
    # a microbatch of one row or two; each form of gradients that are multiplied once a step
    "counted": (
        f"{DDP} training.global_batch_size=8 {ACCUMULATE}",
        f"{PER_BLOCK} training.global_batch_size=4 {ACCUMULATE} {CLIP} {ALWAYS}",
        f"{PER_LAYER} training.global_batch_size=8 training.sync_each_microbatch=true training.grad_accum_steps=4",
        f"{PER_BLOCK} training.global_batch_size=4 offload=cpu memory_profile=off",
        f"{FSDP1} {PER_BLOCK} training.global_batch_size=4 {ACCUMULATE} {CLIP}",
        f"{FSDP1} {PER_LAYER} training.global_batch_size=8 {ACCUMULATE} offload=cpu",
    ),
    "counted on 4": (
        f"{DDP} training.global_batch_size=8 {ACCUMULATE}",
        f"{PER_BLOCK} training.global_batch_size=4",
        f"{PER_LAYER} training.global_batch_size=8 {ACCUMULATE} sharding.dp_replicate=2",
        f"{FSDP1} {PER_BLOCK} training.global_batch_size=8 {ACCUMULATE} sharding.dp_replicate=2",
        f"{FSDP1} {PER_LAYER} training.global_batch_size=4",
        f'{ROOT} training.global_batch_size=8 {ACCUMULATE} {CLIP} {TP}2 model.tp_plan={{"blocks.*":colwise_gathered}}',
    ),
    "weighted": (f"{PER_BLOCK} training.global_batch_size=8 {ACCUMULATE} offload=cpu",),
    "seq2seq": (f"{PER_BLOCK} {NEVER} training.grad_accum_steps=4 model.as_dict=true",),
    **dict.fromkeys(OF_TRANSFORMERS, (PER_BLOCK,)),
    # with norms of heads, and a head that is tied
    "hf qwen3": (PER_BLOCK, f"{PER_BLOCK} sharding.tp=2"),
}
ON_ONE = (DDP, f"{PER_LAYER} training.grad_accum_steps=4")
ON_FOUR = (
    DDP, f"{ROOT} sharding.dp_replicate=4 {CLIP}", f"{PER_LAYER} {ACCUMULATE}",
    f"{PER_LAYER} sharding.dp_replicate=2 {TO_SIZE}2",
    f"{PER_BLOCK} sharding.dp_replicate=2 precision=bf16_mixed {ACCUMULATE} {SGD}",
)  # fmt: skip
# without those that cannot be recomputed, see `_random_case`
TP_GRID = [
    f"{' '.join(SHARDINGS[sharding])} activation_checkpointing={checkpointing} {TP}2 training.grad_accum_steps={parts}"
    for sharding, checkpointing, parts in product(SHARDINGS, AXES["activation_checkpointing"], (1, 2))
    if sharding != "ddp" and (checkpointing != "selective" or sharding in ("root", "per_block"))
]
LATER: Cells = {
    "mlp": (
        *GRID,
        *(" ".join(overrides(case)) for case in pairwise()[::2]),
        *(f"{' '.join(SHARDINGS[s])} {own}" for s, own in product(SHARDINGS, (RADAM, ADAGRAD, LION))),
        f"{PER_BLOCK} precision=fp16 offload=cpu {LION} {CLIP}",
    ),
    "mlp on 1": ON_ONE,
    "mlp on 4": (
        *ON_FOUR,
        f"{FSDP1} {PER_LAYER} sharding.dp_replicate=2 training.sync_each_microbatch=true {ACCUMULATE}",
        f"{OWN_UNITS} sharding.dp_replicate=2 {ACCUMULATE}",
        f"{ROOT} sharding.tp=2 {PLANNED} {CLIP}",
    ),
    "vit": (
        f"{DDP} {ACCUMULATE}", f"{FSDP1} {PER_BLOCK} {FULL}",
        f"{OWN_UNITS} {FULL} sharding.blocks_per_unit=2 offload=cpu",
        f"{FSDP1} {PER_LAYER} {MOVED}", f"{PER_LAYER} precision=bf16_mixed {EVERY_ONE} {MOVED} offload=cpu",
    ),
    "language on 4": (
        *TP_GRID[::6],
        f"{PER_BLOCK} {TP}2 {IN_CHUNKS} offload=cpu {CLIP}",
        f"{PER_BLOCK} {TP}2 {MOVED} {CLIP}",
        f"{PER_BLOCK} {TP}2 sharding.dp_replicate=2 training.sync_each_microbatch=true {ACCUMULATE} "
        "sharding.separate_reduce_scatter_group=true",
        f"{PER_BLOCK} {TP}2 {TO_SIZE}2 sharding.forward_prefetch=2 sharding.backward_prefetch=1 precision=bf16_mixed",
        f"{OWN_UNITS} {TP}2 {CLIP}",
    ),
    "language, tied on 4": (f"{PER_BLOCK} {TP}2 {SELECTIVE}", f"{ROOT} {TP}2 {IN_CHUNKS} init=rank0"),
    "language, 4 kv heads on 4": (f"{PER_BLOCK} {TP}4 {ALWAYS} {ACCUMULATE}",),
    "language": (
        f"{OWN_UNITS} {ALWAYS} {FULL}", f"{OWN_UNITS} {NEVER} compile=true",
        f"{PER_BLOCK} compile=true {ACCUMULATE}", f"{PER_LAYER} {ALWAYS}", f"{ROOT} {ALWAYS} {IN_CHUNKS} {FULL}",
    ),
    "language, tied": (
        f"{DDP} {IN_CHUNKS}", OWN_UNITS, *IN_HALF, *(f"{FSDP1} {cell}" for cell in IN_HALF[1:]),
    ),
    "user": (
        f"{FSDP1} {PER_BLOCK} {ALWAYS}", f"{FSDP1} {PER_LAYER} init=rank0",
        f"{ROOT} {NEVER} {MOVED}", f"{PER_LAYER} {ALWAYS}", f"{SMALLEST_UNITS} {NEVER} init=rank0",
        *SETTINGS[:2], *IN_HALF, f"{OWN_UNITS} {ACCUMULATE}",
    ),
    "user, with state on 1": (f"{DDP} {SELECTIVE}", f"{PER_LAYER} {EVERY_ONE}"),
    "complex": (DDP,),
    **dict.fromkeys(("some tokens", "some classes"), (f"{PER_LAYER} training.global_batch_size=4",)),
    "seq2seq": (f"{DDP} {ACCUMULATE}", f"{PER_BLOCK} {ALWAYS} {FULL} model.as_dict=true"),
    "hf t5": (DDP, f"{OWN_UNITS} sharding.forward_prefetch=1 sharding.backward_prefetch=1"),
    **dict.fromkeys(("hf llama", "hf gpt2", "hf vit"), (f"{OWN_UNITS} {ACCUMULATE}",)),
    **dict.fromkeys(("kept", "objects"), (f"{OWN_UNITS} {ALWAYS}",)),
    "hf llama on 4": (f"{PER_BLOCK} {ALWAYS} {FULL} {ACCUMULATE} {CLIP} sharding.tp=2",),
}  # fmt: skip
OFFLOADED = [f"{cell} offload={place}" for cell, place in product(GRID[1:], ("cpu", "cpu_unpinned"))]
AT_NIGHT: Cells = {
    "mlp": (*OFFLOADED, *(" ".join(overrides(case)) for case in pairwise()[1::2])),
    "wide mlp": (*HALF["per_layer"], *HALF["ddp"]),
    "user": [cell.replace(SIZE_BASED, SMALLEST_UNITS) for cell in GRID],
    "language, tied": (*GRID, *SETTINGS[:2], f"{PER_BLOCK} {NEVER} {IN_CHUNKS}"),
    "language": (
        *GRID,
        f"{PER_LAYER} {NEVER} {IN_CHUNKS}",
        *(f"{sharding} compile=true" for sharding in (DDP, ROOT, PER_BLOCK, SIZE_BASED)),
        *(f"{PER_BLOCK} compile=true {mode}" for mode in (FULL, SELECTIVE)),
        f"{PER_BLOCK} compile=true compile_loss=false precision=bf16_mixed {NEVER}",
        # so few logits in bfloat16 are less than oneDNN's workspaces for their products, which no forecast has
        f"{PER_BLOCK} compile=true precision=bf16_mixed memory_profile=off",
    ),
    "vit": (
        *GRID, *OFFLOADED,
        *(" ".join(overrides(case)) for case in pairwise()[::6]),
        f"{PER_BLOCK} model.num_layers=4 sharding.blocks_per_unit=3 training.epochs=2",
        f"{PER_LAYER} model.num_layers=4 sharding.forward_prefetch=1 sharding.backward_prefetch=3",
        f"{PER_BLOCK} compile=true {FULL}",
    ),
    "vit on 1": ON_ONE,
    "vit on 4": ON_FOUR,
    # twice, in meshes whose process groups have other names, which code from a cache would not know; their ranks
    # hold different amounts, as docs/forecast.md says
    "language on 4": (
        *TP_GRID, f"{PER_BLOCK} {TP}2 compile=true {FULL} {ACCUMULATE} memory_profile=off",
        f"{PER_BLOCK} {TP}2 compile=true {FULL} {ACCUMULATE} memory_profile=off sharding.dp_replicate=2",
    ),
    **dict.fromkeys(OF_TRANSFORMERS, (ROOT, *GRID, *SETTINGS, *IN_HALF)),
    "hf gpt2": (ROOT, *GRID, *SETTINGS, *IN_HALF, f"{PER_BLOCK} compile=true"),
}  # fmt: skip


def _rows() -> list[Row]:
    """A row of two tiers is in the first."""
    rows = {}
    for tier, cells in {"test": IN_MAKE_TEST, "ci": LATER, "full": AT_NIGHT}.items():
        for name, cell in ((name, cell) for name, of_one in cells.items() for cell in of_one):
            workload, _, ranks = name.partition(" on ")
            row = Row(workload, cell, int(ranks or 2), tier)
            rows.setdefault((name, frozenset(cell.split())), row)
    return [*rows.values()]


ROWS = _rows()

# For `tests/gpu/`: each value of each setting, of workloads that need no library but PyTorch. Rows of the second table
# need two ranks.
GPU_CELLS: Cells = {
    "language": (
        *(" ".join(words) for words in SHARDINGS.values()),
        *(f"{PER_BLOCK} {reshard}" for reshard in RESHARDS[:4]),
        *(f"{sharding} precision={p} {SGD}" for sharding, p in product((PER_BLOCK, DDP), (*PRECISIONS, "tf32"))),
        *(f"{s} {words}" for s, words in product((PER_BLOCK, DDP), (ACCUMULATE, CLIP, SELECTIVE, "compile=true"))),
        *(f"{PER_BLOCK} {settings}" for settings in (
            "init=rank0", "offload=cpu", IN_CHUNKS, "data.loader_workers=1", "memory_profile=peaks", FULL,
            "optimizer.implementation=fused", "optimizer.implementation=foreach", "optimizer.implementation=for_loop",
            "activation_checkpointing=every_n", MOVED, f"{MOVED} {FULL}", "sharding.embeddings=own",
            f"compile=true {FULL}",
            f"precision=fp16 offload=cpu {SGD} {CLIP}", f"precision=fp16_mixed {ACCUMULATE} {SGD}",
            "sharding.blocks_per_unit=2 sharding.forward_prefetch=1 sharding.backward_prefetch=1",
        )),
        f"{ROOT} offload=cpu_unpinned {CLIP}", f"{ROOT} compile=true precision=bf16_mixed",
    ),
    "language, tied": (f"{ROOT} {FULL}",),
    "noise": (PER_BLOCK, f"{DDP} precision=bf16_mixed {SGD}", f"{PER_LAYER} offload=cpu"),
    "user": (f"{PER_BLOCK} init=rank0", PER_LAYER), "net": (f"{DDP} training.global_batch_size=6",),
    "seq2seq": (PER_BLOCK,),
}  # fmt: skip
GPU_CELLS_OF_TWO: Cells = {
    "language": (
        f"{PER_BLOCK} {TO_SIZE}2", f"{PER_BLOCK} sharding.dp_replicate=2",
        f"{PER_BLOCK} sharding.separate_reduce_scatter_group=true",
        f"{PER_BLOCK} sharding.dp_replicate=2 training.sync_each_microbatch=true {ACCUMULATE}",
    ),
}  # fmt: skip
