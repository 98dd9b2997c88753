"""First weights: drawn from the seed alone, so that every sharding starts from the same ones.

Each parameter has a generator of its own, seeded by `training.seed` and its name. Drawn on rank 0 and
sent out (`init=rank0`), or drawn one at a time on every rank, which keeps its shard (`init=meta`): the
weights are equal to the bit either way, for any sharding and any number of workers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_lab.config.training import Init
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.optimizer import gradient_device
from fsdp_lab.training.torch_private import WRAPPED
from fsdp_lab.workloads.base import ModelSpec

_WRAPPER = f"{WRAPPED}."


def named_owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """`(full name, module that holds it, parameter)`, without the names that wrappers put in between."""
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{leaf}".lstrip(".").replace(_WRAPPER, ""), module, parameter


def draw(spec: ModelSpec, owner: nn.Module, name: str, shape: torch.Size, seed: int) -> Tensor:
    """One parameter's first value, float32 on the CPU, unsharded."""
    # One text for both: the CPU generator takes only the lower 32 bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    out = torch.empty(shape)
    spec.draw_parameter(owner, name, out, generator)
    return out


def init_weights(model: nn.Module, spec: ModelSpec, config: TrialConfig, device: torch.device) -> None:
    """Materialise the shards of a model on `meta` and fill them.

    `init=rank0`: only rank 0 ever holds the whole model, in host memory; the others receive it a
    parameter at a time and keep their part. `init=meta`: no rank does.
    """
    model.to_empty(device=gradient_device(config, device))
    seed = config.training.seed
    if config.init is Init.meta:
        with torch.no_grad():
            for name, owner, parameter in named_owners(model):
                _fill(parameter, draw(spec, owner, name, parameter.shape, seed))
        return
    full: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        full = {name: draw(spec, owner, name, p.shape, seed) for name, owner, p in named_owners(model)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)  # type: ignore[arg-type]


def _fill(parameter: nn.Parameter, full: Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    # src_data_rank=None: every rank has the same `full`, so each cuts its own part without a message.
    full = full.to(parameter.device_mesh.device_type)
    part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())
