"""Cells of a grid -> trials, as Hydra composes them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fsdp_lab.compose import Trial, group_choices, typed_config
from fsdp_lab.config import all_keys

_KEYS = frozenset(all_keys())


class Composer:
    """Makes the trial of a cell, as Hydra does. Cells with the same options of all groups share Hydra's work on these,
    which is nearly all of it."""

    def __init__(self, context: HydraContext, config: DictConfig, parser: OverridesParser, folder: Path) -> None:
        self._loader, self._config, self._parser, self._folder = context.config_loader, config, parser, folder
        self._by_options: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str], number: int) -> Trial:
        """
        Raises:
            HydraException, OmegaConfBaseException: an override that cannot be.
        """
        cfg = self._by_parts(overrides)
        if cfg is None:
            cfg = self._loader.load_sweep_config(self._config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = f"{cfg.hydra.job.name}_{number}"
            cfg.hydra.job.num = number
        trial_folder = self._folder / str(cfg.hydra.sweep.subdir)
        return Trial(number, typed_config(cfg), group_choices(cfg), list(overrides), trial_folder, cfg)

    def _by_parts(self, overrides: Sequence[str]) -> DictConfig | None:
        """The values set on what the options give; None where only Hydra itself can tell what is meant, or say what
        is wrong."""
        parsed = self._parser.parse_overrides(list(overrides))
        values = [o for o in parsed if _is_value(o.key_or_group) and o.type is OverrideType.CHANGE]
        options = tuple(o.input_line or "" for o in parsed if o not in values)
        try:
            if options not in self._by_options:
                self._by_options[options] = self._loader.load_sweep_config(self._config, list(options))
            cfg = copy.deepcopy(self._by_options[options])
            OmegaConf.copy_cache(from_config=self._config, to_config=cfg)
            for override in values:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        except (HydraException, OmegaConfBaseException):
            return None
        naming = cfg.hydra.job.config.override_dirname
        cfg.hydra.overrides.task = list(overrides)
        kept = [override for override in parsed if override.key_or_group not in naming.exclude_keys]
        cfg.hydra.job.override_dirname = dirname(kept, naming.item_sep, naming.kv_sep)
        return cfg


def _is_value(key: str) -> bool:
    """Whether an override of this key sets a value, one of ours or an argument of the user's, and chooses no option."""
    return key in _KEYS or key.startswith(("model.", "data."))


def dirname(overrides: Sequence[Override], item_sep: str, kv_sep: str) -> str:
    """What Hydra makes of overrides for `${hydra.job.override_dirname}`; its own function is private."""
    return item_sep.join(sorted(override.input_line or "" for override in overrides)).replace("=", kv_sep)
