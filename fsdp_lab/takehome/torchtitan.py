"""A setting as a job's TOML file of torchtitan, for its own models.

Keys: `torchtitan/config/job_config.py` of torchtitan 0.2.2, the newest release. Its main branch has replaced TOML by
functions that return a `Trainer.Config`, in which the sections `parallelism`, `training` and `compile` are attributes.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

from fsdp_lab.config.parallel import Dtype, Granularity, OffloadTarget
from fsdp_lab.config.training import (
    ActivationCheckpointing,
    LrScheduleName,
    OptimizerImplementation,
    OptimizerName,
    StateDtype,
)
from fsdp_lab.takehome.setup import Setup

VERSION = "0.2.2"
_IMPLEMENTATION = {
    OptimizerImplementation.fused: "fused",
    OptimizerImplementation.foreach: "foreach",
    OptimizerImplementation.for_loop: "for-loop",
}


def to_torchtitan(setup: Setup) -> str:
    """Return the TOML file, with the settings that it cannot express as comments at its top."""
    head = [
        setup.name,
        f"torchtitan {VERSION}: CONFIG_FILE=use_torchtitan.toml ./run_train.sh, with your [model] added. Its main "
        "branch takes no TOML: set the values of parallelism and compile, and enable_cpu_offload and "
        "mixed_precision_* of training, in a Trainer.Config.",
        *(f"Not in this file: {note}" for note in _left_out(setup)),
    ]
    lines = [f"# {line}" for note in head for line in textwrap.wrap(note, 116, break_on_hyphens=False)]
    for section, values in _sections(setup).items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "".join(f"{line}\n" for line in lines)


def _sections(setup: Setup) -> dict[str, dict[str, Any]]:
    config, training = setup.config, setup.config.training
    reshard = {"none": "default", "to_size": "always"}.get(setup.reshard, setup.reshard)
    half = config.precision.param_dtype is not Dtype.float32
    data = getattr(config.data, "arguments", {})
    return {
        "parallelism": {
            "data_parallel_replicate_degree": setup.dp_replicate,
            "data_parallel_shard_degree": setup.dp_shard,
            "fsdp_reshard_after_forward": reshard,
        },
        "training": {
            "local_batch_size": setup.microbatch_size,
            "global_batch_size": training.global_batch_size,
            **({"seq_len": data["seq_len"]} if "seq_len" in data else {}),
            "steps": setup.num_steps,
            "max_norm": training.max_grad_norm or 1e30,  # torchtitan always clips
            "enable_cpu_offload": config.offload.target is not OffloadTarget.none,
            "mixed_precision_param": "bfloat16" if half else "float32",
            "mixed_precision_reduce": "float32",
        },
        "activation_checkpoint": _checkpointing(setup),
        "compile": {"enable": config.compile, "components": ["model"]},
        "optimizer": _optimizer(setup),
        "lr_scheduler": _schedule(setup),
        "debug": {"seed": training.seed},
    }


def _checkpointing(setup: Setup) -> dict[str, Any]:
    if setup.config.compile_memory_budget is not None:
        return {"mode": "memory_budget", "memory_budget": setup.config.compile_memory_budget}
    match setup.config.activation_checkpointing:
        case ActivationCheckpointing.selective:
            return {"mode": "selective", "selective_ac_option": "op"}
        case ActivationCheckpointing.every_n:
            return {"mode": "selective", "selective_ac_option": str(setup.config.activation_checkpointing_every)}
        case mode:
            return {"mode": mode.name}


def _optimizer(setup: Setup) -> dict[str, Any]:
    optimizer = setup.config.optimizer
    chosen = optimizer.chosen_implementation(setup.config.precision.loss_scaling)
    return {
        "name": "Adam" if optimizer.name is OptimizerName.adam else "AdamW",
        "lr": setup.lr,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
        "weight_decay": optimizer.weight_decay,
        "implementation": _IMPLEMENTATION[chosen],
    }


def _schedule(setup: Setup) -> dict[str, Any]:
    schedule = setup.config.lr_schedule
    values: dict[str, Any] = {"warmup_steps": schedule.warmup_steps}
    if schedule.name is LrScheduleName.cosine:
        return {**values, "decay_type": "cosine", "min_lr_factor": schedule.min_lr_ratio}
    return {**values, "decay_ratio": 0.0}


def _left_out(setup: Setup) -> list[str]:
    """Return the settings that torchtitan cannot express, or handles in another way."""
    config, notes = setup.config, []
    precision, sharding = config.precision, config.sharding
    if precision.param_dtype is Dtype.float16:
        notes.append(
            "float16 and loss scaling; torchtitan computes in bfloat16 or float32, and the file says bfloat16."
        )
    if precision.float8:
        notes.append("float8 products; torchtitan has its own section for float8 linear layers.")
    if precision.reduce_dtype is not Dtype.float32:
        notes.append(f"gradients reduced in {precision.reduce_dtype.value}; torchtitan reduces in float32.")
    if setup.layout.units and sharding.granularity is not Granularity.per_block:
        notes.append(
            f"sharding={sharding.granularity.value}; torchtitan shards per block, with the embedding and the head."
        )
    elif not setup.is_ddp and not setup.layout.units:
        notes.append("sharding=root; torchtitan shards per block, with the embedding and the head.")
    elif not setup.is_ddp:
        notes.append(
            "units: besides the blocks, torchtitan makes units of the embedding, and of the last norm with the head."
        )
    if sharding.separate_reduce_scatter_group:
        notes.append("a process group for reduce-scatter: model.set_separate_reduce_scatter_group().")
    if sharding.blocks_per_unit > 1:
        notes.append(f"sharding.blocks_per_unit={sharding.blocks_per_unit}; torchtitan makes a unit of each block.")
    if setup.reshard == "to_size":
        notes.append(
            f"reshard_after_forward={config.reshard_after_forward.size}, a number of ranks; the file says always."
        )
    if config.offload.target is OffloadTarget.cpu_unpinned:
        notes.append("offloading to memory that is not pinned; torchtitan pins it.")
    if sharding.forward_prefetch is not None or sharding.backward_prefetch is not None:
        notes.append("the trial's explicit prefetching.")
    if config.training.grad_accum_steps > 1 and not config.training.sync_each_microbatch:
        notes.append("gradients reduced once per step; torchtitan reduces them after each microbatch.")
    if config.optimizer.name is OptimizerName.sgd:
        notes.append("SGD; torchtitan has Adam and AdamW.")
    if config.optimizer.state_dtype is StateDtype.bf16:
        notes.append("Adam's moments in bfloat16; this version of torchtitan keeps them in float32.")
    if config.lr_schedule.name is LrScheduleName.step:
        notes.append("a learning rate that falls in steps.")
    if config.training.max_grad_norm is None:
        notes.append("no clipping; torchtitan always clips, so the file sets a limit that no norm reaches.")
    notes.append("your model and data set: torchtitan trains its own models, by [model] name and flavor.")
    return notes
