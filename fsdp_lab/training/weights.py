"""First weights: those that the user's constructor makes, called once after `torch.manual_seed(training.seed)`.

`init=plain`: every rank calls the constructor, and what it made is sharded. `init=rank0`: rank 0 calls it and sends the
values; the other ranks have a model without values. `init=meta`: no rank has the whole model; each module draws its
shards by its own `reset_parameters` or `init_weights`, and gets other numbers than from the constructor. Each rank
reads its shards of pretrained weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp_lab.config.axes.precision import Dtype
from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.training import Init
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.machine.hardware import free_memory
from fsdp_lab.memory.torch_private import replace_tensors
from fsdp_lab.training.distributed import gather, own_node, together
from fsdp_lab.training.parallel.base import Parallel, local
from fsdp_lab.training.parallel.sharded import check_hooks
from fsdp_lab.workloads.base import ModelSpec, plain_class
from fsdp_lab.workloads.construct import TooLarge, construct, seeded, without_values


@dataclass(frozen=True)
class FirstModel:
    """A model that is not sharded yet, and where its first values come from.

    Attributes:
        model: its parameters are on `meta` where another source has their values.
        init: the one that was used; None: the values are loaded.
        load: puts values into this rank's part; None: nothing is loaded.
        whole: with `init=rank0`, the parameters on rank 0; empty on others.
        notes: why `init` is not the one that was asked for.
    """

    model: nn.Module
    init: Init | None
    load: Callable[[Mapping[str, Tensor]], None] | None = None
    whole: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def build_model(spec: ModelSpec, config: TrialConfig) -> FirstModel:
    """Call the constructor once. Every rank calls this.

    With `init=plain` the models of a node's ranks may use half of its free memory; larger ones use `init=rank0`.

    Raises:
        UserError: the constructor fails.
    """
    seed = config.training.seed
    sketch = partial(without_values, spec.build, seed)
    if spec.load_weights is not None:
        return FirstModel(together(sketch), None, spec.load_weights)
    if config.init is Init.meta:
        return FirstModel(together(sketch), Init.meta)
    notes = []
    if config.init is Init.plain:
        ranks = gather((own_node(), free_memory()))
        here = [free for node, free in ranks if node == own_node()]
        most = min(here) / 2 / len(here)
        model = together(lambda: _within(spec.build, seed, most))
        if all(gather(model is not None)):
            assert model is not None
            return FirstModel(model, Init.plain)
        del model
        notes = [
            f"init=plain needs more than half of a node's free memory ({min(here) / 2**30:.0f} GiB for {len(here)} "
            "ranks), so rank 0 builds the model and sends it (init=rank0)."
        ]
    if dist.get_rank() == 0:
        model = together(lambda: construct(spec.build, seed))
        # not its state, which may lack a part; detached, because parameters change in place
        state = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
        return FirstModel(model, Init.rank0, whole=state, notes=notes)
    return FirstModel(together(sketch), Init.rank0, notes=notes)


def _within(build: Callable[[], nn.Module], seed: int, most_bytes: float) -> nn.Module | None:
    try:
        return construct(build, seed, most_bytes)
    except TooLarge:
        return None


def store_in(dtype: Dtype, model: nn.Module) -> None:
    """Convert a model in place, with or without values, as a script does by `model.to(dtype)`.

    Raises:
        ModelError: it has complex numbers, of which only the real part would be left.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_complex():
            raise ModelError(
                f"precision.storage_dtype={dtype.value}: {name} is complex, and has no such type; register "
                "torch.view_as_real(x), and view it as complex in forward, or use precision.storage_dtype=float32."
            )
    model.to(getattr(torch, dtype.value))


def fill(model: nn.Module, first: FirstModel, parallel: Parallel) -> None:
    """Give the parameters of a divided model their first values, where `parallel.fills` says. Every rank calls this.

    Raises:
        ModelError: with `init=meta`, a module does not initialise its weights.
    """
    if first.init is Init.plain:
        parallel.place(model)
        return
    home, of_buffers = parallel.fills
    remedy = "use init=plain" if first.load is None else "train from the constructor's weights"
    together(lambda: check_hooks(model, f"init={first.init.name}" if first.init else "pretrained weights", remedy))
    replace_tensors(model, lambda old: torch.empty_like(old, device=home) if _is_parameter(old) else old.to(home))
    if first.init is Init.meta:
        together(lambda: _initialise(model, parallel))
        if parallel.config.precision.is_narrow:  # modules may have made buffers in float32
            store_in(parallel.config.precision.storage_dtype, model)
    elif first.init is Init.rank0:
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, strict=False, cpu_offload=parallel.fills_on_host
        )  # buffers follow
        set_model_state_dict(model, first.whole, options=options)  # each is cast to the type of its parameter
        first.whole.clear()
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, buffer.to(of_buffers))
    if first.init is Init.rank0:
        for buffer in model.buffers():
            sent = buffer.to(parallel.device)
            dist.broadcast(sent, 0)
            buffer.copy_(sent)
    if first.load is not None:
        load = first.load
        together(lambda: load({**dict(model.named_parameters()), **dict(model.named_buffers())}))


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


@torch.no_grad()
def _initialise(model: nn.Module, parallel: Parallel) -> None:
    """Draw the weights of a divided model in place, module by module."""
    shard = parallel.shard_to_draw()
    parts = {name: local(parameter) for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    for values in parts.values():
        values.fill_(math.nan)
    with seeded(zlib.crc32(f"{parallel.config.training.seed}/{shard}".encode())):
        _reset(model, "")
    for name, values in parts.items():
        if values.isnan().any():
            raise ModelError(
                f"init=meta: {name} has no value after reset_parameters() and init_weights() of the model's modules; "
                "set it there, or use init=plain or init=rank0, which call the constructor."
            )


def _reset(module: nn.Module, name: str) -> None:
    """Let a module initialise its weights, after those of its children; `init_weights` does both.

    Raises:
        ModelError: it has weights, and neither method.
    """
    if callable(own := getattr(module, "init_weights", None)):
        own()
        return
    for child_name, child in module.named_children():
        _reset(child, f"{name}.{child_name}".lstrip("."))
    if callable(own := getattr(module, "reset_parameters", None)):
        own()
    elif parameters := [leaf for leaf, _ in module.named_parameters(recurse=False)]:
        raise ModelError(
            f"init=meta: {name or 'the model'} ({plain_class(module).__name__}) has the weights {parameters[0]}, but "
            "no method reset_parameters() or init_weights() that initialises them; add one, or use init=plain or "
            "init=rank0, which call the constructor."
        )
