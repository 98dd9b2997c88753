"""A setting as a configuration file of Hugging Face's accelerate, for `accelerate launch --config_file`.

Keys: `accelerate.commands.config.config_args.ClusterConfig` and how `accelerate.commands.launch` uses its parts;
behaviour: `accelerate.utils.fsdp_utils.fsdp2_prepare_model` of accelerate 1.15.
"""

from __future__ import annotations

import textwrap
from typing import Any

from fsdp_lab.config.parallel import Dtype, Granularity, OffloadTarget
from fsdp_lab.config.training import ActivationCheckpointing
from fsdp_lab.takehome.setup import Setup

_MIXED = {Dtype.float32: "no", Dtype.bfloat16: "bf16", Dtype.float16: "fp16"}


def to_accelerate(setup: Setup) -> str:
    """Return the YAML file, with the settings that it cannot express as comments at its top."""
    import yaml  # the rest of this package needs Python alone

    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if setup.is_ddp else "FSDP",
        "num_machines": 1,
        "num_processes": setup.world_size,
        "mixed_precision": _MIXED[setup.config.precision.param_dtype],
        "use_cpu": False,
    }
    if not setup.is_ddp:
        values["fsdp_config"] = _fsdp(setup)
        if setup.dp_replicate > 1:
            values["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": setup.dp_replicate,
                "parallelism_config_dp_shard_size": setup.dp_shard,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            }
    if setup.config.compile:
        values["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    head = [setup.name, "accelerate launch --config_file use_accelerate.yaml train.py", *_left_out(setup)]
    comments = "".join(f"# {line}\n" for note in head for line in textwrap.wrap(note, 116, break_on_hyphens=False))
    return comments + yaml.safe_dump(values, sort_keys=False)


def _fsdp(setup: Setup) -> dict[str, Any]:
    config = setup.config
    values: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": setup.reshard != "never",
        "fsdp_offload_params": config.offload.target is not OffloadTarget.none,
        "fsdp_activation_checkpointing": config.activation_checkpointing is ActivationCheckpointing.full,
        "fsdp_cpu_ram_efficient_loading": False,  # each process starts with the weights that it built
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    names = [path.rpartition(":")[2].rpartition(".")[2] for path in setup.layout.unit_classes]
    if not setup.layout.units:
        values["fsdp_auto_wrap_policy"] = "NO_WRAP"
    elif names:
        values["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        values["fsdp_transformer_layer_cls_to_wrap"] = ",".join(names)
    elif config.sharding.granularity is Granularity.size_based:
        values["fsdp_auto_wrap_policy"] = "SIZE_BASED_WRAP"
        values["fsdp_min_num_params"] = (config.sharding.min_num_params or 1) - 1  # accelerate's limit is exclusive
    else:
        values["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        blocks = [path.rpartition(":")[2].rpartition(".")[2] for path in setup.layout.block_classes]
        values["fsdp_transformer_layer_cls_to_wrap"] = ",".join(blocks)
    return values


def _left_out(setup: Setup) -> list[str]:
    """Return the settings that the file cannot express, a sentence each."""
    config, notes = setup.config, []
    if not setup.is_ddp:
        notes += [*_precision_notes(setup), *_sharding_notes(setup)]
    elif config.precision.reduce_dtype is not Dtype.float32:
        hook = f"{_MIXED[config.precision.reduce_dtype]}".upper()
        notes.append(
            f"Not in this file: gradients are reduced in {config.precision.reduce_dtype.value}; pass kwargs_handlers="
            f"[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.{hook})] to Accelerator."
        )
    if config.precision.loss_scaling:
        sizes = f"init_scale={config.precision.init_scale}, growth_interval={config.precision.growth_interval}"
        notes.append(f"Loss scaling: accelerate's GradScaler by mixed_precision=fp16; GradScalerKwargs({sizes}).")
    if config.precision.float8:
        notes.append(
            "Not in this file: float8 products; call torchao's convert_to_float8_training with its recipe rowwise."
        )
    mode = config.activation_checkpointing
    if mode not in (ActivationCheckpointing.none, ActivationCheckpointing.full):
        notes.append(f"Not in this file: activation_checkpointing={mode.name}; accelerate takes all blocks or none.")
    if config.compile_memory_budget is not None:
        setting = f"torch._functorch.config.activation_memory_budget = {config.compile_memory_budget}"
        notes.append(f"Not in this file: {setting}")
    training = config.training
    if training.grad_accum_steps > 1:
        each = ", sync_each_batch=True" if training.sync_each_microbatch else ""
        plugin = f"GradientAccumulationPlugin(num_steps={training.grad_accum_steps}{each})"
        notes.append(f"Not in this file: Accelerator(gradient_accumulation_plugin={plugin}).")
    if training.max_grad_norm is not None:
        notes.append(f"Not in this file: accelerator.clip_grad_norm_(model.parameters(), {training.max_grad_norm}).")
    notes.append("Not in this file: optimizer, learning rate, batch size and seed; set them in your script.")
    return notes


def _precision_notes(setup: Setup) -> list[str]:
    precision = setup.config.precision
    param, reduce = precision.param_dtype, precision.reduce_dtype
    if param is reduce:
        return []
    return [
        f"Not in this file: gradients reduced in {reduce.value}; mixed_precision sets one type for both. In code:",
        f"  policy = MixedPrecisionPolicy(param_dtype=torch.{param.value}, reduce_dtype=torch.{reduce.value})",
        "  accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy=policy))",
    ]


def _sharding_notes(setup: Setup) -> list[str]:
    config, notes = setup.config, []
    reshard, sharding = config.reshard_after_forward, config.sharding
    if setup.reshard == "always":
        notes.append(
            "the root's parameters, freed after the forward pass; accelerate keeps parameters outside of units."
        )
    if setup.reshard == "to_size":
        notes.append(f"reshard_after_forward={reshard.size}, a number of ranks; accelerate takes true or false.")
    if config.offload.target is OffloadTarget.cpu_unpinned:
        notes.append("offloading to memory that is not pinned; accelerate pins it.")
    if sharding.forward_prefetch is not None or sharding.backward_prefetch is not None:
        notes.append(
            "the trial's explicit prefetching: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch."
        )
    if sharding.separate_reduce_scatter_group:
        notes.append("a process group for reduce-scatter: model.set_separate_reduce_scatter_group().")
    if sharding.blocks_per_unit > 1:
        notes.append(f"sharding.blocks_per_unit={sharding.blocks_per_unit}; accelerate makes a unit of each block.")
    if setup.layout.units and not setup.layout.unit_classes:
        by_size = sharding.granularity is Granularity.size_based
        instead = "accelerate also counts the parameters of inner units" if by_size else "the file has the blocks"
        notes.append(f"the trial's units, {', '.join(setup.layout.units)}; {instead}.")
    notes.append("more units of accelerate: a model's get_input_embeddings() and get_output_embeddings().")
    return [f"Not in this file: {note}" for note in notes]
