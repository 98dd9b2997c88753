"""Checks that a model, a data set and a task fit each other, as far as the config shows.

Each function raises CombinationError if they do not; the message says what fits.
"""

from __future__ import annotations

from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.workload import DataConfig, ModelConfig, TaskConfig, source_of

# Task -> what its inputs are. The other tasks take anything. A model or a data set may have one as its `input_kind`.
KINDS = {"classification": "images", "language": "tokens", "seq2seq": "pairs of texts"}


def check_parts(model: ModelConfig, data: DataConfig, task: TaskConfig) -> None:
    """Check that the model, the data and the task are for the same kind of input. A part that says nothing fits any."""
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
    return f"{group}._target_={part.target}", kind if kind in KINDS.values() else None


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
        name = "num_labels" if "config" in model.arguments else "num_classes"
        raise CombinationError(
            f"model.{name}={has} is less than the {needed} classes of data={data.name}; use model.{name}={needed}.",
        )
