"""The first three steps of a trial as a tutorial writes them: one process, and nothing of ours but the configuration.

The user's constructor runs once after the seed. Its model, the data set and the loss are used as they are, in float32.
If the trial stores its model in 16 bits, `model.to(torch.bfloat16)` comes first. Each step has the trial's samples,
divided as among its ranks and microbatches, so that batch norm sees the same rows.

    python -m fsdp_lab.training.plain IN.json OUT.json

IN.json has the arguments of `run`, such as `{"config": {...}, "parts": 2, "limit_s": 60}`, OUT.json what it returns.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.config import TrialConfig, from_dict, metrics
from fsdp_lab.config.target import NAMED, given_to, import_callable, import_from, in_words, instantiate
from fsdp_lab.config.workload import ModelSource
from fsdp_lab.training.plain_data import Batches, Part, moved
from fsdp_lab.training.plain_limits import Deadline, Late, Stopped, free_memory, limited
from fsdp_lab.training.plain_loader import LoaderBatches
from fsdp_lab.training.plain_losses import count_of, loss_of, val_loss_of
from fsdp_lab.training.plain_state import State, generators, put_back, seed_all, state_of


def run(config: TrialConfig, parts: int, limit_s: float = math.inf, free_bytes: float | None = None) -> dict[str, Any]:
    """Train, and return what a trial's first steps are compared with; raise nothing of the user's code.

    Args:
        parts: the ranks between which the trial divides its batches.
        limit_s: seconds after which the loop ends without figures.
        free_bytes: for weights, gradients and optimizer state; None: what is free on the device.

    Returns:
        `figures` by the keys of `metrics.CHECKED`; `noise`: how far each is off if gradients are rounded differently;
        `draws`: whether a forward pass drew random numbers; `eps`: the rounding of the narrowest parameters; `missing`:
        why there are no figures, in a clause, else ""; and `steps`, `device` (`cpu`, or the GPU's name), `seconds`.
    """
    begun, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    result: dict[str, Any] = {"figures": {}, "noise": {}, "draws": False, "eps": 0.0, "steps": 0, "device": name}
    missing = ""
    try:
        seed_all(config.training.seed)
        with limited(config, free_memory(device) if free_bytes is None else free_bytes):
            model = build_model(config)
        if parts > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise Stopped("the model has SyncBatchNorm, which needs all ranks at once")
        deal = Batches if config.data.loader is None else LoaderBatches
        batches = deal(config, model, parts, Deadline(limit_s))
        figures, draws = train(config, model.to(device), batches)
        eps = max((torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()), default=0.0)
        result |= {"figures": figures, "draws": draws, "eps": eps, "steps": batches.num_steps}
        again, _ = train(config, model, batches, scale=1 + 2**-20)
        result["noise"] = {key: abs(again[key] - value) for key, value in figures.items()}
        if result["noise"][metrics.EVAL_LOSS] > 1e-6 * abs(figures[metrics.EVAL_LOSS]):  # before any gradient
            raise Stopped("its forward pass depends on earlier ones")
    except Late as late:
        missing = "" if result["figures"] else str(late)  # without the noise, figures are still compared
    except Stopped as stopped:
        missing = str(stopped)
    except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
        missing = in_words(error)
    result |= {"missing": missing} | ({"figures": {}, "noise": {}} if missing else {})
    return result | {"seconds": round(time.monotonic() - begun, 3)}


def train(
    config: TrialConfig, model: nn.Module, batches: Batches | LoaderBatches, scale: float = 1.0
) -> tuple[dict[str, float], bool]:
    """Return the figures, and whether a forward pass drew random numbers; leave the model as it was.

    Args:
        scale: losses are divided by it before a backward pass, and gradients multiplied after it.
    """
    start, modes = state_of(model), [(module, module.training) for module in model.modules()]
    states = [state_of(model) for _ in range(batches.parts)]  # a copy for each rank, which has its own buffers
    first_weights = [p.detach().to("cpu", copy=True) for p in model.parameters()]
    optimizers = build_optimizers(config, model, batches.parts)
    set_mode(optimizers, "train")
    lr_schedules = [build_schedule(config, each, batches.steps_per_epoch) for each in optimizers.values()]
    parts = dict(model.named_children()) if config.task.step else {"model": model}
    figures, losses, draws = dict[str, float](), list[float](), False
    for step in range(batches.num_steps):
        batch = batches.train(step)
        if step == 0:
            set_mode(optimizers, "eval")
            figures[metrics.EVAL_LOSS] = evaluate(config, model, batch, states)
            set_mode(optimizers, "train")
        run = Run(config, model, optimizers, batch, states, step, scale)
        if config.task.step is None:
            run.minimize("model", partial(loss_of, config, model))
        else:
            import_callable(config.task.step, "task.step")(parts, run)
        figures.setdefault(metrics.FIRST_GRAD_NORM, math.hypot(*run.norms))
        for lr_schedule in lr_schedules:
            lr_schedule.step()
        if config.task.after_step is not None:
            with torch.no_grad():
                import_callable(config.task.after_step, "task.after_step")(parts, step + 1)
        losses, draws = [*losses, run.loss], draws or run.draws
    changes = [(p.detach().cpu() - w).abs().double() for p, w in zip(model.parameters(), first_weights, strict=True)]
    figures[metrics.CHANGE_NORM] = math.sqrt(sum(float(change.square().sum()) for change in changes))
    set_mode(optimizers, "eval")
    figures[metrics.CHECK_VAL_LOSS] = evaluate(config, model, batches.val(), states)
    figures[metrics.FIRST_LOSS] = losses[0]
    if early := losses[1:]:
        figures[metrics.EARLY_LOSS] = sum(early) / len(early)
    put_back(model, start)
    for module, mode in modes:
        module.training = mode
    for parameter, weight in zip(model.parameters(), first_weights, strict=True):
        parameter.data.copy_(weight)
    return figures, draws


class Run:
    """A step: the argument of `task.step`; without one, `minimize` is called once.

    Attributes:
        step: its number, from 1.
        loss: the sum of what was minimised.
        norms: of the gradients of each.
        draws: whether a forward pass drew random numbers.
    """

    def __init__(
        self, config: TrialConfig, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer],
        batch: list[list[Part]], states: list[State], step: int, scale: float,
    ) -> None:  # fmt: skip
        self._config, self._model, self._optimizers = config, model, optimizers
        self._batch, self._states, self._scale = batch, states, scale
        self.step, self.loss, self.norms, self.draws = step + 1, 0.0, list[float](), False

    def minimize(self, name: str, loss_of: Callable[[Any], Any]) -> Tensor:
        optimizer = self._optimizers[name]
        self._model.zero_grad()
        loss, drew = backward(self._config, self._model, self._batch, self._states, self.step - 1, self._scale, loss_of)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in self._model.parameters():
            if id(parameter) not in own:
                parameter.grad = None
        self.norms.append(clip_gradients(self._model, self._config.training.max_grad_norm))
        optimizer.step()
        self.loss, self.draws = self.loss + loss, self.draws or drew
        return torch.tensor(loss)


def backward(
    config: TrialConfig, model: nn.Module, batch: list[list[Part]], states: list[State], step: int, scale: float,
    loss_of: Callable[[Any], Any],
) -> tuple[float, bool]:  # fmt: skip
    """Compute the gradients of a loss; return it, and whether a forward pass drew random numbers."""
    if config.task.step is None:
        model.train()
    divisor = scale * count_of(config, batch) / len(batch)  # gradients are of a rank's own mean, as in DDP
    loss, count, draws = 0.0, 0.0, False
    for rank, microbatches in enumerate(batch):
        put_back(model, states[rank])
        seed_all(zlib.crc32(f"{config.training.seed}/{step}/{rank}".encode()))
        before = generators(model)
        for inputs, _ in microbatches:
            returned = loss_of(moved(inputs, next(model.parameters()).device))
            loss_sum, num_labels = returned if isinstance(returned, tuple) else (returned, None)
            draws = draws or generators(model) != before
            (loss_sum / divisor).backward()
            loss, count = loss + float(loss_sum.detach()), count + (1 if num_labels is None else float(num_labels))
        states[rank] = state_of(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(divisor / max(count, 1))
    return loss / max(count, 1), draws


@torch.no_grad()
def evaluate(config: TrialConfig, model: nn.Module, ranks: Iterable[Iterable[Part]], states: list[State]) -> float:
    """Return the mean loss in eval mode."""
    loss, count, modes = 0.0, 0.0, [(module, module.training) for module in model.modules()]
    model.eval()
    for rank, batches in enumerate(ranks):
        put_back(model, states[rank])
        seed_all(zlib.crc32(f"{config.training.seed}/0/{rank}".encode()))
        for inputs, num_items in batches:
            before = generators(model)
            loss_sum, num_labels = val_loss_of(config, model, inputs)
            if generators(model) != before:
                raise Stopped(
                    "its forward pass or loss draws random numbers in eval() mode; draw them from a torch.Generator "
                    "with a fixed seed"
                )
            loss += float(loss_sum.detach()) * (num_items if num_labels is None else 1)
            count += num_items if num_labels is None else float(num_labels)
    for module, mode in modes:
        module.training = mode
    return loss / max(count, 1)


def build_model(config: TrialConfig) -> nn.Module:
    function = config.model.function()
    model: nn.Module = function(**instantiate(config.model.arguments, "model"))
    load = function.load_weights(**config.model.arguments) if isinstance(function, ModelSource) else None
    if load is not None:  # pretrained weights, of models of transformers
        load({**dict(model.named_parameters()), **dict(model.named_buffers())})
    if (dtype := getattr(torch, config.precision.storage_dtype.name)) is not torch.float32:
        for part in model.to(dtype).children() if config.task.step else [model.to(dtype)]:
            part.register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)
    return model


def cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the inputs of a model with its type, as FSDP casts them."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {name: cast(part) for name, part in value.items()}
        return type(value)(map(cast, value)) if type(value) in (list, tuple) else value

    return cast(args), cast(kwargs)


def build_optimizers(config: TrialConfig, model: nn.Module, parts: int) -> dict[str, torch.optim.Optimizer]:
    if config.task.step is None:
        return {"model": build_optimizer(config, model, parts)}
    children = dict(model.named_children())
    if config.task.optimizers is None:
        trained = {name for name, child in children.items() if any(p.requires_grad for p in child.parameters())}
        return {name: build_optimizer(config, children[name], parts) for name in children if name in trained}
    function = import_callable(config.task.optimizers, "task.optimizers")
    lr = config.optimizer.lr * (parts if config.optimizer.scale_lr else 1)
    return dict(function(children, lr))


def build_optimizer(config: TrialConfig, model: nn.Module, parts: int) -> torch.optim.Optimizer:
    o = config.optimizer
    lr = o.lr * (parts if o.scale_lr else 1)
    params: Any = [*model.parameters()]
    if o.groups is not None:
        groups = import_callable(o.groups, "optimizer.groups")
        params = groups([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    if o.target is not None:
        kind = import_callable(o.target, "optimizer._target_")
        given = given_to(kind)
        if given == NAMED and o.groups is None:
            params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return kind(**{given: params}, lr=lr, **instantiate(o.arguments, "optimizer"))
    if o.decay.name == "matrices" or o.embedding_lr is not None:
        embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        params = [{"params": [p]} for p in params]
        for group in params:
            if o.decay.name == "matrices" and group["params"][0].dim() < 2:
                group["weight_decay"] = 0.0
            if o.embedding_lr is not None and any(group["params"][0] is weight for weight in embeddings):
                group["lr"] = o.embedding_lr * lr / o.lr
    if o.name.name == "sgd":
        return torch.optim.SGD(params, lr, momentum=o.momentum, weight_decay=o.weight_decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.name.name]
    return kind(params, lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay)


def set_mode(optimizers: dict[str, torch.optim.Optimizer], mode: str) -> None:
    """Call `train` or `eval` of optimizers that have modes, as schedule-free ones do."""
    for optimizer in optimizers.values():
        getattr(optimizer, mode, lambda: None)()


def build_schedule(
    config: TrialConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int | None
) -> torch.optim.lr_scheduler.LRScheduler:
    if config.lr_schedule.target is not None:
        schedule = import_callable(config.lr_schedule.target, "lr_schedule._target_")
        return schedule(optimizer, **config.lr_schedule.users_arguments(config.training.num_steps(steps_per_epoch)))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, step, steps_per_epoch))


def lr_factor(config: TrialConfig, step: int, steps_per_epoch: int | None) -> float:
    schedule, total = config.lr_schedule, config.training.total_steps(steps_per_epoch)
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name.name == "step" and steps_per_epoch:
        return schedule.gamma ** (step // (steps_per_epoch * schedule.step_epochs))
    if schedule.name.name == "cosine":
        done = min(1.0, (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps))
        return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2
    return 1.0


def clip_gradients(model: nn.Module, most: float | None) -> float:
    """Return the norm of all gradients before they are scaled down to `most`."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
    if most is not None:
        nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    return float(norm)


def main(source: str, target: str) -> None:
    import_from(os.getcwd())
    asked = json.loads(Path(source).read_text())
    config = from_dict(TrialConfig, asked.pop("config"))
    Path(f"{target}.new").write_text(json.dumps(run(config, **asked)))
    os.replace(f"{target}.new", target)


if __name__ == "__main__":
    main(*sys.argv[1:])
