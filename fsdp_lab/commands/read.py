"""What a file of another trainer means here.

python -m fsdp_lab.read accelerate.yaml        a config of accelerate launch
python -m fsdp_lab.read training_args.json     TrainingArguments of transformers
python -m fsdp_lab.read torchtitan.toml        a job of torchtitan

Prints the overrides that mean the same, in one line for a shell; then what the file does not have, what has no
counterpart and why, which keys change nothing of a step, and which are unknown. Reads only; nothing of these trainers
has to be installed. Exits with 0, 2 for bad input.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fsdp_lab.commands.messages import explain
from fsdp_lab.config import UserError
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.serialize import leaves
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.words import key_of
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.report.their_keys import Reading, read, trainers

_NEEDED = ("cluster.num_workers", "model", "data", "optimizer", "training.global_batch_size")
_REFUSED = {
    "DEEPSPEED": "is for DeepSpeed, which is not supported; nearest to its ZeRO-2 is sharding=per_block "
    "reshard_after_forward=never, to its ZeRO-3 sharding=per_block reshard_after_forward=default.",
    "MEGATRON_LM": "divides a model into stages, which fsdp_lab does not; sharding.tp divides its layers.",
}


def main() -> int:
    """Read the file that the command line names, and return the exit status; see the module."""
    outlast_reader()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words) or not words:
        print(docstring(sys.modules[__name__]))
        return ExitCode.finished if words else ExitCode.refused
    try:
        if len(words) > 1:
            raise UserError(f"{words[1]}: read takes one file; overrides follow in the command that trains.")
        print(*_said(*read_file(Path(words[0]))), sep="\n")
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"fsdp_lab.read: {message}", file=sys.stderr)
        return ExitCode.refused
    return ExitCode.finished


def read_file(file: Path) -> tuple[str, Reading]:
    """Return the name of a file's trainer, and its settings.

    Raises:
        UserError: it cannot be read, or belongs to no supported trainer.
    """
    content = _load(file)
    for key in (key for key in ("zero_optimization", "deepspeed") if content.get(key)):
        raise UserError(f"{file}: {key} {_REFUSED['DEEPSPEED']}")
    kind = str(content.get("distributed_type", "NO")).upper()
    if kind not in ("NO", "FALSE", "FSDP", "MULTI_GPU", "MULTI_CPU"):
        why = _REFUSED.get(kind, "is not read: trials run on CUDA's GPUs or CPUs; give a file of FSDP or MULTI_GPU.")
        raise UserError(f"{file}: distributed_type={kind} {why}")
    try:
        return _read(file, content)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{file}: a value has another type than its trainer accepts: {error}.") from None


def _load(file: Path) -> dict[str, Any]:
    loads = {".toml": tomllib.loads, ".json": json.loads}.get(file.suffix, yaml.safe_load)
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        content = loads(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} is damaged, or its suffix is wrong: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} has no keys; give a config of accelerate, TrainingArguments, or a job of torchtitan.")
    return {str(key): value for key, value in content.items() if value is not None}


def _read(file: Path, content: dict[str, Any]) -> tuple[str, Reading]:
    flat = leaves(content)
    if "distributed_type" in content or "compute_environment" in content:
        for group, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_")):  # accelerate adds prefixes
            inner = content.get(group) or {}
            content[group] = {prefix + str(key).removeprefix(prefix): value for key, value in inner.items()}
        name, derived = "accelerate", dict[str, Any]()
    elif flat.keys() & {row.key for row in trainers()["Trainer"].rows}:
        name, derived = "Trainer", _of_trainer(content)
    elif any(isinstance(content.get(section), dict) for section in ("training", "parallelism")):
        name, derived = "torchtitan", _of_torchtitan(content)
    else:
        raise UserError(
            f"{file} has no key of accelerate (distributed_type), TrainingArguments (learning_rate) or torchtitan "
            "([training]); give a file of one of them."
        )
    if classes := _classes(content.get("fsdp_config") or {}):
        derived["classes"] = f"[{','.join(classes)}]"
    return name, read(name, leaves(content), derived)


def _of_trainer(content: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the overrides; replace older forms in the content, as TrainingArguments does."""
    inner = {str(key).removeprefix("fsdp_"): value for key, value in (content.get("fsdp_config") or {}).items()}
    words = content.get("fsdp") or []
    for word in words.split() if isinstance(words, str) else words if isinstance(words, list) else ():
        if word == "offload":
            inner.setdefault("cpu_offload", True)
        elif word != "auto_wrap":
            names = {"full_shard": True, "shard_grad_op": False} if int(inner.get("version", 2)) == 2 else {}
            inner.setdefault("reshard_after_forward", names.get(word, word))
    content |= {"fsdp": bool(words), "fsdp_config": inner}
    get = content.get
    samples = get("per_device_train_batch_size", 8) * get("gradient_accumulation_steps", 1)
    derived, epochs, warmup = {"samples": samples}, get("num_train_epochs", 3), get("warmup_steps", 0)
    is_adam = str(get("optim", "adamw")).startswith("adamw")
    for name, default in (("beta1", 0.9), ("beta2", 0.999)):
        derived[name] = f"optimizer.{name}={get(f'adam_{name}', default)}" if is_adam else ""
    if epochs == int(epochs):
        derived["epochs"] = int(epochs)
    if warmup == int(warmup):
        is_constant = get("lr_scheduler_type") == "constant"  # `constant` has no warmup
        derived["warmup"] = "" if is_constant else f"lr_schedule.num_warmup_steps={int(warmup)}"
    return derived


