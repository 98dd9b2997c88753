"""A setting as accelerate's file, and files of other trainers as settings: one table, in both directions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

from fsdp_lab.commands.read import read_file
from fsdp_lab.config import TrialConfig, part
from fsdp_lab.config.axes import AXES
from fsdp_lab.config.compare import counts, effective_settings
from fsdp_lab.config.without_hydra import read_config
from fsdp_lab.memory.profile import CATEGORIES
from fsdp_lab.report.accelerate import to_accelerate
from fsdp_lab.report.their_keys import read
from fsdp_lab.training.layout import Layout, matches
from fsdp_lab.workloads.examples.language.pydoc import PydocTokens
from tests.ranks import Memo, config, parallel_of, run_ranks
from tests.workloads.hf.cases import WORDS, plain_model

WORLD = 4
OWN = "sharding=per_block sharding.embeddings=own"  # the units of accelerate with FSDP2
EQUAL = [
    OWN,
    f"{OWN} precision=bf16 reshard_after_forward=never activation_checkpointing=full",
    f"{OWN} precision=fp16 offload=cpu init=rank0",
    f"{OWN} compile=true",
    f"{OWN} sharding.dp_replicate=2",
    f"{OWN} sharding.tp=2 reshard_after_forward=never",
    "sharding=root",
    "sharding=root precision=bf16 activation_checkpointing=every_n activation_checkpointing_every=1",
    "sharding=ddp precision=bf16_mixed",
    "sharding=ddp precision=fp16_mixed compile=true",
    "sharding=per_block sharding.api=fsdp1",
    "sharding=per_block sharding.api=fsdp1 reshard_after_forward=always",
    "sharding=per_block sharding.api=fsdp1 sharding.dp_replicate=2",
    "sharding=per_block sharding.api=fsdp1 sharding.dp_replicate=2 reshard_after_forward=never",
    "sharding=per_block sharding.api=fsdp1 sharding.backward_prefetch=0 sharding.forward_prefetch=1 offload=cpu",
    "sharding=size_based sharding.min_num_params=500 sharding.api=fsdp1 precision=bf16",
    "sharding=root sharding.api=fsdp1 reshard_after_forward=never",
]
# What accelerate cannot do -> the keys that the file says it about.
OTHER = {
    "sharding=per_layer": {"sharding.granularity", "sharding.embeddings"},
    "sharding=size_based sharding.min_num_params=500": {
        "sharding.granularity", "sharding.embeddings", "sharding.min_num_params",
    },
    "sharding=per_layer sharding.api=fsdp1": {"sharding.granularity"},
    "sharding=per_block": {"sharding.embeddings"},
    "sharding=per_block sharding.embeddings=own sharding.api=fsdp2 sharding.blocks_per_unit=2": {
        "sharding.blocks_per_unit"
    },
    f"{OWN} precision=bf16_mixed": {"precision.reduce_dtype"},
    f"{OWN} precision=bf16_pure": {"precision.storage_dtype"},
    f"{OWN} precision=tf32": {"precision.tf32"},
    f"{OWN} precision=grad_bf16": {"precision.reduce_dtype"},
    f"{OWN} reshard_after_forward=always": {"reshard_after_forward.policy"},
    f"{OWN} reshard_after_forward=to_size reshard_after_forward.size=2": {
        "reshard_after_forward.policy", "reshard_after_forward.size",
    },
    f"{OWN} offload=cpu_unpinned": {"offload.target"},
    f"{OWN} activation_checkpointing=selective": {"activation_checkpointing"},
    f"{OWN} sharding.forward_prefetch=2": {"sharding.forward_prefetch"},
    f"{OWN} init=meta": {"init"},
    "sharding=per_block sharding.api=fsdp1 sharding.limit_all_gathers=false": {"sharding.limit_all_gathers"},
}  # fmt: skip


def trial_of(words: str) -> TrialConfig:
    return part(read_config(None, words.split()), TrialConfig)


def decided(trial: TrialConfig) -> dict[str, Any]:
    """The effective settings that a file of accelerate decides."""
    keys = [*(key for axis in AXES for key in axis.keys), "init"]
    return {key: value for key, value in effective_settings(trial, WORLD).items() if not counts(key, keys)}


def read_again(text: str, folder: Path) -> list[str]:
    (folder / "accelerate.yaml").write_text(text)
    name, reading = read_file(folder / "accelerate.yaml")
    assert (name, reading.without, reading.ignored, reading.unknown) == ("accelerate", {}, [], [])
    return reading.overrides


@pytest.mark.parametrize("words", EQUAL)
def test_a_setting_comes_back_from_its_file(words: str, tmp_path: Path) -> None:
    text = to_accelerate("Trial 0", trial_of(words), WORLD)
    assert "No counterpart" not in text
    overrides = read_again(text, tmp_path)
    assert f"cluster.num_workers={WORLD}" in overrides
    assert decided(trial_of(" ".join(overrides))) == decided(trial_of(words))


@pytest.mark.parametrize("words", OTHER)
def test_a_file_says_what_accelerate_does_in_another_way(words: str, tmp_path: Path) -> None:
    text = to_accelerate("Trial 0", trial_of(words), WORLD)
    ours, theirs = decided(trial_of(words)), decided(trial_of(" ".join(read_again(text, tmp_path))))
    said = set(re.findall(r"No counterpart(?: for models of transformers)?: ([\w.]+)=", text))
    assert said == OTHER[words] == {key for key, value in ours.items() if value != theirs[key]}


def test_the_classes_of_blocks_are_those_that_were_trained(tmp_path: Path) -> None:
    text = to_accelerate("Trial 0", trial_of(OWN), WORLD, ["LlamaDecoderLayer", "Other"])
    assert yaml.safe_load(text)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer,Other"
    named = trial_of(f"{OWN} model.block_classes=[transformers.models.llama.modeling_llama.LlamaDecoderLayer]")
    pytest.importorskip("transformers")
    overrides = read_again(to_accelerate("Trial 0", named, WORLD, ["Block"]), tmp_path)
    assert "model.block_classes=[transformers.models.llama.modeling_llama.LlamaDecoderLayer]" in overrides


SETTINGS = [
    OWN,
    f"{OWN} reshard_after_forward=never precision=bf16",
    f"{OWN} activation_checkpointing=full",
    "sharding=per_block sharding.api=fsdp1",
    "sharding=root sharding.api=fsdp1 reshard_after_forward=never",
]
HYBRID = f"{OWN} sharding.dp_replicate=2"
STEPS = 3
ADAMW = ("optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0", "check=off")
# Each step takes all rows, so that their order is not needed; and two steps without a validation between them.
LOSSES = ("data.num_train=16", f"training.epochs={STEPS}")
PEAK = ("data.num_train=32", "training.epochs=1", "memory_profile=peaks")


@contextmanager
def launched(file: Path) -> Iterator[None]:
    """The environment that `accelerate launch` makes of a file, on CPUs, for which accelerate shards nothing itself."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    environment = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    kept = {name: value for name, value in environment.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLEL"))}
    as_gpus = mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_GPU))
    on_cpu = mock.patch.object(PartialState, "set_device", lambda self: setattr(self, "device", torch.device("cpu")))
    with mock.patch.dict(os.environ, kept), as_gpus, on_cpu:
        yield


