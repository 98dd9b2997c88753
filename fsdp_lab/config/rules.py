"""The rules between the keys of a trial, in the order in which they are applied.

Each function raises ConfigError for an invalid value, and CombinationError for values that are invalid together.
"""

from __future__ import annotations

from fsdp_lab.config.axes import AXES
from fsdp_lab.config.axes.base import refuse
from fsdp_lab.config.axes.embeddings import Embeddings
from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.key import check_ranges
from fsdp_lab.config.options import path_of
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.target import (
    check_arguments,
    check_loss,
    check_nested,
    check_signature,
    given_to,
    import_callable,
    import_object,
)
from fsdp_lab.config.training import (
    CheckpointConfig,
    CheckpointMode,
    Decay,
    LrScheduleConfig,
    LrScheduleName,
    OptimizerConfig,
    OptimizerImplementation,
    OptimizerName,
    TrainingConfig,
)
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.config.workload import DataConfig, ModelConfig, ModelSource, TaskConfig, needed_target, source_of

# Task -> the kind of its inputs. Other tasks accept any. A model or a data set may name one as its `input_kind`.
KINDS = {"classification": "images", "language": "tokens", "seq2seq": "pairs of texts"}

LOADER_ARGUMENTS = ("split", "batch_size", "rank", "world_size", "seed")  # with which `data.loader` is called


def check_trial(trial: TrialConfig, num_workers: int) -> None:
    """Check every value and combination that determines the training.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.
    """
    check_ranges(trial)
    _check_model(trial.model)
    _check_data(trial.data, trial.training)
    _check_task(trial.task)
    ranks = Ranks.of(trial.sharding, num_workers)
    for axis in AXES:
        axis.check(trial, ranks)
    _check_batch(trial, ranks)
    _check_optimizer(trial.optimizer)
    _check_lr_schedule(trial.lr_schedule)
    _check_export(trial.checkpoint)
    _check_fused(trial)
    _check_parts(trial.model, trial.data, trial.task)
    _check_step(trial)


def check_files(trial: TrialConfig) -> None:
    """Check that data and weights are on this machine and fit each other.

    Raises:
        UserError: a file is missing.
        CombinationError: the data do not fit the model.
    """
    _check_rows(trial.model, trial.data)
    if (source := source_of(trial.model)) is not None:
        source.check_files(**trial.model.arguments)
    trial.data.check_files()
    check_classes(trial.model, trial.data)
    check_vocab_size(trial.model, trial.data, trial.data.ask("least_vocab_size"))


def _check_model(model: ModelConfig) -> None:
    function = model.function()
    check_arguments(function, needed_target(model.target, "model"), "model", model.arguments)
    check_nested(model.arguments, "model")
    if isinstance(function, ModelSource):
        function.check(**model.arguments)
    for path in model.block_classes or ():
        if not isinstance(import_object(path, "model.block_classes"), type):
            raise ConfigError(f"model.block_classes={path} is not a class; name the class of the repeated block.")


def _check_data(data: DataConfig, training: TrainingConfig) -> None:
    if data.loader is not None:
        _check_loader(data)
    elif training.epoch_steps is not None:
        raise CombinationError(
            f"training.epoch_steps={training.epoch_steps} without data.loader: an epoch of a data set is all of it; "
            "use data.num_train, or training.max_steps."
        )
    elif (function := data.function()) is not None:
        check_arguments(function, str(data.target), "data", data.arguments, given=("split",))
    check_nested(data.arguments, "data")
    if data.example_batch is not None:
        function = import_callable(data.example_batch, "data.example_batch")
        check_arguments(function, data.example_batch, "data", data.arguments, ("size",), "example_batch")
    if data.collate_fn is not None:
        import_callable(data.collate_fn, "data.collate_fn")


def _check_loader(data: DataConfig) -> None:
    unused = {
        "data._target_": (data.target, "both give batches; use data=custom"),
        **{
            f"data.{name}": (getattr(data, name), "it has no effect on batches of your own; leave it out")
            for name in ("collate_fn", "num_train", "num_val", "val_batch_size", "loader_workers")
        },
    }
    for name, (value, why) in unused.items():
        if value is not None:
            raise CombinationError(f"data.loader={data.loader} with {name}={value}: {why}.")
    check_arguments(data.function(), str(data.loader), "data", data.arguments, LOADER_ARGUMENTS, "loader")