def _of_torchtitan(content: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the overrides."""
    training, degrees, model = (content.get(name, {}) for name in ("training", "parallelism", "model"))
    kinds = {"data_parallel_replicate": 1, "data_parallel_shard": -1, "tensor_parallel": 1}
    replicas, shard, tp = (degrees.get(f"{kind}_degree", default) for kind, default in kinds.items())
    if shard == 1 and tp > 1:  # one rank of FSDP alone would be DDP
        degrees["data_parallel_shard_degree"] = -1
    option = str(content.get("activation_checkpoint", {}).get("selective_ac_option", "2"))
    derived = {"selective": "selective"} if option == "op" else dict[str, Any]()
    if option.isdecimal():
        derived["selective"] = f"every_n activation_checkpointing_every={option}"
    if model.get("name", "llama3") == "llama3" and (flavor := model.get("flavor")) in ("8B", "70B"):
        derived["preset"] = f"llama3_{flavor.lower()}"
    if shard > 0:
        local = training.get("local_batch_size", training.get("batch_size", 8))
        derived["workers"] = replicas * shard * tp
        derived["accum"] = training.get("global_batch_size", -1) // (local * replicas * shard)
    return derived


def _classes(config: dict[str, Any]) -> list[str]:
    """Return the import paths of the block classes that a file names; empty if one is not transformers'."""
    keys = ("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap")
    names: str | list[str] = next((config[key] for key in keys if config.get(key)), [])
    spec = importlib.util.find_spec("transformers") if names else None  # reads its files without importing it
    places = spec.submodule_search_locations if spec else None
    files = [file for place in places or () for file in Path(place).glob("models/*/modeling_*.py")]
    sources, paths = {file: file.read_text(encoding="utf-8") for file in files}, []
    for name in map(str.strip, names.split(",") if isinstance(names, str) else names):
        found = [file for file, text in sources.items() if f"\nclass {name}(" in text]
        if len(found) != 1:
            return []
        paths.append(f"transformers.models.{found[0].parent.name}.{found[0].stem}.{name}")
    return paths


def _said(name: str, reading: Reading) -> Iterator[str]:
    yield shlex.join(reading.overrides)
    typed = {key_of(word) for word in reading.overrides}
    if missing := [key for key in _NEEDED if key not in typed]:
        yield f"# not in this file of {name}: {', '.join(missing)}"
    if reading.without:
        yield "# no counterpart:"
        yield from (f"#   {key}: {why}" for key, why in reading.without.items())
    if reading.ignored:
        yield f"# without effect on a step here: {', '.join(reading.ignored)}"
    if reading.unknown:
        yield f"# unknown to {name}, so not read: {', '.join(reading.unknown)}"
