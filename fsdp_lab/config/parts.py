"""Checks that a model, a data set and a task fit each other, as far as the config shows."""

from __future__ import annotations

import importlib

from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.registry import module_of
from fsdp_lab.config.workload import (
    DataConfig,
    DataGroup,
    ModelConfig,
    ModelGroup,
    TaskConfig,
    UserData,
    UserModel,
    source_of,
)

_SEQ2SEQ = "fsdp_lab.workloads.hf.models.seq2seq"
# What the targets of our models and data sets begin with -> what they are for; those of the user's take anything.
_TARGETS = {
    "fsdp_lab.workloads.language.": "tokens",
    "fsdp_lab.workloads.seq2seq.": "pairs of texts",
    "fsdp_lab.workloads.hf.models.causal_lm": "tokens",
    _SEQ2SEQ: "pairs of texts",
    "fsdp_lab.workloads.hf.models.image_classification": "images",
}
_TASKS = {"classification": "images", "language": "tokens", "seq2seq": "pairs of texts"}  # the others take anything


def check_parts(model: ModelGroup, data: DataGroup, task: TaskConfig) -> None:
    """Check that the model, the data and the task are for the same kind of input. The user's parts fit anything.

    Raises:
        CombinationError: images with tokens, for example; the message lists what fits.
    """
    parts = [
        (f"model.family={model.family}", "images") if isinstance(model, ModelConfig) else _of_target("model", model),
        (f"data.name={data.name}", "images") if isinstance(data, DataConfig) else _of_target("data", data),
        (f"task={task.name}", _TASKS.get(task.name)),
    ]
    if task.loss_chunks > 1 and source_of(model) is not None:
        raise CombinationError(
            f"task.loss_chunks={task.loss_chunks}: models of transformers compute all logits at once; use "
            "task.loss_chunks=1.",
        )
    if task.name == "model_loss" and isinstance(model, UserModel) and model.target == _SEQ2SEQ:
        raise CombinationError(
            f"task=model_loss: model._target_={_SEQ2SEQ} does not compute a loss; use task=seq2seq.",
        )
    known = [(typed, of) for typed, of in parts if of is not None]
    if len({of for _, of in known}) > 1:
        raise CombinationError(
            f"{', '.join(f'{typed} is for {of}' for typed, of in known)}: these do not fit together. Images: "
            "data=digits, fashion_mnist or synthetic, model=vit_tiny or mlp, task=classification. Tokens: "
            "data=pydoc, text or synthetic_tokens, model=lm_tiny or llama3_1b, task=language. Pairs of texts: "
            "data=pydoc_summaries or wikihow, model=hf_seq2seq, task=seq2seq.",
        )


def _of_target(group: str, part: ModelGroup | DataGroup) -> tuple[str, str | None]:
    target = (part.target if isinstance(part, UserModel | UserData) else None) or ""
    return f"{group}._target_={target}", next((of for path, of in _TARGETS.items() if target.startswith(path)), None)


def check_vocab_size(model: ModelGroup, data: DataGroup, needed: int | None) -> None:
    """Check that a user's model with an argument `vocab_size` covers all tokens of the data.

    Args:
        model: checked if its vocabulary size is known.
        data: checked if it is a `UserData`.
        needed: every token is less; None: not known.

    Raises:
        CombinationError: the model knows fewer tokens.
    """
    if not isinstance(data, UserData) or not isinstance(needed, int):
        return
    has = model.vocab_size()
    if has is None or has >= needed:
        return
    name = next((name for name in ("tokenizer", "vocab_size") if data.arguments.get(name) is not None), "_target_")
    fewer = f"a tokenizer with at most {has} tokens" if name == "tokenizer" else "data with fewer"
    raise CombinationError(
        f"model.vocab_size={has} is less than the {needed} tokens of data.{name}={data.to_keys()[name]}; use "
        f"model.vocab_size={needed}, or {fewer}.",
    )


def check_rows(model: ModelGroup, data: DataGroup) -> None:
    """Check that the data's rows are not longer than the positions of the model.

    Raises:
        CombinationError: the rows are longer.
    """
    source = source_of(model)
    if source is None or not isinstance(model, UserModel) or not isinstance(data, UserData) or data.target is None:
        return
    has = source.num_positions(**model.arguments)
    for name in ("seq_len", "source_len", "target_len"):
        length = data.arguments.get(name)
        if has is not None and isinstance(length, int) and length > has:
            raise CombinationError(
                f"data.{name}={length} is more than the model's {has} positions; use at most data.{name}={has}, or "
                f"model.max_position_embeddings={length}.",
            )


def check_images(model: ModelGroup, data: DataGroup) -> None:
    """Check that a model takes images of our data's shape, which are not resized, and has enough classes.

    Raises:
        CombinationError: the size, the channels or the number of classes do not fit.
    """
    source = source_of(model)
    if source is None or not isinstance(model, UserModel) or not isinstance(data, DataConfig):
        return
    takes = source.image_shape(**model.arguments)
    images = importlib.import_module(module_of("data.name", data.name)).build_source(data, ModelConfig())
    channels, size, _ = images.image_shape
    if takes is not None and takes != (channels, size):
        raise CombinationError(
            f"the model takes images of {takes[1]}x{takes[1]} with {takes[0]} channels, and data={data.name} has "
            f"{size}x{size} with {channels}; use model.image_size={size} model.num_channels={channels}, with a "
            "model.patch_size that divides it, or your own data with data._target_.",
        )
    labels = source.num_labels(**model.arguments)
    if labels is not None and labels < images.num_classes:
        raise CombinationError(
            f"model.num_labels={labels} is less than the {images.num_classes} classes of data={data.name}; use "
            f"model.num_labels={images.num_classes}.",
        )
