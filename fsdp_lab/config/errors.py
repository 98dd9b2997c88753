"""The errors that a user can cause and mend. Everything else is a bug and keeps its traceback."""

from __future__ import annotations


class UserError(Exception):
    """A message for the user: what is wrong, the rule, and what to do. Shown without a traceback."""


class ConfigError(UserError, ValueError):
    """A value in the configuration that breaks a rule on its own."""


class CombinationError(ConfigError):
    """Values that are fine alone and have no meaning together.

    A single trial that has one is refused; a grid leaves such a cell out and says why, where an axis sets one
    of `keys`: what the values are called on the command line.
    """

    def __init__(self, message: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys
