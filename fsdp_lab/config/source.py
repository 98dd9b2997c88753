"""What `model._target_` may name where a plain callable says too little."""

from __future__ import annotations

from typing import Any


class ModelSource:
    """A callable that builds models and that knows more of its arguments than a signature says.

    Each method takes the arguments of `__call__`.
    """

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """Return the model."""
        raise NotImplementedError

    def check(self, *args: Any, **arguments: Any) -> None:
        """
        Raises:
            UserError: an argument without a meaning. Nothing larger than a configuration is read for that.
        """

    def check_files(self, *args: Any, **arguments: Any) -> None:
        """
        Raises:
            UserError: files that are needed are not on this machine, or do not fit the model.
        """

    def load_weights(self, *args: Any, **arguments: Any) -> Any:
        """Return a function that puts other first weights into parameters and buffers by their names; None where those
        of the constructor are the first."""
        return None

    def save(self, *args: Any, **arguments: Any) -> Any:
        """Return a function that writes whole weights into a folder, in a format of the model's own; None where it has
        none."""
        return None

    def vocab_size(self, *args: Any, **arguments: Any) -> int | None:
        """Return how many tokens the model knows; None where it takes none."""
        return None

    def num_positions(self, *args: Any, **arguments: Any) -> int | None:
        """Return how many tokens a row may have; None where that is not limited."""
        return None

    def image_shape(self, *args: Any, **arguments: Any) -> tuple[int, int] | None:
        """Return the channels and the height of the images that the model takes; None where it takes none, or any."""
        return None

    def num_labels(self, *args: Any, **arguments: Any) -> int | None:
        """Return how many classes of images the model tells apart; None where it takes none."""
        return None
