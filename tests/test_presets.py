"""Every preset, and every option of every group, composes and trains for two steps on two ranks."""

from __future__ import annotations

import gc
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from fsdp_lab.compose import register_schema, typed_config
from fsdp_lab.config import SweepConfig, conf_dir, from_dict, to_dict, with_custom
from fsdp_lab.config.conf import group_dirs
from fsdp_lab.sweep.axes import axes_shown
from tests.conftest import FASHION_MNIST, ROOT
from tests.ranks import Memo, run_ranks
from tests.workloads.hf.cases import WORDS as HF
from tests.workloads.user.project import HERE

TWO_STEPS = [
    "training.max_steps=2", "training.global_batch_size=32", "data.num_train=64", "data.num_val=16",
    "cluster.num_workers=2", "memory_profile=off",
]  # fmt: skip
LARGE = [
    "data=synthetic", "training.global_batch_size=2", "data.num_train=4", "data.num_val=2", "optimizer=sgd",
    "export=false", "checkpoint.mode=off",
]  # fmt: skip
SMALL_LLAMA = [
    "model.dim=64", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=64",
    "data.seq_len=16", "training.global_batch_size=4", "task.loss_chunks=4",
]  # fmt: skip
SUMMARISER = ["model._target_=tests.workloads.seq2seq.net.Summariser"]
WIKIHOW = ROOT / "tests" / "workloads" / "seq2seq" / "wikihow"
# What an option needs beside its name.
NEEDS = {
    "sharding=size_based": ["sharding.min_num_params=1000"],
    "reshard_after_forward=to_size": ["reshard_after_forward.size=1"],
    "data=fashion_mnist": [f"data.root={FASHION_MNIST}", "data.download=false"],
    "experiment=ray_template": [f"data.root={FASHION_MNIST}", "data.download=false"],
    "model=custom": [f"model._target_={HERE}.net.digits", "model.width=8", "sharding=root"],
    "data=custom": [f"data._target_={HERE}.data.Pictures"],
    "data=example": [f"model._target_={HERE}.net.Net", "model.width=8", f"task.loss={HERE}.net.loss"],
    "task=custom": [f"task.loss={HERE}.net.labels"],
    "task=model_loss": [f"model._target_={HERE}.net.WithLoss", "model.width=8", "data=example"],
    "data=pydoc_summaries": SUMMARISER,
    "data=wikihow": [*SUMMARISER, f"data.root={WIKIHOW}"],
    "task=seq2seq": SUMMARISER,
    "cluster=kuberay": ["cluster.job.image=lab", "cluster.job.cpus_per_node=2", "cluster.job.memory_gib_per_node=1"],
    "data=text": [f"data.root={ROOT / 'experiments'}", "data.seq_len=64"],
    "model=llama3_1b": SMALL_LLAMA,
    "model=llama3_8b": SMALL_LLAMA,
    "model=llama3_70b": SMALL_LLAMA,
    "model=hf_causal_lm": [*HF["gpt2"], "data.num_train=64", "data.num_val=16"],
    "model=hf_seq2seq": HF["t5"],
    "model=hf_image_classification": HF["vit"],
    # With all their layers two steps take up to minutes on two cores, and 8 GB.
    "model=vit_b_16": [*LARGE, "model.num_layers=1"],
    "model=vit_l_16": [*LARGE, "model.num_layers=1"],
    "model=vit_h_14": [*LARGE, "model.num_layers=1"],
}
PRESETS = sorted(file.stem for file in (conf_dir() / "experiment").glob("*.yaml"))
OPTIONS = sorted(f"{folder.name}={file.stem}" for folder in group_dirs() for file in folder.glob("*.yaml"))


def composed(option: str) -> SweepConfig:
    names_the_model = option.partition("=")[0] in ("model", "data", "task", "experiment")
    words = [*TWO_STEPS, *([] if names_the_model else ["model.num_layers=2"]), option, *NEEDS.get(option, [])]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return typed_config(compose("config", with_custom(words)))


def has_its_images(config: SweepConfig) -> bool:
    return config.data.missing() is None


@pytest.fixture(scope="module")
def configs() -> dict[str, SweepConfig]:
    register_schema()
    return {option: composed(option) for option in OPTIONS}


@pytest.fixture(scope="module")
def trained(configs: dict[str, SweepConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All in one group of two ranks: option -> the losses of its steps and its metrics, or what was raised."""
    cases = {option: to_dict(config) for option, config in configs.items() if has_its_images(config)}
    return run_ranks(2, train_each, cases, tmp_path_factory.mktemp("presets"))[0]


def train_each(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    from fsdp_lab.training import train

    results: dict[str, Any] = {}
    for option, values in cases.items():
        losses: list[float] = []
        memo = Memo()
        own = folder / option
        own.mkdir(exist_ok=True)
        try:
            train(from_dict(SweepConfig, values), own, memo, losses.extend)
            results[option] = losses, memo.reported
        except Exception as error:  # noqa: BLE001 - the test of this option tells it
            results[option] = repr(error)
        gc.collect()
    return results


def test_every_file_of_conf_is_tested():
    assert {option.partition("=")[0] for option in OPTIONS} == {folder.name for folder in group_dirs()}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_composes_and_passes_the_checks(configs: dict[str, SweepConfig], option: str):
    configs[option].check(2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_trains_for_two_steps(configs: dict[str, SweepConfig], trained: dict[str, Any], option: str):
    if not has_its_images(configs[option]):
        pytest.skip(f"{option}: Fashion-MNIST is not in {FASHION_MNIST}")
    if configs[option].precision.float8:  # the ranks are on CPUs: tests/training/test_float8.py has those of a GPU
        assert "precision=float8 needs a GPU" in trained[option]
        return
    assert not isinstance(trained[option], str), trained[option]
    losses, reported = trained[option]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert reported[-1]["step"] == 2
    assert math.isfinite(reported[-1]["val/loss"])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_listed_with_its_axes(preset: str) -> None:
    (row,) = re.findall(rf"^\| `{preset}` \|.*\| (.*) \|$", (ROOT / "docs" / "sweeps.md").read_text(), re.MULTILINE)
    axes = " ".join(axes_shown([f"experiment={preset}"], []))
    assert row == (f"`{axes}`" if axes else "nothing: one trial")
