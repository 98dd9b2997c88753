"""Whether a model, a data set and a task fit each other, as far as that can be told from the config."""

from __future__ import annotations

from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.workload import DataConfig, DataGroup, ModelConfig, ModelGroup, TaskConfig, UserData, UserModel

_LANGUAGE = "fsdp_lab.workloads.language."  # where our models and data sets of tokens are
_TASKS = {"classification": "images", "language": "tokens"}  # the others take anything


def check_parts(model: ModelGroup, data: DataGroup, task: TaskConfig) -> None:
    """Refuse images where there should be tokens, and the other way round. Parts of the user's take anything.

    Raises:
        CombinationError: with what fits.
    """
    parts = [
        (f"model.family={model.family}", "images") if isinstance(model, ModelConfig) else _of_language("model", model),
        (f"data.name={data.name}", "images") if isinstance(data, DataConfig) else _of_language("data", data),
        (f"task={task.name}", _TASKS.get(task.name)),
    ]
    known = [(typed, of) for typed, of in parts if of is not None]
    if len({of for _, of in known}) > 1:
        raise CombinationError(
            f"{', '.join(f'{typed} is for {of}' for typed, of in known)}: these do not fit each other. For images use "
            "data=digits, fashion_mnist or synthetic with model=vit_tiny or mlp and task=classification, for tokens "
            "data=pydoc, text or synthetic_tokens with model=lm_tiny or llama3_1b and task=language.",
            keys=("model", "data", "task"),
        )


def _of_language(group: str, part: ModelGroup | DataGroup) -> tuple[str, str | None]:
    target = part.target if isinstance(part, UserModel | UserData) else None
    return f"{group}._target_={target}", "tokens" if (target or "").startswith(_LANGUAGE) else None
