"""The errors that a user can cause and fix. Every other exception is a bug and keeps its traceback."""

from __future__ import annotations


class UserError(Exception):
    """A message for the user: what is wrong, the rule, and the remedy. Shown without a traceback."""


class ModelError(UserError):
    """A model or a loss that the configuration cannot train on any machine."""


class ConfigError(UserError, ValueError):
    """A value in the configuration that breaks a rule on its own."""


class CombinationError(ConfigError):
    """Values that are valid alone but not together.

    A single trial fails with it. A grid skips such a cell and reports the reason.
    """
