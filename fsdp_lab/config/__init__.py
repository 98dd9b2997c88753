"""The configuration: every key with its rules. Imports no heavy library.

`TrialConfig` determines the training. `SweepConfig` adds the keys of a sweep, `NightlyConfig` those of its nights.
Start with `key.py`, the metadata of a key, `trial.py`, the groups of a trial, and `compose.py`, Hydra's config -> ours.
"""

from fsdp_lab.config.address import is_address
from fsdp_lab.config.compare import effective_settings, forecast_settings, may_change_speed, settings
from fsdp_lab.config.describe import all_keys
from fsdp_lab.config.errors import CombinationError, ConfigError, ModelError, UserError
from fsdp_lab.config.key import check_ranges
from fsdp_lab.config.machine import default_num_workers, workers_of
from fsdp_lab.config.nightly import NightlyConfig
from fsdp_lab.config.options import conf_dir
from fsdp_lab.config.serialize import flatten, from_dict, part, to_dict
from fsdp_lab.config.sweep import SweepConfig, objectives, stops_on
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.config.words import read_words, split_config_dir, with_custom

__all__ = [
    "CombinationError", "ConfigError", "ModelError", "NightlyConfig", "SweepConfig", "TrialConfig", "UserError",
    "all_keys", "check_ranges", "conf_dir",
    "default_num_workers", "effective_settings", "flatten", "forecast_settings", "from_dict",
    "is_address", "may_change_speed", "objectives", "part", "read_words", "settings",
    "split_config_dir", "stops_on", "to_dict", "with_custom", "workers_of",
]  # fmt: skip
