"""accelerate's own classes read the file that is written for it, and shard as the trial did."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_module_children_bottom_up
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_lab.layout import matches
from fsdp_lab.takehome import Setup, write_out
from fsdp_lab.training.blocks import find_block_classes
from fsdp_lab.training.layout import describe_layout
from fsdp_lab.training.parallelize import apply_to_blocks, mp_policy, sharding_units
from fsdp_lab.workloads.build import build_model_spec
from tests.ranks import config
from tests.takehome.scripts import PRECISIONS, SHARDINGS

LM = ("task=language", "model=lm_tiny", "data=pydoc")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """accelerate's launcher speaks to its plugins through the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))]:
            patch.delenv(name)
        yield


def model_and_setup(*overrides: str, world_size: int = 4) -> tuple[nn.Module, Setup]:
    """The model as the trial checkpoints and shards it, on no ranks."""
    trial = config(*overrides)
    spec = build_model_spec(trial.model)
    model = spec.build()
    blocks = spec.block_classes or find_block_classes(model)
    apply_to_blocks(model, blocks, trial)
    units = [] if "sharding=ddp" in overrides else sharding_units(model, blocks, trial.sharding)
    layout = describe_layout(model, units, blocks)
    return spec.build(), Setup("Trial 0: a=b", trial, layout, world_size, 1000, 128, "2.15.0")


def launched(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ClusterConfig, argparse.Namespace]:
    """What `accelerate launch` makes of the file, up to the environment of the processes, which is then this one's."""
    path = folder / "use_accelerate.yaml"
    path.write_text(text)
    read = load_config_from_file(str(path))
    parser = launch_command_parser()
    args, _, _ = _validate_launch_command(parser.parse_args(["--config_file", str(path), "train.py"]))
    made = prepare_multi_gpu_env(args)
    for name in made.keys() - os.environ.keys():
        monkeypatch.setenv(name, made[name])
    return read, args


def plugin_of(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FullyShardedDataParallelPlugin:
    """The plugin as `Accelerator` makes it in a launched process, with what a comment tells the script to pass."""
    _, args = launched(text, folder, monkeypatch)
    observed = re.search(r"^#   policy = (MixedPrecisionPolicy.*)$", text, re.MULTILINE)
    names = {"torch": torch, "MixedPrecisionPolicy": MixedPrecisionPolicy}
    plugin = FullyShardedDataParallelPlugin(
        **({"mixed_precision_policy": eval(observed[1], names)} if observed else {})
    )
    if args.mixed_precision != "no":
        plugin.set_mixed_precision(args.mixed_precision)  # as AcceleratorState does
    return plugin


def units_of(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> set[str]:
    """The names of the modules that accelerate shards on their own, without the root."""
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(m)] for m in get_module_children_bottom_up(model)[:-1] if policy is not None and policy(m)}


def units_of_trial(setup: Setup, model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules() if setup.layout.units and matches(setup.layout.units, name)}


@pytest.mark.parametrize("precision", ["fp32", *PRECISIONS])
def test_the_policy_is_the_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    _, setup = model_and_setup("sharding=per_block", f"precision={precision}")
    plugin = plugin_of(write_out("accelerate", setup), tmp_path, monkeypatch)
    expected = mp_policy(setup.config.precision)
    got = plugin.mixed_precision_policy or MixedPrecisionPolicy(torch.float32, torch.float32)
    assert (got.param_dtype, got.reduce_dtype) == (expected.param_dtype, expected.reduce_dtype)


@pytest.mark.parametrize(
    ("model", "sharding", "more"),
    [
        *product(((), LM), ("root", "per_block"), ((), ("activation_checkpointing=full",))),
        (LM, "per_block", ("model.tied=true",)),
        (("model=mlp",), "per_layer", ()),
        (("model=mlp",), "size_based", ()),
    ],
)
def test_the_units_are_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: tuple[str, ...], sharding: str, more: tuple[str, ...]
) -> None:
    built, setup = model_and_setup(*model, *SHARDINGS[sharding], *more)
    text = write_out("accelerate", setup)
    plugin = plugin_of(text, tmp_path, monkeypatch)
    assert units_of(plugin, built) == units_of_trial(setup, built)
    assert "the trial's units" not in text
    assert plugin.activation_checkpointing == bool("activation_checkpointing=full" in more)


