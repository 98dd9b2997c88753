"""The axes that `-m` would sweep, for a command that trains one trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from fsdp_lab.config import conf_dir
from fsdp_lab.sweep.grid import all_overrides


def axes_of(parser: OverridesParser, params: Mapping[str, str | None], typed: Sequence[str]) -> list[str]:
    """Return the axes as they are typed, such as `sharding=ddp,per_block`.

    Args:
        parser: of overrides.
        params: `hydra.sweeper.params`; typed axes replace them.
        typed: the overrides of the command line.
    """
    given = all_overrides(parser, params, typed).values()
    return [override.input_line or "" for override in given if override.is_sweep_override()]


def preset_note(hydra: DictConfig) -> str | None:
    """Return a line about the axes that a preset adds, for a trial alone; None if it adds none.

    Args:
        hydra: Hydra's own node of the composed config.
    """
    preset, params = hydra.runtime.choices.get("experiment"), dict(hydra.sweeper.params)
    if preset in (None, "null"):
        return None
    parser = OverridesParser.create()
    ours = dict(OmegaConf.load(conf_dir() / "config.yaml").hydra.sweeper.params)
    its_own = axes_of(parser, {key: value for key, value in params.items() if value != ours.get(key)}, [])
    axes = axes_of(parser, params, list(hydra.overrides.task))
    return f"experiment={preset} has axes ({', '.join(axes)}); add -m to sweep them" if its_own and axes else None