def train_both(settings: list[str], folder: str) -> list[dict[str, Any]]:
    """On each rank: train a trial, write its file, and train by transformers' Trainer with it."""
    from fsdp_lab.training.train import train

    results = []
    for number, words in enumerate(settings):
        own, memos, losses = Path(folder, f"{number}.{dist.get_rank()}"), [Memo(), Memo()], list[float]()
        for memo, more in zip(memos, (LOSSES, PEAK), strict=True):
            train(llama(words, *more), own, memo, losses.extend)
        layout = Layout(**memos[0].known["layout"])
        text = to_accelerate("Trial 0", llama(words), dist.get_world_size(), layout.block_classes)
        unsent = "fsdp_config:\n  fsdp_sync_module_states: false"  # accelerate sends weights of GPUs alone
        own.joinpath("accelerate.yaml").write_text(text.replace("fsdp_config:", unsent))
        with launched(own / "accelerate.yaml"):
            theirs = train_by_trainer(own, words)
        names = [name for name, _ in plain_model("llama").named_modules()]
        units = {name for name in names if not name or matches([*layout.units, *layout.last], name)}
        peak = {key: int(memos[1].reported[-1].get(f"memory/{key}_bytes", 0)) for key in CATEGORIES}
        ours = {"losses": losses[:STEPS], "units": units if "root" not in words else {""}, "peak": peak}
        results.append({"ours": ours, "theirs": theirs, "file": text})
    return results


