"""The model, the data and the loss of a trial as lines of a script."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.registry import module_of
from fsdp_lab.config.training import Init
from fsdp_lab.config.workload import EXAMPLE_BATCH, DataConfig, ModelConfig, UserData, UserModel
from fsdp_lab.takehome.imports import Imports, call
from fsdp_lab.takehome.setup import Setup

_WHOLE_CONSTRUCTOR = 2**32  # bytes of parameters that a trial draws by one call of the constructor
_TRANSFORMERS = "fsdp_lab.workloads.hf.models."
_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image_classification": "AutoModelForImageClassification",
}


def model_lines(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines that build the model on the host with the trial's first weights."""
    model, seed = setup.config.model, setup.config.training.seed
    weights = "the trial's first weights; every rank builds all of them on the host"
    if setup.config.init is Init.device:
        weights = "on GPUs other first weights than the trial's, which the GPUs drew"
    elif setup.num_params * 4 > _WHOLE_CONSTRUCTOR:
        weights = "other first weights than the trial's, which drew them in parts"
    lines = [f"torch.manual_seed({seed})  # {weights}"]
    if isinstance(model, UserModel):
        if not str(model.target).startswith("fsdp_lab."):
            imports.module("random", "numpy")
            lines.append(f"random.seed({seed}), numpy.random.seed({seed})")
        lines.append(f"model = {call(imports.path(str(model.target)), model.arguments, imports)}.train()")
        if (auto := _auto_class(setup)) and model.arguments.get("pretrained"):
            folder = json.dumps(str(model.arguments["config"]))
            load = f"{imports.name('transformers', auto)}.from_pretrained({folder}, use_safetensors=True"
            lines.append(f"model.load_state_dict({load}, dtype=torch.float32).state_dict())")
    else:
        assert isinstance(model, ModelConfig)
        build = imports.name(module_of("model.family", model.family), "build_model")
        lines.append(f"model = {build}({_config(model, imports)}).build().train()")
    return lines


def _auto_class(setup: Setup) -> str | None:
    """Return the class by which transformers makes the model; None for another model."""
    target = getattr(setup.config.model, "target", None) or ""
    return _AUTO_CLASSES.get(target.removeprefix(_TRANSFORMERS)) if target.startswith(_TRANSFORMERS) else None