@pytest.mark.parametrize("mode", ["every_n", "selective"])
def test_activation_checkpointing_of_some_is_reported(mode: str) -> None:
    _, setup = model_and_setup("sharding=per_block", f"activation_checkpointing={mode}")
    text = write_out("accelerate", setup)
    assert f"# Not in this file: activation_checkpointing={mode};" in text
    assert "fsdp_activation_checkpointing: false" in text


def test_units_of_several_blocks_are_reported() -> None:
    _, setup = model_and_setup("sharding=per_block", "sharding.blocks_per_unit=2")
    for use in ("accelerate", "torchtitan"):
        message = f"# Not in this file: sharding.blocks_per_unit=2; {use} makes a unit of each block."
        assert message in write_out(use, setup)


def test_units_that_no_classes_name_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads its projection itself: not every linear layer is a unit."""
    built, setup = model_and_setup("sharding=per_layer")
    text = write_out("accelerate", setup)
    assert units_of(plugin_of(text, tmp_path, monkeypatch), built) == {
        f"encoder.layers.encoder_layer_{i}" for i in range(4)
    }
    assert "the trial's units, conv_proj" in text


@pytest.mark.parametrize(
    ("policy", "expected", "message"),
    [
        ("always", True, "accelerate keeps parameters outside"),
        ("never", False, ""),
        ("default", True, ""),
        ("to_size reshard_after_forward.size=2", True, "reshard_after_forward=2, a number of ranks"),
        ("to_size reshard_after_forward.size=1", False, ""),
    ],
)
@pytest.mark.parametrize("offload", ["none", "cpu", "cpu_unpinned"])
def test_resharding_and_offload_are_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, expected: bool, message: str, offload: str
) -> None:
    overrides = f"sharding=per_block offload={offload} reshard_after_forward={policy}".split()
    text = write_out("accelerate", model_and_setup(*overrides)[1])
    plugin = plugin_of(text, tmp_path, monkeypatch)
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is expected
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) == (offload != "none")
    flat = " ".join(text.replace("# ", "").split())
    assert message in flat and ("accelerate pins it" in flat) == (offload == "cpu_unpinned")


def test_hybrid_sharding_has_both_degrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, setup = model_and_setup("sharding=per_block", "sharding.dp_replicate=2", world_size=8)
    read, _ = launched(write_out("accelerate", setup), tmp_path, monkeypatch)
    mesh = ParallelismConfig()
    assert (mesh.dp_replicate_size, mesh.dp_shard_size, read.num_processes) == (2, 4, 8)


def test_the_baseline_is_no_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, setup = model_and_setup("sharding=ddp", "precision=bf16", "compile=true")
    text = write_out("accelerate", setup)
    read, args = launched(text, tmp_path, monkeypatch)
    assert (read.distributed_type.value, args.multi_gpu, args.use_fsdp) == ("MULTI_GPU", True, False)
    assert args.mixed_precision == "bf16" and args.dynamo_use_regional_compilation
    assert "comm_hook=DDPCommunicationHookType.BF16" in text


def test_every_key_is_one_of_accelerates(tmp_path: Path) -> None:
    known = vars(launch_command_parser().parse_args(["train.py"]))
    for overrides in (["sharding=size_based", "sharding.min_num_params=10000", "compile=true"], ["sharding=per_layer"]):
        values: dict[str, Any] = yaml.safe_load(write_out("accelerate", model_and_setup(*overrides)[1]))
        for group in ("fsdp_config", "dynamo_config"):
            assert set(values.get(group, {})) <= known.keys()
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({**values, "fsdp": {}}))
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(tmp_path / "wrong.yaml"))
