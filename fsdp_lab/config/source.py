"""The interface of a `model._target_` that knows more than a plain callable."""

from __future__ import annotations

from typing import Any


class ModelSource:
    """A callable that builds models and knows more about its arguments than a signature shows.

    Each method takes the arguments of `__call__`.

    Attributes:
        input_kind: see `KINDS` in `parts.py`; None: any.
    """

    input_kind: str | None = None

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        raise NotImplementedError

    def check(self, *args: Any, **arguments: Any) -> None:
        """Check the arguments, reading nothing larger than a configuration.

        Raises:
            UserError: an argument is invalid.
        """

    def check_files(self, *args: Any, **arguments: Any) -> None:
        """Check that the files that the model needs are on this machine.

        Raises:
            UserError: a file is missing or does not fit the model.
        """

    def load_weights(self, *args: Any, **arguments: Any) -> Any:
        """Return a function that puts other first weights into parameters and buffers by their names.

        None: the constructor's weights are the first.
        """
        return None

    def save(self, *args: Any, **arguments: Any) -> Any:
        """Return a function that writes whole weights into a folder in the model's own format; None without one."""
        return None

    def vocab_size(self, *args: Any, **arguments: Any) -> int | None:
        """Return the number of tokens that the model knows; None for a model that takes no tokens."""
        return None

    def tp_plan(self, *args: Any, **arguments: Any) -> dict[str, str]:
        """Return how tensor parallelism divides modules, see `ModelConfig.tp_plan`; empty: it cannot.

        Raises:
            UserError: the model's own plan cannot be applied.
        """
        return {}

    def tp_sizes(self, *args: Any, **arguments: Any) -> dict[str, int]:
        """Return the arguments that the degree of `tp_plan` must divide."""
        return {}

    def num_positions(self, *args: Any, **arguments: Any) -> int | None:
        """Return the most tokens that a row may have; None: not limited."""
        return None

    def image_sizes(self, *args: Any, **arguments: Any) -> dict[str, int]:
        """Return `image_size`, `num_channels` and `num_classes` of the images that the model takes, where known."""
        return {}
