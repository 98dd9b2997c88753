"""What a command requests from a cluster manager."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import List, Optional  # OmegaConf reads these on every Python that this project supports

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.key import at_least_one, key, positive

_OPTION = re.compile(r"[a-z][a-z-]+(:[^\n]+)?")
# Options that the batch script sets, and what to do instead.
_OURS = {
    "nodes": "set cluster.job.nodes",
    "cpus-per-task": "set cluster.job.cpus_per_node",
    "gpus-per-node": "set cluster.job.gpus_per_node",
    "mem": "set cluster.job.memory_gib_per_node",
    "ntasks-per-node": "leave it out",
    "output": "leave it out: the log lies beside the script",
    "open-mode": "leave it out",
    "requeue": "leave it out, or use no-requeue",
    "signal": "leave it out: the signal lets the sweep save its state before the time limit",
}
_VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[\w./-]+")


class Manager(Enum):
    """Who starts the command: the user, or a cluster manager."""

    none = "none"
    slurm = "slurm"
    kuberay = "kuberay"


@dataclass
class JobConfig:
    """The request to a cluster manager. KubeRay needs `image`, `cpus_per_node` and `memory_gib_per_node`."""

    manager: Manager = key(Manager.none)
    """Cluster manager that runs the command: none, slurm or kuberay; the options of `cluster` set it."""
    submit: bool = key(True)
    """For Slurm: submit the batch script; false: write it only."""
    nodes: int = key(1, at_least_one)
    """Nodes that the job takes; a sweep waits for them."""
    cpus_per_node: Optional[int] = key(None, at_least_one)
    """Cores of each node; null: the manager's default."""
    gpus_per_node: Optional[int] = key(None, at_least_one)
    """GPUs of each node; null: the manager's default."""
    memory_gib_per_node: Optional[float] = key(None, positive, example=32)
    """Memory of each node in GiB; null: the manager's default."""
    sbatch: List[str] = key(lambda: [])
    """For Slurm: more options, such as partition:gpu for --partition=gpu."""
    image: Optional[str] = key(None)
    """For KubeRay: image with Ray and fsdp_lab."""
    volume: Optional[str] = key(None)
    """For KubeRay: <claim>:<path> of a persistent volume claim that all pods mount; the command runs there."""

    @property
    def has_manager(self) -> bool:
        """Whether a cluster manager runs the command, not this process."""
        return self.manager is not Manager.none

    def check(self) -> None:
        """Check the options of `sbatch`, the volume, and that KubeRay has what it needs.

        Raises:
            ConfigError: an item of `sbatch` is not an option, or one that the script sets itself; a key is the other
                manager's; `volume` is not <claim>:<path>; or KubeRay lacks a key.
        """
        for word in self.sbatch:
            if not _OPTION.fullmatch(word):
                raise ConfigError(
                    f"cluster.job.sbatch={word!r} is not a long option of sbatch; write <name>:<value> without "
                    "hyphens, for example cluster.job.sbatch=[partition:gpu,time:08:00:00,exclusive]."
                )
            if remedy := _OURS.get(word.partition(":")[0]):
                raise ConfigError(f"cluster.job.sbatch=[{word}]: the batch script sets this option itself; {remedy}.")
        if self.gpus_per_node is not None and (gpus := [w for w in self.sbatch if w.startswith(("gpus", "gres:gpu"))]):
            raise ConfigError(
                f"cluster.job.sbatch=[{gpus[0]}] and cluster.job.gpus_per_node={self.gpus_per_node} both request GPUs; "
                "keep one."
            )
        names = [word.partition(":")[0] for word in self.sbatch]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"cluster.job.sbatch has {twice[0]} more than once; keep one.")
        if self.sbatch and self.manager is Manager.kuberay:
            raise ConfigError("cluster.job.sbatch is for cluster=slurm; leave it out, or edit the manifest.")
        for name in ("image", "volume"):
            if getattr(self, name) is not None and self.manager is Manager.slurm:
                raise ConfigError(f"cluster.job.{name} is for cluster=kuberay; leave it out.")
        if self.volume is not None and not _VOLUME.fullmatch(self.volume):
            raise ConfigError(
                f"cluster.job.volume={self.volume} is not <claim>:<path>; use for example "
                "cluster.job.volume=shared-claim:/shared."
            )
        needed = ("image", "cpus_per_node", "memory_gib_per_node")
        if self.manager is Manager.kuberay and (lacks := [name for name in needed if getattr(self, name) is None]):
            raise ConfigError(
                f"cluster=kuberay without {' and '.join(f'cluster.job.{name}' for name in lacks)}: a pod needs an "
                "image and limits; add for example cluster.job.image=registry.example.com/fsdp_lab:1 "
                "cluster.job.cpus_per_node=16 cluster.job.memory_gib_per_node=64."
            )