def _check_task(task: TaskConfig) -> None:
    path_of("task.name", task.name)
    if (task.name == "custom") != (task.loss is not None):
        raise CombinationError(
            f"task={task.name} with task.loss={task.loss or 'null'}: task.loss requires task=custom, and the reverse.",
        )
    if task.loss_chunks > 1 and task.name != "language":
        raise CombinationError(
            f"task.loss_chunks={task.loss_chunks} with task={task.name}: only task=language computes its loss in "
            "parts; use task.loss_chunks=1.",
        )
    for name in ("loss", "metrics"):
        if path := getattr(task, name):
            check_loss(path, f"task.{name}")
    if task.step is None and task.optimizers is not None:
        raise CombinationError(
            f"task.optimizers={task.optimizers} without task.step: set task.step, too, or for one loss use "
            "optimizer=custom with optimizer._target_."
        )
    if task.step:
        if task.name != "custom":
            raise CombinationError(f"task.step={task.step} with task={task.name}: use task=custom.")
        check_signature(task.step, "task.step", ("parts", "run"))
    if task.optimizers:
        check_signature(task.optimizers, "task.optimizers", ("parts", "lr"))
    if task.after_step:
        check_signature(task.after_step, "task.after_step", ("parts", "step"))


def _check_step(trial: TrialConfig) -> None:
    optimizer, task = trial.optimizer, trial.task
    if task.step is not None and trial.sharding.embeddings is Embeddings.own:
        raise CombinationError(
            f"sharding.embeddings=own with task.step={task.step}: each part of the model is a unit; use "
            "sharding.embeddings=root."
        )
    if task.optimizers is not None:
        typed, plain = optimizer.to_keys(), OptimizerConfig().to_keys()
        for name in sorted((typed.keys() | plain.keys()) - {"lr", "scale_lr"}):
            if typed.get(name) != plain.get(name):
                raise CombinationError(
                    f"optimizer.{name} with task.optimizers={task.optimizers}, which gets the parts and optimizer.lr, "
                    "and sets all else; leave it out."
                )


def _check_batch(trial: TrialConfig, ranks: Ranks) -> None:
    training = trial.training
    parts = ranks.dp * training.grad_accum_steps
    if training.global_batch_size % parts:
        below = training.global_batch_size // parts * parts
        choices = f"{below} or {below + parts}" if below else f"{parts}"
        raise CombinationError(
            f"training.global_batch_size={training.global_batch_size} is not divisible by {ranks.shown('tp')} times "
            f"training.grad_accum_steps={training.grad_accum_steps} = {parts}; use for example {choices}.",
        )


def check_epoch(trial: TrialConfig, num_workers: int) -> None:
    """Check that an epoch has a step; a forecast does not need one.

    Raises:
        CombinationError: the global batch is larger than `data.num_train`.
    """
    samples, size = trial.data.num_train, trial.training.global_batch_size
    if samples is not None and samples < size:
        most = samples - samples % (Ranks.of(trial.sharding, num_workers).dp * trial.training.grad_accum_steps)
        raise CombinationError(
            f"training.global_batch_size={size} is more than data.num_train={samples} samples; use "
            f"{f'at most {most}, or ' if most else ''}data.num_train={size} or more."
        )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.groups is not None:
        import_callable(optimizer.groups, "optimizer.groups")
    if optimizer.target is None and optimizer.name is OptimizerName.custom:
        raise ConfigError("optimizer=custom: optimizer._target_ is not set; write package.module.name.")
    if optimizer.target is not None:
        if optimizer.name is not OptimizerName.custom:
            raise CombinationError(
                f"optimizer._target_={optimizer.target} with optimizer={optimizer.name.name}: use optimizer=custom."
            )
        function = import_callable(optimizer.target, "optimizer._target_")
        given = (given_to(function),)
        check_arguments(function, optimizer.target, "optimizer", optimizer.users_arguments, given=given)
        check_nested(optimizer.arguments, "optimizer")
        return
    if optimizer.groups is not None:
        own = {
            "optimizer.decay=matrices": (optimizer.decay is Decay.matrices, "the function chooses what decays"),
            "optimizer.embedding_lr": (optimizer.embedding_lr is not None, "the function chooses the rates"),
        }
        refuse("optimizer.groups", own, "; set one of the two.")
    if optimizer.name is not OptimizerName.sgd and optimizer.momentum:
        raise CombinationError(
            f"optimizer.momentum={optimizer.momentum} with optimizer={optimizer.name.name}: momentum belongs to "
            "sgd; use optimizer=sgd, or optimizer.beta1 for Adam.",
        )


def _check_lr_schedule(schedule: LrScheduleConfig) -> None:
    if schedule.target is None:
        if schedule.name is LrScheduleName.custom:
            raise ConfigError("lr_schedule=custom: lr_schedule._target_ is not set; write package.module.name.")
        return
    if schedule.name is not LrScheduleName.custom:
        raise CombinationError(
            f"lr_schedule._target_={schedule.target} with lr_schedule={schedule.name.name}: use lr_schedule=custom."
        )
    function = import_callable(schedule.target, "lr_schedule._target_")
    given = ("optimizer", *schedule.takes_steps())
    check_arguments(function, schedule.target, "lr_schedule", schedule.arguments, given=given)
    check_nested(schedule.arguments, "lr_schedule")


