"""The study that runs every night."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_lab.config.nightly import NightConfig
from fsdp_lab.config.sweep import ClusterConfig, TrackingConfig


@dataclass(frozen=True)
class Study:
    """The sweep that runs every night.

    Attributes:
        name: of the study.
        folder: its own, below `nightly.folder`.
        nightly: the configuration of its nights.
        tracking: where it logs.
        arguments: of its sweep. All axes are named, the repeats first, so that they are as far apart in time as
            possible.
        settings: the ones that all its trials share.
        shares_cores: it computes on this machine's cores, so other processes affect it.
        resume_command: the command that resumes an interrupted night.
        storage: the address of its sweeps in object storage; None: none.
        cluster: where they run.
    """

    name: str
    folder: Path
    nightly: NightConfig
    tracking: TrackingConfig
    arguments: list[str]
    settings: dict[str, Any]
    shares_cores: bool
    resume_command: str
    storage: str | None = None
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def shared(self) -> str | None:
        """The address of its nights, for all machines; None without storage."""
        return None if self.storage is None else f"{self.storage}/nights/{self.name}"

    @property
    def elsewhere(self) -> str:
        """The keys that give another study nights of its own.

        Nights here and in storage are read together: one of the two anew would still find the old baseline.
        """
        return "nightly.folder=..." if self.storage is None else "cluster.storage_path=... and nightly.folder=..."

    @property
    def where(self) -> str:
        """The location of its nights, in words."""
        return str(self.folder) if self.shared is None else f"{self.folder} and {self.shared}"
