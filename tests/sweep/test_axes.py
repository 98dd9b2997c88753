"""What `-m` would sweep, told where one trial is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from fsdp_lab.compose import register_schema
from fsdp_lab.config import conf_dir
from fsdp_lab.sweep.axes import preset_note
from tests.conftest import run_cli

AXES = ["sharding=ddp,per_block", "reshard_after_forward=always,never"]
PRECISIONS = "fp32,grad_bf16,bf16_mixed,bf16,fp16_mixed,fp16"
ALL_TYPED = ["sharding=ddp", "reshard_after_forward=never", "precision=fp32", "offload=none"]


@pytest.mark.parametrize(
    ("words", "axes"),
    [
        (["experiment=zero2_zero3"], AXES),
        (["experiment=zero2_zero3", "sharding=root"], AXES[1:]),
        (["experiment=zero2_zero3", *ALL_TYPED], None),  # as the command of a recommended setting
        (["experiment=precision_and_offload", "offload=none"], [f"precision={PRECISIONS}"]),
        (["experiment=ray_template"], None),
        (["experiment=fsdp_rules"], None),  # the other default axes are not its own
        ([], None),
    ],
)
def test_the_axes_of_a_preset_are_named_but_for_what_was_typed(words: list[str], axes: list[str] | None):
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        hydra = compose("config", words, return_hydra_config=True).hydra
    expected = None if axes is None else f"{words[0]} has axes ({', '.join(axes)}); add -m to sweep them"
    assert preset_note(hydra) == expected


def test_a_trial_of_a_preset_says_so_first(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.csv").touch()
    done = run_cli(tmp_path, "experiment=zero2_zero3", "hydra.run.dir=out")
    assert done.stdout == f"experiment=zero2_zero3 has axes ({', '.join(AXES)}); add -m to sweep them\n"
    assert "hydra.run.dir=out" in done.stderr, "and then it would have trained"
