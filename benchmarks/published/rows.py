"""The published rows, as overrides of a forecast, with what their sources state and what they do not."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_lab.config import ConfigError
from fsdp_lab.config.conf import device_file
from fsdp_lab.forecast.speed.device import Device, load_device, on_network

MPT, STEPS = "published_fsdp_speed.csv", "published_steps.csv"
_VOCABULARY = 50368  # of MPT
_FILES = {"h100_80gb": "h100_sxm"}
_CHECKPOINTING = {
    "selective_layer": ("every_n", "activation_checkpointing_every=2"),
    "every_n": ("every_n", "activation_checkpointing_every=2"),
}
# Attention before PyTorch 2.13 and cuDNN 9.15.1: FlashAttention-2, on Hopper too. MPT ran FlashAttention or a Triton
# kernel of 2022 and 2023, whose rate is fitted to those rows as `efficiency.attention`, for those rows alone.
_MPT_NETWORK = {"a100_40gb": 1600.0}  # llm-foundry states it for these only
_DECODERS = "benchmarks.published.decoders"
_EARLY, _FUSED_NORM = "torchtitan PR 165", "torchtitan docs/performance.md"
_EXPANDABLE = "torchtitan benchmarks/"  # its script sets it since October 2024
_TORCHTITAN = ("torchtitan", "PyTorch blog 2024-11-25")


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        name: `g07` as in `published_steps.csv`; `m007` for the seventh row of MPT's.
        source: where it was published.
        model: its name.
        device: with the row's network, where it is stated, and without kernels that PyTorch did not have.
        gpu: the file of the device.
        workers: GPUs.
        words: overrides, without the number of blocks.
        blocks: of the model.
        microbatches: of an optimizer step.
        measured_s: seconds of the step; of published rates the middle.
        reserved_gib: the allocator's peak of a step by FSDP2; None: not published.
        marks: of `fsdp1`, `compiled`, `float8`, `hybrid`: what makes the forecast one of something else.
        fitted: efficiencies are fitted to rows of its kind.
        early: its FSDP2 is from before pytorch#129721.
        expandable: its allocator had expandable segments.
    """

    name: str
    source: str
    model: str
    device: Device
    gpu: str
    workers: int
    words: tuple[str, ...]
    blocks: int
    microbatches: int
    measured_s: float
    reserved_gib: float | None = None
    marks: tuple[str, ...] = ()
    fitted: bool = False
    early: bool = False
    expandable: bool = False

    @property
    def several_nodes(self) -> bool:
        """Whether it depends on the network."""
        return self.workers > self.device.node_size


def read_mpt(path: Path) -> list[Row]:
    """Return the rows of MPT: FSDP1, Composer's accumulation, which reduces the gradients of each microbatch, and its
    AdamW, a loop over parameters. A forecast has two microbatches at most: the third does what the second did."""
    return [_mpt(number, facts) for number, facts in enumerate(csv.DictReader(path.read_text().splitlines()), start=1)]


def _mpt(number: int, facts: Mapping[str, str]) -> Row:
    microbatch, ranks, length = int(facts["microbatch_size"]), int(facts["num_gpus"]), int(facts["seq_len"])
    parts, gpu = min(2, int(facts["grad_accum_steps"])), _FILES.get(facts["gpu"], facts["gpu"])
    words = (
        "model=custom", f"model._target_={_DECODERS}.Mpt", f"model.vocab_size={_VOCABULARY}",
        f"model.dim={facts['hidden_dim']}", f"model.num_heads={facts['num_heads']}", f"model.max_seq_len={length}",
        "task=language", "task.loss_chunks=2", "data=synthetic_tokens", f"data.vocab_size={_VOCABULARY}",
        f"data.seq_len={length}", f"training.global_batch_size={microbatch * ranks * parts}",
        f"training.grad_accum_steps={parts}", "training.sync_each_microbatch=true", "training.max_grad_norm=1.0",
        "optimizer=adamw", "optimizer.implementation=for_loop", "sharding=per_block", "reshard_after_forward=always",
        f"precision={facts['precision']}", f"activation_checkpointing={facts['activation_checkpointing']}",
    )  # fmt: skip
    tokens = float(facts["global_batch_size"]) * length / ranks
    return Row(
        f"m{number:03}", "llm-foundry", facts["model"], _device(gpu, _MPT_NETWORK.get(gpu)), gpu, ranks, words,
        int(facts["num_layers"]), int(facts["grad_accum_steps"]), tokens / float(facts["tokens_per_s_per_gpu"]),
        marks=("fsdp1",), fitted=True,
    )  # fmt: skip


