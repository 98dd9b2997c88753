"""Every setting learns, step by step, what one unsharded float32 process learns on the CPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.run import run_trial
from benchmarks.check_gpu.settings import Setting, trial, words
from fsdp_lab.files import write_json

STEPS = 6
# A large step, and weight decay inside Adam's gradient: without it Adam forgives a gradient that is wrong by a factor.
LEARNING: Setting = {"model": "vit_tiny", "optimizer.lr": 0.005, "optimizer.weight_decay": 0.1}

# The same arithmetic in another order of summation. Measured on two gloo ranks: 7e-7.
CPU_FP32 = 1e-5
# Other kernels, and Adam divides by the root of small second moments, which amplifies rounding in the first steps.
# TF32 is off. Not calibrated on a GPU yet.
CUDA_FP32 = 1e-3
# Eight (bfloat16) or eleven (float16) significant bits. Measured on one gloo rank: 2.5e-3 in bfloat16.
HALF = 2e-2
# A mistake has to lie outside of the tolerance that must find it by this factor.
CONTROL_FACTOR = 3.0

SHARDINGS: dict[str, Setting] = {
    "ddp": {"sharding": "ddp"},
    "per_block": {"sharding": "per_block"},
    "root": {"sharding": "root"},
    "per_layer": {"sharding": "per_layer"},
    "size_based": {"sharding": "size_based", "sharding.min_num_params": 20000},
}
FEATURES: dict[str, Setting] = {
    "accumulation": {"training.grad_accum_steps": 2},
    "clipping": {"training.max_grad_norm": 0.1},
    "activation checkpointing": {"activation_checkpointing": "full"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "every second block": {"activation_checkpointing": "every_n"},
    "init=rank0": {"init": "rank0"},
    "followed step": {"memory_profile": "peaks"},
}
OF_BLOCKS: dict[str, Setting] = {
    "two blocks a unit": {"sharding.blocks_per_unit": 2},
    "a group for reduce-scatter": {"sharding.separate_reduce_scatter_group": True},
}
COMPILED: Setting = {"compile": True}
LLAMA: Setting = {"model": "lm_tiny", "data.seq_len": 32}
OF_LLAMA: tuple[Setting, ...] = (
    {"sharding": "ddp"},
    {"sharding": "per_block"},
    {"sharding": "per_layer"},
    {"sharding": "per_block", "activation_checkpointing": "selective"},
    {"sharding": "per_block", "precision": "bf16_mixed"},
    {"sharding": "per_block", "precision": "bf16_mixed", **COMPILED},
    {"sharding": "per_block", **COMPILED},
)
PRECISIONS = ("fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed", "grad_bf16")
CONTROLS: dict[str, Setting] = {
    "control: gradients added up instead of averaged": {"sharding": "per_block"},
    "control: learning rate 10 % too high": {"sharding": "per_block", "optimizer.lr": 0.0055},
    "control: learning rate doubled, fp16": {"sharding": "per_block", "precision": "fp16", "optimizer.lr": 0.01},
}


def settings(workers: int, cuda: bool) -> Iterator[Setting]:
    """Every setting once, the plainest first."""
    resharding: list[Setting] = [{"reshard_after_forward": name} for name in ("default", "always", "never")]
    sizes = [size for size in range(2, workers) if workers % size == 0][:1] or [workers] * (workers > 1)
    resharding += [{"reshard_after_forward": "to_size", "reshard_after_forward.size": size} for size in sizes]
    yield SHARDINGS["ddp"]
    sharded = [value for name, value in SHARDINGS.items() if name != "ddp"]
    for offload, sharding, reshard in product(("none", "cpu", "cpu_unpinned"), sharded, resharding):
        if offload == "cpu_unpinned" and not cuda and reshard != resharding[0]:
            continue  # nothing is pinned on a CPU: the same code as offload=cpu
        yield {**sharding, "offload": offload, **reshard}
    for sharding, precision in product(("ddp", "per_block"), PRECISIONS[1:]):
        yield {**SHARDINGS[sharding], "precision": precision}
    for sharding, feature in product(("ddp", "per_block"), FEATURES.values()):
        yield {**SHARDINGS[sharding], **feature}
    for feature in OF_BLOCKS.values():
        yield {**SHARDINGS["per_block"], **feature}
    if cuda and importlib.util.find_spec("torchao"):
        yield from ({**SHARDINGS[sharding], "precision": "float8"} for sharding in ("ddp", "per_block"))
    yield {**SHARDINGS["per_block"], "data.loader_workers": 1}
    if workers % 2 == 0:  # of two workers each is a replica
        for sharding in sharded:
            yield {**sharding, "sharding.dp_replicate": 2}
        twice = {"training.grad_accum_steps": 2, "training.sync_each_microbatch": True}
        yield {**SHARDINGS["per_block"], "sharding.dp_replicate": 2, **twice}
    yield from ({**SHARDINGS[sharding], "init": "device"} for sharding in ("root", "per_block"))
    yield from ({**SHARDINGS[sharding], **COMPILED} for sharding in ("ddp", "root", "per_block"))
    yield {**SHARDINGS["per_block"], **COMPILED, **FEATURES["activation checkpointing"]}
    yield from ({**LLAMA, **setting} for setting in OF_LLAMA)


def lines(bench: Bench) -> list[Line]:
    cases = {words(case): case for case in settings(bench.workers, bench.cuda)}
    usual = [
        Line("parity", name, bench.workers, f"losses within {tolerance(case, bench.cuda):g} of the reference", case)
        for name, case in cases.items()
    ]
    controls = [
        Line("parity", name, bench.workers, f"losses apart by {CONTROL_FACTOR:g} tolerances or more", case)
        for name, case in CONTROLS.items()
    ]
    return [*usual[:2], *controls, *usual[2:]]


def tolerance(case: Setting, cuda: bool) -> float:
    if case.get("precision", "fp32") != "fp32":
        return HALF
    return CUDA_FP32 if cuda else CPU_FP32


def full(case: Setting, workers: int) -> Setting:
    """The case with its learning rate, batch and images."""
    batch = 32 if 32 % (2 * workers) == 0 else 4 * workers
    sizes = {"training.global_batch_size": batch, "data.num_train": STEPS * batch, "data.num_val": batch}
    return {**LEARNING, **sizes, **case}


def reference_key(line: Line) -> str:
    """What of a case a float32 run on one process depends on; the other keys must change nothing."""
    wanted = {**line.case, "optimizer.lr": LEARNING["optimizer.lr"]}
    counts = ("model", "optimizer", "data.num", "data.seq")
    setting = {k: v for k, v in full(wanted, line.workers).items() if k.startswith(counts)}
    for key in ("training.global_batch_size", "training.max_grad_norm"):
        setting[key] = full(wanted, line.workers).get(key)
    wrong = "sum" if "added up" in line.setting else ""
    return json.dumps({"setting": setting, "wrong": wrong})


def prepare(lines: Sequence[Line], bench: Bench) -> None:
    """Train each distinct reference."""
    from benchmarks.check_gpu.reference import train_unsharded

    runs = {}
    for key in dict.fromkeys(reference_key(line) for line in lines):
        wanted = json.loads(key)
        runs[key] = asdict(train_unsharded(trial(wanted["setting"]), wanted["wrong"]))
    write_json(bench.prepared / f"references_x{lines[0].workers}.json", runs)


def measure(line: Line, bench: Bench) -> Measured:
    import torch

    torch.backends.cudnn.allow_tf32 = False  # of the first convolution; matrix products have it off by default
    reference = json.loads((bench.prepared / f"references_x{line.workers}.json").read_text())[reference_key(line)]
    if line.case.get("init") == "device":  # a GPU draws other first weights than the reference, for every sharding
        plain = run_trial(full({**SHARDINGS["ddp"], "init": "device"}, line.workers))
        reference = {"losses": plain.losses, "val_loss": plain.metrics["val/loss"]}
    run = run_trial(full(line.case, line.workers))
    losses, val_loss = run.losses, run.metrics["val/loss"]
    expected = [*reference["losses"], reference["val_loss"]]
    apart = max(abs(a - b) for a, b in zip([*losses, val_loss], expected, strict=True))
    limit = tolerance(line.case, bench.cuda)
    passed = apart >= CONTROL_FACTOR * limit if line.setting.startswith("control") else apart <= limit
    return Measured(passed, f"apart by {apart:.1e}", {"apart": apart, "losses": losses, "reference": expected})