def data_lines(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines that make `items`, the training split."""
    data, model = setup.config.data, setup.config.model
    if isinstance(data, UserData):
        if data.target == EXAMPLE_BATCH:
            return ["torch.manual_seed(0)", f"example = model.example_batch({setup.microbatch_size})"]
        lines = [f"items = {call(imports.path(str(data.target)), {**data.arguments, 'split': 'train'}, imports)}"]
    else:
        assert isinstance(data, DataConfig)
        build = imports.name("fsdp_lab.workloads.build", "build_data_spec")
        takes = "UserModel()" if isinstance(model, UserModel) else _config(model, imports)
        if isinstance(model, UserModel):
            imports.name("fsdp_lab.config.workload", "UserModel")
        read = dataclasses.replace(data, download=True, num_val=None, loader_workers=None)
        lines = [f"items = {build}({_config(read, imports)}, {takes}, None).load().train"]
    return lines


def loader_line(setup: Setup, imports: Imports) -> str:
    """Return the line that makes `loader`, which serves the microbatches `mine` of this rank."""
    data = setup.config.data
    if isinstance(data, UserData) and data.target == EXAMPLE_BATCH:
        return "loader = [example] * len(mine)"
    workers = "4 if cuda else 0" if data.loader_workers is None else data.loader_workers
    served = "batch_sampler=mine.tolist()" if isinstance(data, UserData) else "sampler=mine, batch_size=None"
    if isinstance(data, UserData) and data.collate_fn:
        served += f", collate_fn={imports.path(data.collate_fn)}"
    return f"loader = torch.utils.data.DataLoader(items, {served}, num_workers={workers})"


def to_device_lines(setup: Setup) -> list[str]:
    """Return the lines of a function that copies a batch, for tasks that do not know its structure."""
    if setup.config.task.name != "custom":
        return []
    return [
        "def to_device(part):",
        "    if isinstance(part, dict):",
        "        return {key: to_device(value) for key, value in part.items()}",
        "    if isinstance(part, (tuple, list)):",
        "        return type(part)(map(to_device, part))",
        "    return part.to(device) if torch.is_tensor(part) else part",
        "",
    ]


def loss_lines(setup: Setup, imports: Imports) -> tuple[list[str], list[str], str]:
    """Return the lines that move a batch to the device, those of the forward pass, and the expression of the mean loss.

    Raises:
        UserError: the task is another package's.
    """
    task, ours = setup.config.task, isinstance(setup.config.model, ModelConfig)
    move = ["batch = to_device(batch)"]
    match task.name:
        case "classification":
            move = ["inputs, labels = (part.to(device) for part in batch)"]
            channels = getattr(setup.config.model, "num_channels", 1) if ours else 1
            inputs = f"inputs.expand(-1, {channels}, -1, -1)" if channels > 1 else "inputs"
            forward = [f"outputs = model({inputs})"]
            if not ours:
                forward.append("if isinstance(outputs, (tuple, list)):")
                forward.append("    outputs = outputs[0]")
                forward.append('outputs = outputs["logits"] if isinstance(outputs, dict) else outputs')
            return move, forward, "torch.nn.functional.cross_entropy(outputs.float(), labels)"
        case "language":
            move = ["batch = batch.to(device)"]
            inputs = "batch[:, :-1].clamp(min=0)"
            if task.loss_chunks > 1:
                chunked = f"labels=batch[:, 1:], loss_chunks={task.loss_chunks}"
                return move, [f"total_loss, count = model({inputs}, {chunked})"], "total_loss / count"
            logits = f"model({inputs})" + (".logits" if _auto_class(setup) else "")
            forward = [f"outputs = {logits}.flatten(0, 1)"]
            labels = "batch[:, 1:].flatten()"
            return move, forward, f"torch.nn.functional.cross_entropy(outputs.float(), {labels}, ignore_index=-1)"
        case "seq2seq":
            move = ['batch = {name: batch[name].to(device) for name in ("input_ids", "attention_mask", "labels")}']
            logits = 'outputs["logits"] if isinstance(outputs, dict) else outputs.logits'
            forward = ["outputs = model(**batch)", f"logits = {logits}"]
            summed = 'logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100, reduction="sum"'
            return move, forward, f"torch.nn.functional.cross_entropy({summed}) * world_size / num_labels"
        case "model_loss":
            loss = 'outputs["loss"] if isinstance(outputs, dict) else outputs.loss'
            move = ["batch = {key: value.to(device) for key, value in batch.items()}"]
            return move, ["outputs = model(**batch)", f"loss = {loss}"], "loss"
        case "custom":
            return move, [f"loss = {imports.path(str(task.loss))}(model, batch)"], "loss"
        case _:
            raise UserError(f"task={task.name} is another package's; no script can be written of it.")


def num_labels_lines(setup: Setup) -> list[str]:
    """Return the lines that count the labels of a step over all ranks; empty if microbatches weigh the same."""
    if setup.config.task.name != "seq2seq":
        return []
    batches = "microbatches" if setup.config.training.grad_accum_steps > 1 else "[batch]"
    counted = f'sum((batch["labels"] != -100).sum() for batch in {batches})'
    return [f"num_labels = {counted}.to(device)", "dist.all_reduce(num_labels)", "num_labels.clamp_(min=1)"]


def _config(config: Any, imports: Imports) -> str:
    """Return the expression of one of our configs, with the values that differ from the defaults."""
    kind = type(config)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(kind)}
    changed = {name: value for name, value in fields.items() if value != getattr(kind(), name)}
    return call(imports.name(kind.__module__, kind.__name__), changed, imports)
