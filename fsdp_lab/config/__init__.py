"""The configuration: every dataclass, enum and rule. Imports no heavy library."""

from fsdp_lab.config.checks import (
    check_forecast,
    check_ranges,
    check_trial,
    cpu_notes,
    default_num_workers,
    effective_settings,
    memory_settings,
    objectives,
    sharding_notes,
    stops_on,
    workers_of,
)
from fsdp_lab.config.convert import all_keys, conf_dir, flatten, from_dict, to_dict
from fsdp_lab.config.errors import CombinationError, ConfigError, UserError
from fsdp_lab.config.schema import TrialConfig
from fsdp_lab.config.words import read_words

__all__ = [
    "CombinationError", "ConfigError", "TrialConfig", "UserError", "all_keys", "check_forecast", "check_ranges",
    "check_trial", "conf_dir", "cpu_notes", "default_num_workers", "effective_settings", "flatten", "from_dict",
    "memory_settings", "objectives", "read_words", "sharding_notes", "stops_on", "to_dict", "workers_of",
]  # fmt: skip
