"""The class by which Hydra finds the sweeper. Hydra imports this file at every start: keep it light.

It is loaded under no module name, so annotations here must be real types, not strings.
"""

import sys
from dataclasses import dataclass, field
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclass
class FsdpLabSweeperConf:
    """The options of the sweeper.

    Attributes:
        params: the axes swept by default, and their values; null removes an axis.
    """

    _target_: str = "hydra_plugins.fsdp_lab_sweeper.sweeper.FsdpLabSweeper"
    params: dict[str, Optional[str]] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="fsdp_lab", node=FsdpLabSweeperConf, provider="fsdp_lab")


class FsdpLabSweeper(Sweeper):
    """The sweeper of `-m`. The work is in `fsdp_lab.sweep`."""

    def __init__(self, params: dict[str, Optional[str]]) -> None:
        self.params = dict(params)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        """Run a sweep of fsdp_lab.

        Raises:
            ConfigError: another Hydra application uses this sweeper.
        """
        from fsdp_lab.config import ConfigError, NightlyConfig

        if not issubclass(OmegaConf.get_type(self.config) or object, NightlyConfig):
            raise ConfigError("hydra/sweeper=fsdp_lab sweeps only fsdp_lab's configuration; use hydra/sweeper=basic.")
        from fsdp_lab.sweep.command import Multirun
        from fsdp_lab.sweep.start import run

        if code := run(Multirun(self.hydra_context, self.config, self.params, arguments)):
            sys.exit(code)
