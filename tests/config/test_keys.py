"""What each key counts towards, listed by hand: a new key is added here, so that somebody decides."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import pytest
from omegaconf import OmegaConf

from fsdp_lab.config import (
    ConfigError,
    NightlyConfig,
    SweepConfig,
    TrialConfig,
    all_keys,
    check_ranges,
    forecast_settings,
    part,
    settings,
    to_dict,
)
from fsdp_lab.config.compare import CELLS, CHECKPOINT, NIGHTS, PARAMS, STARTS, STEP
from fsdp_lab.config.key import key, keys_of
from fsdp_lab.config.nightly import NightConfig
from fsdp_lab.config.options import values_implied_by_option
from fsdp_lab.config.sweep import ReportConfig
from fsdp_lab.config.training import OptimizerConfig
from fsdp_lab.config.workload import DataConfig, ModelConfig

# Another value makes another trial of a grid (cells), is refused by a resume (starts) and by the trial's own checkpoint
# (checkpoint), is another study (nights), asks for a forecast of its own (forecast), is an MLflow parameter (param).
COUNTS = {
    "cells starts checkpoint nights forecast param": """
        sharding.granularity sharding.dp_replicate sharding.min_num_params sharding.blocks_per_unit
        sharding.separate_reduce_scatter_group sharding.forward_prefetch sharding.backward_prefetch
        precision.param_dtype precision.reduce_dtype precision.loss_scaling precision.float8 precision.tf32
        offload.target reshard_after_forward.policy reshard_after_forward.size model._target_ model.image_size
        model.num_channels
        model.patch_size model.num_layers model.num_heads model.hidden_dim model.mlp_dim model.num_classes
        model.block_classes model.forward_methods data._target_ data.collate_fn task.name task.loss
        task.loss_chunks task.unit optimizer._target_ optimizer.name optimizer.weight_decay optimizer.momentum
        optimizer.implementation
        training.global_batch_size training.grad_accum_steps training.sync_each_microbatch training.max_grad_norm
        activation_checkpointing activation_checkpointing_every compile
    """,
    "cells starts checkpoint nights param": """
        precision.init_scale precision.growth_interval data.num_train data.num_val task.metrics
        optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.scale_lr lr_schedule.name
        lr_schedule.warmup_steps lr_schedule.min_lr_ratio lr_schedule.step_epochs lr_schedule.gamma training.seed init
    """,
    "cells starts nights forecast param": "model.flops_per_unit",
    "cells starts nights param": """
        data.loader_workers training.epochs training.max_steps training.timing_warmup_steps checkpoint.mode
        checkpoint.every_epochs checkpoint.keep_last checkpoint.keep_best checkpoint.resume_from
        checkpoint.any_torch_version checkpoint.export_best export profile_trace memory_profile
    """,
    "cells starts checkpoint param": "repeat",
    "starts param": """
        forecast.enabled forecast.device forecast.capacity_gib forecast.network_gbit forecast.prune forecast.keep
        forecast.largest_microbatch forecast.folder
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
    """,
    "cells starts param": """
        cluster.num_workers cluster.cpus_per_worker cluster.placement cluster.storage_path tracking.uri
        tracking.experiment
    """,
    "cells param": """
        cluster.address cluster.max_failures cluster.wait_timeout_s tracking.patience_s tracking.ui
    """,
}
EXPECTED = {name: set(counts.split()) for counts, names in COUNTS.items() for name in names.split()}
KEYS = keys_of(NightlyConfig)
NAMED_BY_OPTION = {
    "sharding=per_block": {"sharding.granularity"},
    "precision=fp16": {
        f"precision.{name}" for name in ("param_dtype", "reduce_dtype", "loss_scaling", "float8", "tf32")
    },
    "offload=cpu": {"offload.target"},
    "reshard_after_forward=never": {"reshard_after_forward.policy"},
    "model=mlp": {"model._target_"},
    "data=digits": {"data._target_"},
    "task=classification": {"task.name"},
    "optimizer=sgd": {"optimizer.name"},
    "lr_schedule=step": {"lr_schedule.name"},
    "search=optuna": {"search.name"},
    "scheduler=asha": {"scheduler.name"},
}


def test_every_key_is_decided():
    assert sorted(all_keys()) == sorted(EXPECTED)


@pytest.mark.parametrize(
    ("between", "ignored"),
    [("cells", CELLS), ("starts", STARTS), ("checkpoint", CHECKPOINT), ("nights", NIGHTS), ("param", PARAMS)],
)
def test_what_counts_in_a_comparison(between: str, ignored: Sequence[str]):
    assert set(settings(NightlyConfig(), ignored)) == {k for k, v in EXPECTED.items() if between in v}


def test_what_counts_for_a_forecast():
    # one process holds no more for more workers as such: their number is asked for apart, and is not a key here
    counting = set(forecast_settings(NightlyConfig(), 2)) - {"cluster.num_workers"}
    assert counting == {k for k, v in EXPECTED.items() if "forecast" in v}


def test_what_cannot_change_the_speed_of_a_step():
    assert set(KEYS) - set(settings(NightlyConfig(), STEP)) == {
        "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.scale_lr", "training.seed", "repeat", "init",
        "lr_schedule.name", "lr_schedule.warmup_steps", "lr_schedule.min_lr_ratio", "lr_schedule.step_epochs",
        "lr_schedule.gamma",
    }  # fmt: skip


def test_a_key_of_a_sweep_does_not_keep_a_trial_from_its_checkpoint():
    assert settings(NightlyConfig(), CHECKPOINT) == settings(TrialConfig(), CHECKPOINT)


@pytest.mark.parametrize("option", NAMED_BY_OPTION)
def test_what_an_option_says_by_its_name(option: str):
    assert set(values_implied_by_option(*option.split("="))) == NAMED_BY_OPTION[option]


def test_what_options_state_is_all_that_is_marked():
    marked = {name for name, known in KEYS.items() if known.named_by_option}
    assert marked == set().union(*NAMED_BY_OPTION.values())


def test_every_number_has_a_rule():
    def numbers(config_class: type, prefix: str) -> typing.Iterator[str]:
        for name, hint in typing.get_type_hints(config_class).items():
            if dataclasses.is_dataclass(hint):
                yield from numbers(typing.cast(type, hint), f"{prefix}{name}.")
            elif {int, float} & {hint, *typing.get_args(hint)}:
                yield f"{prefix}{name}"

    assert [name for name in numbers(NightlyConfig, "") if KEYS[name].rule is None] == []


def test_a_part_is_the_class_and_no_more():
    config = NightlyConfig(repeat=3, trial_timeout_s=7.0, nightly=NightConfig(cron="0 3 * * *"))
    sweep, trial = part(config, SweepConfig), part(config, TrialConfig)
    assert type(sweep) is SweepConfig and sweep.trial_timeout_s == 7.0 and "nightly" not in to_dict(sweep)
    assert type(trial) is TrialConfig and trial.repeat == 3 and list(to_dict(trial))[-1] == "memory_profile"
    assert "secret" not in str(sweep)


def test_a_group_is_reported_with_its_place_on_the_command_line():
    with pytest.raises(ConfigError, match=r"^report\.speed_tolerance=1\.5 is outside"):
        check_ranges(ReportConfig(speed_tolerance=1.5), "report.")


def test_a_field_without_a_decision_is_refused():
    @dataclasses.dataclass
    class Careless:
        decided: int = key(1)
        forgotten: int = 2

    with pytest.raises(KeyError):
        keys_of(Careless)


def test_hydra_sees_types_and_defaults_alone():
    node = OmegaConf.structured(NightlyConfig)
    values = OmegaConf.to_container(node, enum_to_str=True)
    values["model"] = to_dict(ModelConfig(**values["model"]))  # groups that take any key
    values["data"] = to_dict(DataConfig(**values["data"]))
    values["optimizer"] = to_dict(OptimizerConfig(**values["optimizer"]))
    assert values == to_dict(NightlyConfig())
    assert OmegaConf.get_type(node) is NightlyConfig