def _check_export(checkpoint: CheckpointConfig) -> None:
    if not checkpoint.export_best:
        return
    why = "there is no best checkpoint to export; use checkpoint.mode=sync and checkpoint.keep_best=true"
    lacks = {
        "checkpoint.mode=off": (checkpoint.mode is CheckpointMode["off"], why),
        "checkpoint.keep_best=false": (not checkpoint.keep_best, why),
    }
    refuse("checkpoint.export_best=true", lacks, ", or checkpoint.export_best=false.")


def _check_fused(trial: TrialConfig) -> None:
    if trial.optimizer.implementation is not OptimizerImplementation.fused:
        return
    is_sgd = trial.optimizer.name is OptimizerName.sgd and trial.sharding.kind != "ddp"
    lacks = {
        "optimizer=sgd": (is_sgd, "PyTorch has no fused SGD for sharded parameters"),
        "precision.loss_scaling=true": (
            trial.precision.loss_scaling,
            "fused optimizers cannot unscale sharded gradients",
        ),
    }
    refuse("optimizer.implementation=fused", lacks, "; use optimizer.implementation=auto or foreach.")


def _check_parts(model: ModelConfig, data: DataConfig, task: TaskConfig) -> None:
    """Check that the model, the data and the task have the same kind of input. A part without a kind fits any."""
    parts = [
        _of_target("model", model),
        _of_target("data", data),
        (f"task={task.name}", KINDS.get(task.name)),
    ]
    if task.loss_chunks > 1 and source_of(model) is not None:
        raise CombinationError(
            f"task.loss_chunks={task.loss_chunks}: models of transformers compute all logits at once; use "
            "task.loss_chunks=1.",
        )
    if task.name == "model_loss" and source_of(model) is not None and parts[0][1] == KINDS["seq2seq"]:
        raise CombinationError(
            f"task=model_loss: model._target_={model.target} does not compute a loss; use task=seq2seq.",
        )
    known = [(typed, of) for typed, of in parts if of is not None]
    if len({of for _, of in known}) > 1:
        raise CombinationError(
            f"{', '.join(f'{typed} is for {of}' for typed, of in known)}: these do not fit together. Images: "
            "data=digits, fashion_mnist or synthetic, model=vit_tiny or mlp, task=classification. Tokens: "
            "data=pydoc or synthetic_tokens, model=lm_tiny or llama3_1b, task=language. Pairs of texts: "
            "data=pydoc_summaries or wikihow, model=hf_seq2seq, task=seq2seq.",
        )


def _of_target(group: str, part: ModelConfig | DataConfig) -> tuple[str, str | None]:
    kind = getattr(part.function(), "input_kind", None)
    return getattr(part, "typed", f"{group}._target_={part.target}"), kind if kind in KINDS.values() else None


def check_vocab_size(model: ModelConfig, data: DataConfig, needed: int | None) -> None:
    """Check that the vocabulary of a user's model with an argument `vocab_size` covers all tokens of the data.

    Args:
        model: not checked if its vocabulary size is unknown.
        data: the message names one of its keys.
        needed: larger than every token; None: not known.
    """
    if not isinstance(needed, int) or (has := model.vocab_size()) is None or has >= needed:
        return
    name = next((name for name in ("tokenizer", "vocab_size") if data.arguments.get(name) is not None), "")
    name = name or ("loader" if data.loader else "_target_")
    fewer = f"a tokenizer with at most {has} tokens" if name == "tokenizer" else "data with fewer"
    raise CombinationError(
        f"model.vocab_size={has} is less than the {needed} tokens of data.{name}={data.to_keys()[name]}; use "
        f"model.vocab_size={needed}, or {fewer}.",
    )


def _check_rows(model: ModelConfig, data: DataConfig) -> None:
    """Check that the data's rows are not longer than the positions of the model."""
    if (source := source_of(model)) is None:
        return
    has = source.num_positions(**model.arguments)
    for name in ("seq_len", "source_len", "target_len"):
        length = data.arguments.get(name)
        if has is not None and isinstance(length, int) and length > has:
            raise CombinationError(
                f"data.{name}={length} is more than the model's {has} positions; use at most data.{name}={has}, or "
                f"model.max_position_embeddings={length}.",
            )


def check_classes(model: ModelConfig, data: DataConfig) -> None:
    """Check that a model of images has enough classes."""
    has, needed = model.sizes().get("num_classes"), data.ask("least_num_classes", model)
    if has is not None and needed is not None and has < needed:
        name = "num_labels" if "config" in model.arguments else "num_classes"
        raise CombinationError(
            f"model.{name}={has} is less than the {needed} classes of data={data.name}; use model.{name}={needed}.",
        )
