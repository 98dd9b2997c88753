"""Each key: what it counts towards, listed by hand so that somebody decides of a new one; how its value is read, and
which key, option or device is suggested for a mistyped one."""

from __future__ import annotations

import pytest

from fsdp_lab.config import NightlyConfig, all_keys, forecast_settings, settings
from fsdp_lab.config.compare import CELLS, CHECKPOINT, NIGHTS, PARAMS, STARTS, STEP
from fsdp_lab.config.options import known_devices, options_of
from fsdp_lab.config.suggest import closest

# Another value makes another trial of a grid (cells), is refused by a resume (starts) and by the trial's own checkpoint
# (checkpoint), is another study (nights), asks for a forecast of its own (forecast), is an MLflow parameter (param).
COUNTS = {
    "cells starts checkpoint nights forecast param": """
        sharding.api sharding.granularity sharding.dp_replicate sharding.tp sharding.min_num_params
        sharding.blocks_per_unit sharding.embeddings sharding.limit_all_gathers
        sharding.separate_reduce_scatter_group sharding.find_unused_parameters sharding.forward_prefetch
        sharding.backward_prefetch
        precision.param_dtype precision.reduce_dtype precision.storage_dtype precision.loss_scaling
        precision.float8 precision.tf32
        offload.target reshard_after_forward.policy reshard_after_forward.size model._target_ model.image_size
        model.num_channels model.patch_size model.num_layers model.num_heads model.hidden_dim model.mlp_dim
        model.num_classes model.block_classes model.forward_methods model.tp_plan data._target_ data.collate_fn
        data.loader task.name task.loss task.loss_chunks task.unit task.step task.optimizers task.after_step
        optimizer._target_ optimizer.name
        optimizer.weight_decay optimizer.momentum optimizer.implementation optimizer.groups optimizer.decay
        optimizer.embedding_lr
        training.global_batch_size training.grad_accum_steps training.sync_each_microbatch training.max_grad_norm
        activation_checkpointing activation_checkpointing_every activation_offload compile compile_loss
    """,
    "cells starts checkpoint nights param": """
        precision.init_scale precision.growth_interval data.num_train data.num_val task.metrics training.epoch_steps
        optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.scale_lr lr_schedule._target_
        lr_schedule.name lr_schedule.warmup_steps lr_schedule.min_lr_ratio lr_schedule.step_epochs lr_schedule.gamma
        training.seed init
    """,
    "cells starts nights forecast param": "model.flops_per_unit data.example_batch",
    "cells starts nights param": """
        data.loader_workers data.val_batch_size training.epochs training.max_steps training.timing_warmup_steps
        checkpoint.mode checkpoint.every_epochs checkpoint.keep_last checkpoint.keep_best checkpoint.resume_from
        checkpoint.any_torch_version checkpoint.export_best export profile_trace memory_profile
    """,
    "cells starts checkpoint param": "repeat",
    "starts param": """
        forecast.enabled forecast.device forecast.capacity_gib forecast.network_gbit forecast.prune forecast.keep
        forecast.solve forecast.usd_per_gpu_hour forecast.tokens forecast.lengths forecast.folder
    """,
    "starts nights param": """
        engine search.name search.seed scheduler.name scheduler.metric scheduler.grace_epochs scheduler.reduction_factor
        objective
    """,
    "nights param": "search.num_trials",
    "starts": "repeats",
    "param": "trial_timeout_s",
    "": """
        dry_run resume resume_failed resume_anyway report.loss_tolerance report.speed_tolerance nightly.cron
        nightly.timezone nightly.repeats nightly.significance nightly.tolerance.peak_memory
        nightly.tolerance.samples_per_s nightly.tolerance.loss nightly.tolerance.data_wait_share
        nightly.tolerance.forecast_error nightly.tolerance.speed_forecast_error nightly.folder nightly.keep
        check.name check.limit_s check.keys
    """,
    "cells starts param": """
        cluster.num_workers cluster.cpus_per_worker cluster.placement cluster.gpus_per_node cluster.storage_path
        tracking.uri tracking.experiment
    """,
    "cells param": """
        cluster.address cluster.max_failures cluster.wait_timeout_s tracking.patience_s tracking.ui
    """,
}
EXPECTED = {name: set(counts.split()) for counts, names in COUNTS.items() for name in names.split()}


def test_every_key_counts_where_it_is_listed():
    ignored = {"cells": CELLS, "starts": STARTS, "checkpoint": CHECKPOINT, "nights": NIGHTS, "param": PARAMS}
    found = {between: set(settings(NightlyConfig(), keys)) for between, keys in ignored.items()}
    # one process holds no more for more workers as such: their number is asked for apart, and is not a key here
    found["forecast"] = set(forecast_settings(NightlyConfig(), 2)) - {"cluster.num_workers"}
    assert found == {between: {key for key, counts in EXPECTED.items() if between in counts} for between in found}
    assert sorted(all_keys()) == sorted(EXPECTED)


def test_what_cannot_change_the_speed_of_a_step():
    assert set(EXPECTED) - set(settings(NightlyConfig(), STEP)) == {
        "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.scale_lr", "training.seed", "repeat", "init",
        "lr_schedule.name", "lr_schedule.warmup_steps", "lr_schedule.min_lr_ratio", "lr_schedule.step_epochs",
        "lr_schedule.gamma", "lr_schedule._target_",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("group", "meant"),
    [
        # as users of other trainers type them; after an equal sign nothing: like none
        ("", "optimizer.learning_rate=optimizer.lr learning_rate=optimizer.lr training.lr=optimizer.lr bogus= "
             "optimizer.LR=optimizer.lr optimizer.beta3=optimizer.beta2 batch_size=training.global_batch_size "
             "num_workers=cluster.num_workers cluster.gpus=cluster.num_workers memory_profil=memory_profile"),
        ("precision", "bfloat16=bf16 BF16=bf16 16-mixed=fp16_mixed fp8=float8 bf16-true=bf16_pure"),
        ("optimizer", "adamW=adamw AdamW=adamw"),
        ("model", "llama3_7b=llama3_8b llama3_65b=llama3_70b vit_l_14=vit_l_16 ViT-L-16=vit_l_16 resnet="),
        ("data", "fashion-mnist=fashion_mnist"),
        ("device", "h100=h100_sxm H100_SXM=h100_sxm a100=a100_80gb H100-PCIe=h100_pcie mi300=mi300x l40=l40s h20=h200 "
                   "v100=v100_32gb a10=a10g rtx4090=rtx_4090 A6000-Ada=rtx_6000_ada"),
    ],
)  # fmt: skip
def test_the_key_option_or_device_that_was_meant_is_suggested(group: str, meant: str):
    """By case and other names before letters."""
    names = known_devices() if group == "device" else options_of(group) if group else all_keys()
    pairs = dict(pair.split("=") for pair in meant.split())
    assert {typed: closest(typed, names) or "" for typed in pairs} == pairs
