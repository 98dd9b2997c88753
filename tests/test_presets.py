"""Every preset and every option of every group composes, passes the checks and trains for two steps on two ranks."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from fsdp_lab.config import SweepConfig, conf_dir, from_dict, part, to_dict, with_custom
from fsdp_lab.config.checks import check_keys
from fsdp_lab.config.compose import register_schema, typed_config
from fsdp_lab.config.options import group_dirs
from fsdp_lab.config.without_hydra import read_config
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
SUMMARISER = ["model._target_=tests.workloads.user.odd.Summariser"]
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
    "optimizer=custom": ["optimizer._target_=torch.optim.RAdam", "optimizer.betas=[0.8,0.9]"],
    "lr_schedule=custom": ["lr_schedule._target_=torch.optim.lr_scheduler.OneCycleLR", "lr_schedule.max_lr=0.01"],
    "task=custom": [f"task.loss={HERE}.net.labels"],
    "task=model_loss": [f"model._target_={HERE}.net.WithLoss", "model.width=8", "data=example"],
    "data=pydoc_summaries": SUMMARISER,
    "data=wikihow": [*SUMMARISER, f"data.root={WIKIHOW}"],
    "task=seq2seq": SUMMARISER,
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
OPTIONS = sorted(f"{folder.name}={file.stem}" for folder in group_dirs() for file in folder.glob("*.yaml"))


def words_of(option: str) -> list[str]:
    names_the_model = option.partition("=")[0] in ("model", "data", "task", "experiment")
    return [*TWO_STEPS, *([] if names_the_model else ["model.num_layers=2"]), option, *NEEDS.get(option, [])]


@pytest.fixture(scope="module")
def configs() -> dict[str, SweepConfig]:
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return {option: typed_config(compose("config", with_custom(words_of(option)))) for option in OPTIONS}


def test_every_option_composes_and_passes_the_checks(configs: dict[str, SweepConfig]) -> None:
    assert {option.partition("=")[0] for option in OPTIONS} == {folder.name for folder in group_dirs()}
    for config in configs.values():
        check_keys(config, 2)


def test_torchrun_reads_what_hydra_composes(configs: dict[str, SweepConfig], tmp_path: Path) -> None:
    """An option by its word; a preset, which torchrun does not know, by the file of a trial's configuration."""
    file = tmp_path / "config.yaml"
    for option, config in configs.items():
        is_preset = option.startswith("experiment=")
        file.write_text(yaml.safe_dump(to_dict(config)))
        read = read_config(file, []) if is_preset else read_config(None, words_of(option))
        assert part(read, SweepConfig) == config, option


def train_each(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """On each rank: option -> the losses of its steps and its metrics, or what was raised."""
    from fsdp_lab.training.train import train

    results: dict[str, Any] = {}
    for option, values in cases.items():
        losses: list[float] = []
        memo = Memo()
        own = folder / option
        own.mkdir(exist_ok=True)
        try:
            train(from_dict(SweepConfig, values), own, memo, losses.extend)
            results[option] = losses, memo.reported
        except Exception as error:  # noqa: BLE001 - the test reports it with the option
            results[option] = repr(error)
        gc.collect()
    return results


def trained_as_expected(config: SweepConfig, result: Any) -> bool:
    """Return whether two steps have finite losses; float8, which needs a GPU, must have been refused."""
    if config.precision.float8:
        return "precision=float8 needs a GPU" in result
    if isinstance(result, str):
        return False
    losses, reported = result
    finite = all(math.isfinite(loss) for loss in (*losses, reported[-1]["val/loss"]))
    return finite and len(losses) == reported[-1]["step"] == 2


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_option_trains_for_two_steps(configs: dict[str, SweepConfig], tmp_path: Path):
    """All in one process group. Where the images of Fashion-MNIST are not at hand, the test is skipped in the end."""
    lacking = [] if FASHION_MNIST.is_dir() else ["data=fashion_mnist", "experiment=ray_template"]
    cases = {option: to_dict(config) for option, config in configs.items() if option not in lacking}
    trained = run_ranks(2, train_each, cases, tmp_path)[0]
    failed = {option: each for option, each in trained.items() if not trained_as_expected(configs[option], each)}
    assert failed == {} and trained.keys() == cases.keys()
    if lacking:
        pytest.skip(f"all others train; no images in {FASHION_MNIST}")
