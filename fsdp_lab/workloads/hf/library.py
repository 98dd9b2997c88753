"""The package transformers: an optional extra, and slow to import."""

from __future__ import annotations

from functools import cache
from typing import Any

from fsdp_lab.config.errors import UserError


@cache
def transformers() -> Any:
    """Return the package, without warnings and progress bars: the driver and each rank would print them.

    Raises:
        UserError: it is not installed.
    """
    try:
        import safetensors  # noqa: F401 (whether it is there)
        import transformers
    except ImportError as error:
        raise UserError(
            f"models of Hugging Face need the package {error.name}, which is not installed: "
            "pip install -e '.[hf]' in the clone."
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
