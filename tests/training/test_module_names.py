"""Names of modules as a user knows them."""

from __future__ import annotations

from fsdp_lab.training.module_names import plain_name


def test_a_module_that_the_user_calls_module_keeps_its_name():
    assert plain_name("module.blocks.0.module.weight") == "blocks.0.module.weight"
