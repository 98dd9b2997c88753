"""Cells of a grid -> trials, as Hydra composes them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

from fsdp_lab.config import all_keys
from fsdp_lab.config.compose import Trial, group_choices, plain, typed_and_used_up
from fsdp_lab.config.conf import OPEN_GROUPS

_KEYS = frozenset(all_keys())


@dataclass
class _Options:
    """The composed options of cells: our part and Hydra's of the config, and whether such keys were checked."""

    own: DictConfig
    hydra: DictConfig
    keys_checked: bool = False


class Composer:
    """Makes the trial of a cell, as Hydra does.

    Cells with the same options of all groups share Hydra's work on these, which is nearly all of it.
    """

    def __init__(self, context: HydraContext, config: DictConfig, parser: OverridesParser, folder: Path) -> None:
        self._loader, self._config, self._folder = context.config_loader, config, folder
        self._by_options: dict[tuple[str, ...], _Options] = {}
        # most words of a cell are those of the cell before it
        self._parse = lru_cache(maxsize=1000)(lambda word: parser.parse_overrides([word])[0])
        self._last: dict[str, Any] = {}

    def __call__(self, overrides: Sequence[str], number: int) -> Trial:
        """Return the trial of a cell.

        Raises:
            HydraException: an override is invalid.
            OmegaConfBaseException: an override is invalid.
        """
        own, options = self._by_parts(overrides) or self._whole(overrides)
        with open_dict(own), flag_override(own, "no_deepcopy_set_nodes", True):
            own.hydra = options.hydra
            own.hydra.job.id = f"{own.hydra.job.name}_{number}"
            own.hydra.job.num = number
        HydraConfig.instance().cfg = own  # type: ignore[assignment]  # which `${hydra:...}` reads
        trial_folder = self._folder / str(own.hydra.sweep.subdir)
        composed, choices = self._shared(plain(own)), group_choices(own)
        HydraConfig.instance().cfg = OmegaConf.create({"hydra": _apart(own)[1]})  # type: ignore[assignment]
        # a value of ours adds no key, so what is checked of one cell holds for all with these options
        config = typed_and_used_up(own, check_keys=not options.keys_checked)
        options.keys_checked = True
        return Trial(number, config, choices, list(overrides), trial_folder, composed)

    def _shared(self, composed: dict[str, Any]) -> dict[str, Any]:
        """Return the same values, sharing equal parts with the previous trial: thousands of trials differ in little."""
        self._last = _with_parts_of(self._last, composed)
        return self._last

    def _whole(self, overrides: Sequence[str]) -> tuple[DictConfig, _Options]:
        """Return our part of a config that Hydra composes as a whole, and the options that it alone has."""
        own, hydra = _apart(self._loader.load_sweep_config(self._config, list(overrides)))
        return own, _Options(own, hydra)

    def _by_parts(self, overrides: Sequence[str]) -> tuple[DictConfig, _Options] | None:
        """Return our part of a config, with values set on the composed options, and these.

        None if only Hydra itself can interpret the overrides, or report the error.
        """
        parsed = [self._parse(word) for word in overrides]
        values = [o for o in parsed if _is_value(o.key_or_group) and o.type is OverrideType.CHANGE]
        options = tuple(o.input_line or "" for o in parsed if o not in values)
        try:
            if options not in self._by_options:
                self._by_options[options] = self._whole(options)[1]
            known = self._by_options[options]
            own, hydra = copy.deepcopy(known.own), known.hydra
            OmegaConf.copy_cache(from_config=self._config, to_config=own)
            for override in values:
                OmegaConf.update(own, override.key_or_group, override.value(), merge=True)
        except (HydraException, OmegaConfBaseException):
            return None
        naming = hydra.job.config.override_dirname
        hydra.overrides.task = list(overrides)
        kept = [override for override in parsed if override.key_or_group not in naming.exclude_keys]
        hydra.job.override_dirname = dirname(kept, naming.item_sep, naming.kv_sep)
        return own, known


def _apart(cfg: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Take Hydra's part out of a composed config: our code does not read it, and it is most of what would be copied."""
    with open_dict(cfg):
        return cfg, cfg.pop("hydra")


def _with_parts_of(before: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with equal values, and equal groups within groups, as the same objects as before."""
    return {
        key: known
        if (known := before.get(key)) == value
        else _with_parts_of(known, value)
        if isinstance(known, dict) and isinstance(value, dict)
        else value
        for key, value in values.items()
    }


def _is_value(key: str) -> bool:
    """Whether an override of this key sets a value, one of ours or an argument of the user's, and chooses no option."""
    return key in _KEYS or key.partition(".")[0] in OPEN_GROUPS


def dirname(overrides: Sequence[Override], item_sep: str, kv_sep: str) -> str:
    """Return the value of `${hydra.job.override_dirname}` for overrides; Hydra's own function is private."""
    return item_sep.join(sorted(override.input_line or "" for override in overrides)).replace("=", kv_sep)
