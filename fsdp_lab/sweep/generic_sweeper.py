"""`hydra/sweeper=fsdp_lab` in an application that is not ours: the same grid, run by Hydra's own launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from fsdp_lab.sweep.grid import enumerate_grid


def run_generic_sweep(
    sweeper: Sweeper,
    context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    defaults: Mapping[str, str | None],
    arguments: Sequence[str],
) -> Any:
    """Run every cell of the grid as one batch.

    Returns:
        what Hydra's own sweeper returns: a list of batches of `JobReturn`.
    """
    parser = OverridesParser.create(config_loader=context.config_loader)
    cells = enumerate_grid(parser, defaults, arguments)
    folder = Path(config.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "multirun.yaml")
    sweeper.validate_batch_is_legal(cells)  # type: ignore[attr-defined]
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=task_function, config=config
    )
    return [launcher.launch(cells, initial_job_idx=0)]
