"""Checks that a model, a data set and a task fit each other, as far as the config shows.

Each function raises CombinationError if they do not; the message says what fits.
"""

from __future__ import annotations

from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.workload import DataConfig, ModelConfig, TaskConfig, source_of

_SEQ2SEQ = "fsdp_lab.workloads.hf.models.seq2seq"
# What the targets of our models and data sets begin with -> what they are for; those of the user's take anything.
_TARGETS = {
    "fsdp_lab.workloads.language.": "tokens",
    "fsdp_lab.workloads.seq2seq.": "pairs of texts",
    "fsdp_lab.workloads.vision.": "images",
    "fsdp_lab.workloads.hf.models.causal_lm": "tokens",
    _SEQ2SEQ: "pairs of texts",
    "fsdp_lab.workloads.hf.models.image_classification": "images",
}
_TASKS = {"classification": "images", "language": "tokens", "seq2seq": "pairs of texts"}  # the others take anything


def check_parts(model: ModelConfig, data: DataConfig, task: TaskConfig) -> None:
    """Check that the model, the data and the task are for the same kind of input. The user's parts fit anything."""
    parts = [
        _of_target("model", model),
        _of_target("data", data),
        (f"task={task.name}", _TASKS.get(task.name)),
    ]
    if task.loss_chunks > 1 and source_of(model) is not None:
        raise CombinationError(
            f"task.loss_chunks={task.loss_chunks}: models of transformers compute all logits at once; use "
            "task.loss_chunks=1.",
        )
    if task.name == "model_loss" and model.target == _SEQ2SEQ:
        raise CombinationError(
            f"task=model_loss: model._target_={_SEQ2SEQ} does not compute a loss; use task=seq2seq.",
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
    target = part.target or ""
    return f"{group}._target_={target}", next((of for path, of in _TARGETS.items() if target.startswith(path)), None)


def check_vocab_size(model: ModelConfig, data: DataConfig, needed: int | None) -> None:
    """Check that a user's model with an argument `vocab_size` covers all tokens of the data.

    Args:
        model: checked if its vocabulary size is known.
        data: of which a key is named.
        needed: every token is less; None: not known.
    """
    if not isinstance(needed, int) or (has := model.vocab_size()) is None or has >= needed:
        return
    name = next((name for name in ("tokenizer", "vocab_size") if data.arguments.get(name) is not None), "_target_")
    fewer = f"a tokenizer with at most {has} tokens" if name == "tokenizer" else "data with fewer"
    raise CombinationError(
        f"model.vocab_size={has} is less than the {needed} tokens of data.{name}={data.to_keys()[name]}; use "
        f"model.vocab_size={needed}, or {fewer}.",
    )


def check_rows(model: ModelConfig, data: DataConfig) -> None:
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
        name = "num_classes" if model.is_image_classifier else "num_labels"
        raise CombinationError(
            f"model.{name}={has} is less than the {needed} classes of data={data.name}; use model.{name}={needed}.",
        )
