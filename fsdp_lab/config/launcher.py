"""The environment of a launcher such as torchrun or a PyTorchJob: this command starts its own ranks."""

from __future__ import annotations

import os

from fsdp_lab.config.errors import ConfigError

_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}


def leave_launcher() -> None:
    """Remove a launcher's variables from the environment: with them PyTorch would wait for ranks that never come.

    Raises:
        ConfigError: it started this command several times, and this is not the first.
    """
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank not in ("", "0") and world_size not in ("", "1"):
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={world_size}: a launcher has started this command several times, which starts "
            "its own workers; start it once, without torchrun, or unset RANK. For torchrun there is python -m "
            "fsdp_lab.training."
        )
    for name in [name for name in os.environ if name in _NAMES or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
