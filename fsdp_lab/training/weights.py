"""First weights: those of the model's own constructor after `torch.manual_seed(training.seed)`, whatever the sharding.

`init=rank0`: rank 0 runs the constructor and sends the values, a parameter at a time. `init=meta`: every rank runs it
and keeps its part. The weights are equal to the bit either way, for any number of workers.

`init=device`: as `meta`, but the constructor computes on the rank's GPU, whose generator draws other numbers. The
weights are equal to the bit for every sharding and any number of GPUs of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.parallel import Api
from fsdp_lab.config.training import Init
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.distributed import together
from fsdp_lab.training.optimizer import gradient_device
from fsdp_lab.training.torch_private import replace_tensors
from fsdp_lab.workloads.base import ModelSpec
from fsdp_lab.workloads.construct import Blueprint, ValuesNeeded


def build_blueprint(spec: ModelSpec, config: TrialConfig) -> Blueprint:
    """Build the model without the values of its parameters.

    With `init=rank0` a constructor that reads values is run as it is.

    Raises:
        UserError: such a constructor with another `init`.
    """
    try:
        return Blueprint(spec.build, config.training.seed)
    except ValuesNeeded as error:
        if config.init is not Init.rank0:
            raise ModelError(
                f"init={config.init.name}: the constructor of {error.module} reads the values of parameters, which "
                f"meta tensors lack ({error.reason}); use init=rank0, which builds the whole model on rank 0."
            ) from error
        return Blueprint(spec.build, config.training.seed, whole=True)


def init_weights(
    model: nn.Module,
    blueprint: Blueprint,
    config: TrialConfig,
    device: torch.device,
    load: Callable[[Mapping[str, Tensor]], None] | None = None,
) -> None:
    """Give the parameters of a sharded model on `meta` their storage and values, and move its buffers to the device.

    With `init=rank0` only rank 0 ever holds the whole model, in host memory. Else no rank holds more than a group of
    its parameters (`construct.GROUP_BYTES`), with `init=device` on the device. With FSDP1 every rank holds the whole
    model in host memory, from which `apply_fsdp1` takes it.

    Args:
        load: puts values other than the constructor's into this rank's part; None: the constructor's values.
    """
    home = torch.device("cpu") if config.sharding.api is Api.fsdp1 else gradient_device(config, device)
    materialize(model, lambda old: torch.empty_like(old, device=home) if old.is_meta else old.to(device))
    parameters = dict(model.named_parameters())
    if load is not None:
        together(lambda: load({**parameters, **dict(model.named_buffers())}))
        return
    source = 0 if config.init is Init.rank0 else None
    values: Iterable[tuple[str, Tensor | None]] = ((name, None) for name in blueprint.names)
    if source is None or dist.get_rank() == source:
        values = blueprint.values(device) if config.init is Init.device else blueprint.values()

    def fill() -> None:
        with torch.no_grad():
            for name, value in _to_the_end(values, blueprint.names):
                _fill(parameters[name], value, source, device)

    together(fill)


def _to_the_end(
    values: Iterable[tuple[str, Tensor | None]], names: Iterable[str]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the values; after an error the names without theirs, and then raise it: the other ranks wait for each."""
    left = iter(names)
    try:
        for pair in values:
            next(left)
            yield pair
    except Exception:
        yield from ((name, None) for name in left)
        raise


def materialize(model: nn.Module, fresh: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by `fresh(tensor)`.

    Tied parameters stay tied, which PyTorch's own `to_empty` does not ensure.

    Args:
        fresh: gets parameters on `meta`, and real buffers.
    """
    holders = parameter_holders(model)
    made: set[int] = set()

    def once(tensor: Tensor) -> Tensor:
        """Return the tensor itself if it was replaced: a tied parameter is met again, with storage of its own."""
        if id(tensor) in made and not tensor.is_meta:
            return tensor
        if tensor.is_meta:
            made.add(id(tensor))
        return fresh(tensor)

    replace_tensors(model, once)
    tie_again(holders)


def parameter_holders(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return, for each parameter, the modules that have it, with its name there."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((module, leaf))
    return [*holders.values()]


def tie_again(holders: Iterable[list[tuple[nn.Module, str]]]) -> None:
    """Give all holders of a parameter what the first of them has now."""
    for (first, name), *others in holders:
        for module, leaf in others:
            setattr(module, leaf, getattr(first, name))


def _fill(parameter: Tensor, value: Tensor | None, source: int | None, device: torch.device) -> None:
    """Copy this rank's part of a value.

    Args:
        value: the whole value; None: another rank sends it.
        source: the rank that sends it; None: every rank has it.
        device: of collectives.
    """
    if not isinstance(parameter, DTensor):
        if value is not None:
            parameter.copy_(value)
        if source is not None:
            sent = parameter.detach().to(device)  # FSDP1's are on the host still, which NCCL cannot send
            dist.broadcast(sent, source)
            parameter.copy_(sent)
        return
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device) if value is None else value.to(device)
    if source is not None and parameter.device_mesh.size() < dist.get_world_size():
        dist.broadcast(whole, source)  # tensor-parallel ranks have it whole, in meshes without the source
        source = None
    part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=source)
    parameter.to_local().copy_(part.to_local())
