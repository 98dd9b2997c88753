"""The published rows, as overrides of a forecast, with what their sources state and what they do not."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_lab.config import ConfigError
from fsdp_lab.config.options import data_sheets, device_file
from fsdp_lab.forecast.speed.device import Device, load_device, on_network

DATA = Path(__file__).parent / "data"
_VOCABULARY = 50368  # of MPT
_FILES = {"h100_80gb": "h100_sxm"}
_CHECKPOINTING = {
    "selective_layer": ("every_n", "activation_checkpointing_every=2"),
    "every_n": ("every_n", "activation_checkpointing_every=2"),
}
_DECODERS = "benchmarks.published.decoders"
_LOSSES = {
    "language": ("task=language", "training.max_grad_norm=1.0"),
    "custom": ("task=custom", f"task.loss={_DECODERS}.loss_in_bfloat16"),
}
_PRECISIONS = {"float8_pure": ("precision=bf16_pure", "precision.float8=true")}
# What the product does not train, so that a row's step has no forecast.
_UNKNOWN = {
    "act_offload": "activations are not offloaded",
    "neox_blocks": "no decoder here has the blocks of GPT-NeoX",
    "gemma_blocks": "no decoder here has the blocks of Gemma 2",
    "mxfp8": "mxfp8 is no precision here",
    "mxfp8_rceil": "mxfp8 is no precision here",
    "ac_misses_scaled_mm": "its checkpointing saved every float8 product, which was a fault",
}


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        name: as in `steps.csv`; `m007` for the seventh row of `mpt.csv`.
        source: who published it. Rows of one source are left out together.
        model: its name.
        device: with the row's network, where it is stated, and without kernels that PyTorch did not have.
        gpu: the file of the device.
        workers: GPUs.
        words: overrides, without the number of blocks.
        blocks: of the model.
        microbatches: of an optimizer step.
        measured_s: seconds of the step; of published rates the middle; None: not published.
        reserved_gib: the allocator's peak of a step; None: not published.
        allocated_gib: the same without what it caches.
        ran: it did not run out of memory.
        marks: of `compiled`, `float8`, `hybrid`, `tensor_parallel` and what is unusual.
        unscored: why its errors do not count; "" if they do. Efficiencies are fitted to it all the same.
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
    measured_s: float | None
    reserved_gib: float | None = None
    allocated_gib: float | None = None
    ran: bool = True
    marks: tuple[str, ...] = ()
    unscored: str = ""
    early: bool = False
    expandable: bool = False

    @property
    def several_nodes(self) -> bool:
        """Whether it depends on the network."""
        return self.workers > self.device.node_size

    @property
    def network_known(self) -> bool:
        """Whether the network is stated, or there is one node."""
        return self.device.network_known or not self.several_nodes

    @property
    def has_speed(self) -> bool:
        """Whether its speed was published, and the forecast knows all that it depends on."""
        return self.measured_s is not None and self.network_known

    @property
    def kind(self) -> str:
        """`float8`, `compiled` or `eager`."""
        return next((kind for kind in ("float8", "compiled") if kind in self.marks), "eager")


def read_rows() -> tuple[list[Row], dict[str, str]]:
    """Return the rows that can be forecast, and why others cannot: name -> reason."""
    rows = [_mpt(number, facts) for number, facts in enumerate(_facts("mpt.csv"), start=1)]
    left_out = {}
    for facts in _facts("steps.csv"):
        if reason := _no_forecast(facts):
            left_out[facts["id"]] = reason
        else:
            rows.append(_step(facts))
    return rows, left_out


def _facts(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((DATA / name).read_text().splitlines()))


def _mpt(number: int, facts: Mapping[str, str]) -> Row:
    """Return a row of MPT: Composer's accumulation, which reduces the gradients of each microbatch, and its AdamW, a
    loop over parameters. A forecast has two microbatches at most: the third does what the second did."""
    microbatch, ranks, length = int(facts["microbatch_size"]), int(facts["num_gpus"]), int(facts["seq_len"])
    parts, gpu = min(2, int(facts["grad_accum_steps"])), _FILES.get(facts["gpu"], facts["gpu"])
    words = (
        "model=custom", f"model._target_={_DECODERS}.Mpt", f"model.vocab_size={_VOCABULARY}",
        f"model.dim={facts['hidden_dim']}", f"model.num_heads={facts['num_heads']}", f"model.max_seq_len={length}",
        "task=language", "task.loss_chunks=2", "data=synthetic_tokens", f"data.vocab_size={_VOCABULARY}",
        f"data.seq_len={length}", f"training.global_batch_size={microbatch * ranks * parts}",
        f"training.grad_accum_steps={parts}", "training.sync_each_microbatch=true", "training.max_grad_norm=1.0",
        "optimizer=adamw", "optimizer.implementation=for_loop", "sharding=per_block", "sharding.api=fsdp1",
        "reshard_after_forward=always",
        f"precision={facts['precision']}", f"activation_checkpointing={facts['activation_checkpointing']}",
    )  # fmt: skip
    tokens = float(facts["global_batch_size"]) * length / ranks
    gbit = 1600.0 if gpu == "a100_40gb" else None  # stated for these only
    return Row(
        f"m{number:03}", "MPT", facts["model"], _device(gpu, gbit), gpu, ranks, words, int(facts["num_layers"]),
        int(facts["grad_accum_steps"]), tokens / float(facts["tokens_per_s_per_gpu"])
    )  # fmt: skip


def _no_forecast(facts: Mapping[str, str]) -> str:
    """Return why a row has no forecast; "" if it has one."""
    if facts["impl"] == "zero1":
        return "nanotron's ZeRO-1 is neither FSDP1 nor FSDP2: gradients are not sharded and accumulate in float32"
    if any(facts[key] != "1" for key in ("cp", "pp")):
        return "context and pipeline parallelism have no forecast"
    if facts["gpu"] not in {sheet.stem for sheet in data_sheets()}:
        return f"conf/device has no {facts['gpu']}"
    found = [facts[name] for name in ("tok_s_gpu", "step_s", "allocated_gib")]
    if not facts["precision"] or not (any(found) or facts["fits"] == "false"):
        return "its tokens/s or its precision are not stated"
    return next((_UNKNOWN[one] for one in facts["features"].split() if one in _UNKNOWN), "")


def _step(facts: Mapping[str, str]) -> Row:
    gpus, tp, accum, length = (int(facts[key]) for key in ("gpus", "tp", "accum", "seq"))
    local, parts = int(facts["local_batch"]), min(2, accum)  # samples that tensor-parallel GPUs share
    checkpointing, *more = _CHECKPOINTING.get(facts["ac"], (facts["ac"],))
    compiled, features = facts["compile"] == "true", facts["features"].split()
    if compiled:
        more.append(f"compile_loss={facts['compile_loss']}")
    reshard = {"true": "always", "false": "never"}.get(
        facts["reshard"], "always" if facts["impl"] == "fsdp1" else "default"
    )
    loss = "custom" if facts["decoder"] == "litgpt" else "language"
    words = (
        "model=custom", *_decoder(facts), f"model.vocab_size={facts['vocab']}", f"model.dim={facts['dim']}",
        f"model.num_heads={facts['heads']}", f"model.num_kv_heads={facts['kv_heads']}", f"model.ffn_dim={facts['ffn']}",
        f"model.max_seq_len={length}", f"model.tied={facts['tied']}", *_LOSSES[loss], "data=synthetic_tokens",
        f"data.vocab_size={facts['vocab']}", f"data.seq_len={length}",
        f"training.global_batch_size={gpus // tp * local * parts}", f"training.grad_accum_steps={parts}",
        "optimizer=adamw", f"optimizer.implementation={facts['optimizer']}",
        "sharding=per_block", f"sharding.api={facts['impl']}", f"sharding.dp_replicate={facts['dp_replicate']}",
        *([f"sharding.tp={tp}"] * (tp > 1)), *(["sharding.embeddings=own"] * ("own_embeddings" in features)),
        f"reshard_after_forward={reshard}", *_PRECISIONS.get(facts["precision"], (f"precision={facts['precision']}",)),
        f"activation_checkpointing={checkpointing}", *more, f"compile={str(compiled).lower()}",
    )  # fmt: skip
    marks = {
        "compiled": compiled,
        "float8": facts["precision"].startswith("float8"),
        "hybrid": facts["dp_replicate"] != "1",
    }
    marks["tensor_parallel"] = tp > 1
    unscored = "its source leaves open what ran" if facts["quality"] == "C" else ""
    gbit, reserved = facts["gbit_per_node"], facts["reserved_gib"]
    device = _device(facts["gpu"], float(gbit) if gbit else None, "cudnn_attention" in features)
    return Row(
        facts["id"], facts["source"], facts["model"], device, facts["gpu"], gpus, words, int(facts["layers"]), accum,
        _seconds(facts, length * local * accum / tp),
        float(reserved) if reserved else None,
        float(facts["allocated_gib"]) if facts["allocated_gib"] else None,
        facts["fits"] != "false",
        (*(mark for mark, has in marks.items() if has), *features), unscored,
        early="before_129721" in features, expandable=facts["expandable"] == "true",
    )  # fmt: skip


def _decoder(facts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the class of a row's model, and overrides for it."""
    match facts["decoder"]:
        case "litgpt":
            return (f"model._target_={_DECODERS}.LitGpt",)
        case "torchtitan_2024_03":
            return (f"model._target_={_DECODERS}.EarlyTorchtitan",)
        case "torchtitan" | "torchtitan_fused_norm":
            fused = str(facts["decoder"].endswith("fused_norm")).lower()
            return f"model._target_={_DECODERS}.Torchtitan", f"model.fused_norm={fused}"
    return ("model._target_=fsdp_lab.workloads.examples.language.llama.Llama",)


def _seconds(facts: Mapping[str, str], tokens: float) -> float | None:
    """Return the seconds of a step of so many tokens a GPU; of a range of rates its middle."""
    if facts["step_s"] or not facts["tok_s_gpu"]:
        return float(facts["step_s"]) if facts["step_s"] else None
    low, high = float(facts["tok_s_gpu"]), float(facts["tok_s_gpu_high"] or facts["tok_s_gpu"])
    return tokens / ((low + high) / 2)


def _device(name: str, gbit: float | None, cudnn_attention: bool = False) -> Device:
    """Return the device with FlashAttention-2 unless stated, and the network of a row; None: not stated."""
    file = device_file(name)
    if file is None:
        raise ConfigError(f"conf/device has no {name}.")
    device = load_device(file)
    if not cudnn_attention:  # PyTorch prefers it since its builds of late 2025
        device = replace(device, reached=replace(device.reached, cudnn_attention=None))
    return device if gbit is None else on_network(device, gbit)