def llama(words: str, *more: str) -> Any:
    rows = ("data.num_val=4", "training.global_batch_size=16", "cluster.num_workers=2")
    return config(*WORDS["llama"], *rows, *ADAMW, *words.split(), *more)


class Rows(torch.utils.data.Dataset[Any]):
    """Those of `data=pydoc`, as transformers takes them: labels that are shifted already."""

    def __init__(self) -> None:
        self.rows = PydocTokens("train", seq_len=16)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[number]
        return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}


def train_by_trainer(folder: Path, words: str) -> dict[str, Any]:
    """Return the losses of the steps, the modules that accelerate shards, and the bytes at the second step's peak."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fsdp_lab.memory.recorder import record_step

    peaks: dict[str, int] = {}

    class Recorded(Trainer):
        def training_step(self, model: Any, inputs: Any, count: Any = None) -> Any:
            inputs = self._prepare_inputs(inputs)
            if self.state.global_step == 1:
                parallel, batch = parallel_of(llama(words), model), [*inputs.values()]
                self.recording = record_step(parallel, [self.optimizer.optimizer], batch)
                self.recorder = self.recording.__enter__()
            return super().training_step(model, inputs, count)

    class Ends(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 2:
                trainer.recording.__exit__(None, None, None)
                peaks.update(trainer.recorder.finish().peaks["device"])

    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16 // dist.get_world_size(), max_steps=STEPS,
        learning_rate=0.01, weight_decay=0.0,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Recorded(plain_model("llama"), arguments, train_dataset=Rows(), callbacks=[Ends()])
    trainer.train()
    kinds = (FSDPModule, FullyShardedDataParallel)
    units = [name for name, module in trainer.model_wrapped.named_modules() if isinstance(module, kinds)]
    # accelerate shards the wrapper of a recomputed block, too, which has nothing of its own
    plain = {re.sub(r"(^|\.)_(checkpoint|fsdp)_wrapped_module", "", name).lstrip(".") for name in units}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "units": plain, "peak": peaks}


@pytest.mark.ci
def test_accelerate_trains_what_the_trial_trained(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="pip install -e '.[dev]' has it")
    pytest.importorskip("transformers")
    from accelerate.commands.config.config_args import ClusterConfig

    assert read("accelerate", dict.fromkeys(ClusterConfig.__dataclass_fields__, 1), {}).unknown == []
    results = run_ranks(2, train_both, SETTINGS, str(tmp_path))[0]
    results += run_ranks(4, train_both, [HYBRID], str(tmp_path))[0]
    for words, result in zip([*SETTINGS, HYBRID], results, strict=True):
        ours, theirs = result["ours"], result["theirs"]
        assert theirs["units"] == ours["units"], (words, result["file"])
        # with bf16 accelerate returns a loss in bfloat16
        assert theirs["losses"] == pytest.approx(ours["losses"], abs=0.02 if "bf16" in words else 1e-5), words
        # its model computes the loss, so that FSDP1 gathers a block before the gradient of the loss; batches differ
        apart = {"input", "activation", "unsharded_param" if words == SETTINGS[3] else "input"}
        of_both = [{key: each["peak"][key] for key in CATEGORIES if key not in apart} for each in (ours, theirs)]
        assert of_both[0] == of_both[1], words
        assert theirs["peak"]["activation"] == pytest.approx(ours["peak"]["activation"], rel=0.01), words
