"""Hydra's compose API in place of its command line: a parser that knows the groups, and composed trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.compose import Trial, group_choices, register_schema, typed_config
from fsdp_lab.config import conf_dir


@pytest.fixture(scope="module")
def parser() -> Iterator[OverridesParser]:
    """Hydra's own parser, with the config groups of conf/ known to it."""
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())


@pytest.fixture
def compose_trial(parser: OverridesParser, tmp_path: Path) -> Callable[[Sequence[str], int], Trial]:
    """What `run_multirun` makes of a cell, by Hydra's compose API."""

    def make(overrides: Sequence[str], number: int) -> Trial:
        cfg = compose("config", list(overrides), return_hydra_config=True)
        folder = tmp_path / str(number)
        return Trial(number, typed_config(cfg), group_choices(cfg), list(overrides), folder, cfg)

    return make