def read_steps(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the rows that can be forecast, and why others cannot: name -> reason."""
    rows, left_out = [], {}
    for facts in csv.DictReader(path.read_text().splitlines()):
        if reason := _no_forecast(facts):
            left_out[facts["id"]] = reason
        else:
            rows.append(_step(facts))
    return rows, left_out


def _no_forecast(facts: Mapping[str, str]) -> str:
    """Return why a row has no forecast; "" if it has one."""
    if facts["impl"] == "zero1":
        return "nanotron's ZeRO-1 is neither FSDP1 nor FSDP2: gradients are not sharded and accumulate in float32"
    if any(facts[key] != "1" for key in ("tp", "cp", "pp")):
        return "tensor, context and pipeline parallelism have no forecast yet"
    return ""


def _step(facts: Mapping[str, str]) -> Row:
    gpus, accum, length = int(facts["gpus"]), int(facts["accum"]), int(facts["seq"])
    local = int(facts["local_batch"])
    checkpointing, *more = _CHECKPOINTING.get(facts["ac"], (facts["ac"],))
    early = facts["source"].startswith(_EARLY)
    decoder, *loss = _decoder(facts["source"])
    compiled, fsdp2 = facts["compile"] == "true", facts["impl"] == "fsdp2"
    words = (
        "model=custom", f"model._target_={decoder}", f"model.vocab_size={facts['vocab']}", f"model.dim={facts['dim']}",
        f"model.num_heads={facts['heads']}", f"model.num_kv_heads={facts['kv_heads']}", f"model.ffn_dim={facts['ffn']}",
        f"model.max_seq_len={length}", f"model.tied={facts['tied']}", *loss, "task=language", "data=synthetic_tokens",
        f"data.vocab_size={facts['vocab']}", f"data.seq_len={length}",
        f"training.global_batch_size={gpus * local * accum}", f"training.grad_accum_steps={accum}",
        "training.max_grad_norm=1.0", "optimizer=adamw", "optimizer.implementation=foreach", "sharding=per_block",
        f"sharding.dp_replicate={facts['dp_replicate']}", f"reshard_after_forward={'default' if fsdp2 else 'always'}",
        f"precision={facts['precision']}", f"activation_checkpointing={checkpointing}", *more,
        f"compile={str(compiled).lower()}",
    )  # fmt: skip
    marks = {"fsdp1": not fsdp2, "compiled": compiled, "float8": facts["precision"] == "float8"}
    marks["hybrid"] = facts["dp_replicate"] != "1"
    gbit, reserved = facts["gbit_per_node"], facts["reserved_gib"]
    return Row(
        facts["id"], facts["source"], facts["model"], _device(facts["gpu"], float(gbit) if gbit else None),
        facts["gpu"], gpus, words, int(facts["layers"]), accum, _seconds(facts, length * local * accum),
        float(reserved) if reserved and fsdp2 else None, tuple(mark for mark, has in marks.items() if has),
        early=early, expandable=facts["source"].startswith(_EXPANDABLE),
    )  # fmt: skip


def _decoder(source: str) -> tuple[str, ...]:
    """Return the class of a row's model, and overrides for it."""
    if source.startswith(_EARLY):
        return (f"{_DECODERS}.EarlyTorchtitan",)
    if source.startswith(_TORCHTITAN):
        fused = str(source.startswith(_FUSED_NORM)).lower()
        return f"{_DECODERS}.Torchtitan", f"model.fused_norm={fused}", "task.loss_chunks=2"
    return ("fsdp_lab.workloads.language.llama.Llama",)


def _seconds(facts: Mapping[str, str], tokens: int) -> float:
    """Return the seconds of a step of so many tokens a GPU; of a range of rates its middle."""
    if facts["step_s"]:
        return float(facts["step_s"])
    low, high = float(facts["tok_s_gpu"]), float(facts["tok_s_gpu_high"] or facts["tok_s_gpu"])
    return tokens / ((low + high) / 2)


def _device(name: str, gbit: float | None) -> Device:
    """Return the device with FlashAttention-2 and the network of a row; None: not stated."""
    file = device_file(name)
    if file is None:
        raise ConfigError(f"conf/device has no {name}.")
    device = load_device(file)
    device = replace(device, reached=replace(device.reached, cudnn_attention=None))
    return device if gbit is None else on_network(device, gbit)
