"""What each key counts towards, listed by hand: a new key is a line here, so that somebody decides."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from omegaconf import OmegaConf

from fsdp_lab.config import (
    Between,
    ConfigError,
    NightlyConfig,
    SweepConfig,
    TrialConfig,
    all_keys,
    check_ranges,
    memory_settings,
    part,
    settings,
    speed_settings,
    to_dict,
)
from fsdp_lab.config.key import key, keys_of
from fsdp_lab.config.nightly import NightConfig
from fsdp_lab.config.options import values_implied_by_option
from fsdp_lab.config.sweep import ReportConfig
from fsdp_lab.config.training import OptimizerConfig
from fsdp_lab.config.workload import DataConfig, ModelConfig

# Another value makes another trial of a grid (cells), is refused by a resume (starts) and by the trial's own checkpoint
# (checkpoint), is another study (nights), asks for a forecast of its own (memory), is an MLflow parameter (param).
COUNTS = """
sharding.granularity                 cells starts checkpoint nights memory param
sharding.dp_replicate                cells starts checkpoint nights memory param
sharding.min_num_params              cells starts checkpoint nights memory param
sharding.blocks_per_unit             cells starts checkpoint nights memory param
sharding.separate_reduce_scatter_group cells starts checkpoint nights memory param
sharding.forward_prefetch            cells starts checkpoint nights memory param
sharding.backward_prefetch           cells starts checkpoint nights memory param
precision.param_dtype                cells starts checkpoint nights memory param
precision.reduce_dtype               cells starts checkpoint nights memory param
precision.loss_scaling               cells starts checkpoint nights memory param
precision.float8                     cells starts checkpoint nights memory param
precision.init_scale                 cells starts checkpoint nights param
precision.growth_interval            cells starts checkpoint nights param
offload.target                       cells starts checkpoint nights memory param
reshard_after_forward.policy         cells starts checkpoint nights memory param
reshard_after_forward.size           cells starts checkpoint nights memory param
model._target_                       cells starts checkpoint nights memory param
model.image_size                     cells starts checkpoint nights memory param
model.num_channels                   cells starts checkpoint nights memory param
model.patch_size                     cells starts checkpoint nights memory param
model.num_layers                     cells starts checkpoint nights memory param
model.num_heads                      cells starts checkpoint nights memory param
model.hidden_dim                     cells starts checkpoint nights memory param
model.mlp_dim                        cells starts checkpoint nights memory param
model.num_classes                    cells starts checkpoint nights memory param
model.block_classes                  cells starts checkpoint nights memory param
model.flops_per_unit                 cells starts checkpoint nights memory param
data._target_                        cells starts checkpoint nights memory param
data.collate_fn                      cells starts checkpoint nights memory param
data.num_train                       cells starts checkpoint nights param
data.num_val                         cells starts checkpoint nights param
data.loader_workers                  cells starts nights param
task.name                            cells starts checkpoint nights memory param
task.loss                            cells starts checkpoint nights memory param
task.metrics                         cells starts checkpoint nights param
task.unit                            cells starts checkpoint nights param
task.loss_chunks                     cells starts checkpoint nights memory param
optimizer._target_                   cells starts checkpoint nights memory param
optimizer.name                       cells starts checkpoint nights memory param
optimizer.lr                         cells starts checkpoint nights param
optimizer.weight_decay               cells starts checkpoint nights memory param
optimizer.beta1                      cells starts checkpoint nights param
optimizer.beta2                      cells starts checkpoint nights param
optimizer.momentum                   cells starts checkpoint nights memory param
optimizer.implementation             cells starts checkpoint nights memory param
optimizer.scale_lr                   cells starts checkpoint nights param
lr_schedule.name                     cells starts checkpoint nights param
lr_schedule.warmup_steps             cells starts checkpoint nights param
lr_schedule.min_lr_ratio             cells starts checkpoint nights param
lr_schedule.step_epochs              cells starts checkpoint nights param
lr_schedule.gamma                    cells starts checkpoint nights param
training.epochs                      cells starts nights param
training.max_steps                   cells starts nights param
training.global_batch_size           cells starts checkpoint nights memory param
training.grad_accum_steps            cells starts checkpoint nights memory param
training.sync_each_microbatch        cells starts checkpoint nights memory param
training.seed                        cells starts checkpoint nights param
training.max_grad_norm               cells starts checkpoint nights memory param
training.timing_warmup_steps         cells starts nights param
repeat                               cells starts checkpoint param
init                                 cells starts checkpoint nights param
activation_checkpointing             cells starts checkpoint nights memory param
activation_checkpointing_every       cells starts checkpoint nights memory param
compile                              cells starts checkpoint nights memory param
checkpoint.mode                      cells starts nights param
checkpoint.every_epochs              cells starts nights param
checkpoint.keep_last                 cells starts nights param
checkpoint.keep_best                 cells starts nights param
checkpoint.resume_from               cells starts nights param
checkpoint.any_torch_version         cells starts nights param
checkpoint.export_best               cells starts nights param
export                               cells starts nights param
profile_trace                        cells starts nights param
memory_profile                       cells starts nights param
forecast.enabled                     starts param
forecast.device                      starts param
forecast.capacity_gib                starts param
forecast.network_gbit                starts param
forecast.prune                       starts param
forecast.keep                        starts param
forecast.largest_microbatch          starts param
forecast.folder                      starts param
engine                               starts nights param
search.name                          starts nights param
search.num_trials                    nights param
search.seed                          starts nights param
scheduler.name                       starts nights param
scheduler.metric                     starts nights param
scheduler.grace_epochs               starts nights param
scheduler.reduction_factor           starts nights param
repeats                              starts
objective                            starts nights param
trial_timeout_s                      param
dry_run
resume
resume_failed
resume_anyway
cluster.num_workers                  cells starts param
cluster.cpus_per_worker              cells starts param
cluster.placement                    cells starts param
cluster.address                      cells param
cluster.storage_path                 cells starts param
cluster.max_failures                 cells param
cluster.wait_timeout_s               cells param
tracking.uri                         cells starts param
tracking.experiment                  cells starts param
tracking.patience_s                  cells param
tracking.ui                          cells param
report.loss_tolerance
report.speed_tolerance
nightly.cron
nightly.timezone
nightly.repeats
nightly.significance
nightly.tolerance.peak_memory
nightly.tolerance.samples_per_s
nightly.tolerance.loss
nightly.tolerance.data_wait_share
nightly.tolerance.forecast_error
nightly.tolerance.speed_forecast_error
nightly.folder
nightly.keep
"""
EXPECTED = {line.split()[0]: set(line.split()[1:]) for line in COUNTS.strip().splitlines()}
KEYS = keys_of(NightlyConfig)
NAMED_BY_OPTION = {
    "sharding=per_block": {"sharding.granularity"},
    "precision=fp16": {"precision.param_dtype", "precision.reduce_dtype", "precision.loss_scaling", "precision.float8"},
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
    assert all_keys() == list(EXPECTED)


@pytest.mark.parametrize("between", ["cells", "starts", "checkpoint", "nights"])
def test_what_counts_in_a_comparison(between: str):
    assert set(settings(NightlyConfig(), Between[between.upper()])) == {k for k, v in EXPECTED.items() if between in v}


def test_what_counts_for_memory():
    # one process holds no more for more workers as such: their number is asked for apart, and is not a key here
    counting = set(memory_settings(NightlyConfig(), 2)) - {"cluster.num_workers"}
    assert counting == {k for k, v in EXPECTED.items() if "memory" in v}


def test_what_cannot_change_the_speed_of_a_step():
    assert {name for name, known in KEYS.items() if not known.changes_speed} == {
        "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.scale_lr", "training.seed", "repeat", "init",
        "lr_schedule.name", "lr_schedule.warmup_steps", "lr_schedule.min_lr_ratio", "lr_schedule.step_epochs",
        "lr_schedule.gamma",
    }  # fmt: skip


def test_forecasts_of_speed_are_shared_only_by_trials_that_agree_in_all_that_changes_it():
    counting = set(memory_settings(NightlyConfig(), 2)) | set(speed_settings(NightlyConfig()))
    still = {name for name, known in keys_of(TrialConfig).items() if not known.changes_speed}
    assert set(keys_of(TrialConfig)) - counting <= still
    assert {"compile", "task.metrics"} <= counting and "training.seed" not in counting


def test_what_is_a_parameter():
    assert {name for name, known in KEYS.items() if known.is_param} == {k for k, v in EXPECTED.items() if "param" in v}


def test_a_key_of_a_sweep_does_not_keep_a_trial_from_its_checkpoint():
    assert settings(NightlyConfig(), Between.CHECKPOINT) == settings(TrialConfig(), Between.CHECKPOINT)


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
