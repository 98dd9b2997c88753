"""What runs every night."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.config.nightly import NightConfig
from fsdp_lab.config.sweep import TrackingConfig


@dataclass(frozen=True)
class Study:
    """What runs every night.

    Attributes:
        folder: its own, below `nightly.folder`.
        arguments: of its sweep, all axes named, the repeats first: so that they lie as far apart in time as they can.
        settings: what all its trials share.
        go_on: the command that goes on with an interrupted night.
        shares_cores: it computes on this machine's cores, so that what others do there is felt.
        storage: where its sweeps are in object storage; None: nowhere.
    """

    name: str
    folder: Path
    nightly: NightConfig
    tracking: TrackingConfig
    arguments: list[str]
    settings: dict[str, Any]
    shares_cores: bool
    go_on: str
    storage: str | None = None

    @property
    def shared(self) -> str | None:
        """The address of its nights, for all machines."""
        return None if self.storage is None else f"{self.storage}/nights/{self.name}"

    @property
    def where(self) -> str:
        """Where its nights are, in words."""
        return str(self.folder) if self.shared is None else f"{self.folder} and {self.shared}"
