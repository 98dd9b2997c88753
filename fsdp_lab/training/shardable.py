"""What of a model's parameters cannot be sharded or trained, found before the first step; by forecasts, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.parallel import Api, Dtype, Granularity
from fsdp_lab.config.training import OptimizerImplementation, OptimizerName
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.torch_private import has_hooks
from fsdp_lab.workloads.generators import reached


def has_complex(model: nn.Module) -> bool:
    """Return whether an optimizer has to update complex numbers, which fused kernels cannot."""
    return any(parameter.is_complex() and parameter.requires_grad for parameter in model.parameters())


def check_made(model: nn.Module, config: TrialConfig) -> None:
    """Check what a constructor has made, before it is divided.

    Raises:
        ModelError: a parameter or buffer has no size yet, or is divided already; or something holds on to a parameter
            that sharding replaces.
    """
    for module in model.modules():
        kind = type(module).__name__
        for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if is_lazy(tensor):
                raise ModelError(
                    f"the model has a {kind}, whose parameters get their size from the first batch, but fsdp_lab "
                    f"shards them before it; use {kind.replace('Lazy', '')} with that size."
                )
            if isinstance(tensor, DTensor):
                raise ModelError(
                    f"the parameter {leaf} of {kind} is already a DTensor; fsdp_lab shards parameters itself: make it "
                    "a plain tensor."
                )
    if config.sharding.granularity is Granularity.ddp:
        return
    check_hooks(model, _sharding(config), "use sharding=ddp, which keeps it")
    for name, holder in held_parameters(model):
        raise ModelError(
            f"{_sharding(config)}: {holder} holds the parameter {name}, but {config.sharding.api_name} puts a shard in "
            "its place, and what is held is not trained; look it up where it is used, as in self.head.weight, or use "
            "sharding=ddp."
        )


def check_hooks(model: nn.Module, where: str, remedy: str) -> None:
    """Check that no parameter has a hook.

    Raises:
        ModelError: one has, and would lose it.
    """
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise ModelError(
                f"{where}: the parameter {name} has a hook (register_hook or register_post_accumulate_grad_hook), "
                f"which would not be called: another parameter takes its place. Change the gradient in forward, or "
                f"{remedy}."
            )


def held_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each parameter that something but its module holds, and the attribute that leads to it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {id(module) for module in model.modules()}
    seen = set(own)
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute != "_parameters" and not isinstance(module, nn.RNNBase):  # which updates what it holds
                for parameter in reached(value, seen, nn.Parameter):
                    if id(parameter) in names:
                        yield names[id(parameter)], f"{path or 'the model'}'s {attribute}"


def check_parameters(model: nn.Module, units: Sequence[Sequence[nn.Module]], config: TrialConfig) -> None:
    """Check the parameters of a model that is not sharded yet.

    Args:
        units: the modules that share each unit, without the root; children before their parents. Ignored for `ddp`.

    Raises:
        ModelError: with the name of the first parameter that the configuration cannot train, and a remedy.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        _check_parameter(parameter, names[id(parameter)], config)
    if config.sharding.granularity is Granularity.ddp:
        return
    modules = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ModelError(
                f"{_sharding(config)}: {modules[id(module)]} ({type(module).__name__}) has sparse=True, but "
                f"{config.sharding.api_name} reduces dense gradients only; build it with sparse=False, or use "
                "sharding=ddp."
            )
    taken: set[int] = set()
    flat = config.sharding.api is Api.fsdp1
    does = "FSDP1 makes one tensor of a unit" if flat else "FSDP2 reduces the gradients of a unit"
    for unit in (*units, [model]):
        own = [p for module in unit for p in module.parameters() if (flat or p.requires_grad) and id(p) not in taken]
        taken |= {id(parameter) for parameter in own}
        for first, second in pairwise(own):
            if first.dtype is not second.dtype:
                raise ModelError(
                    f"{_sharding(config)}: {names[id(first)]} is {_dtype(first)} and {names[id(second)]} is "
                    f"{_dtype(second)}, but {does}, here "
                    f"{modules[id(unit[0])] or 'the root'}, in one dtype; give them one dtype, or units of their own "
                    "(sharding=per_layer, or sharding=per_block model.block_classes=[...]), or use sharding=ddp."
                )


def make_contiguous(model: nn.Module) -> None:
    """Let FSDP take transposed and expanded parameters, and weights in `channels_last`: their values stay."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # in place: ties stay


def _check_parameter(parameter: nn.Parameter, name: str, config: TrialConfig) -> None:
    precision, sharded = config.precision, config.sharding.granularity is not Granularity.ddp
    in_float32 = precision.param_dtype is Dtype.float32
    if parameter.is_complex() and config.sharding.api is Api.fsdp1:
        raise ModelError(
            f"sharding.api=fsdp1: the parameter {name} is {_dtype(parameter)}, which FSDP1 does not shard; use "
            "sharding.api=fsdp2, or register torch.view_as_real(x), and view it as complex in forward."
        )
    if parameter.is_complex() and parameter.requires_grad:
        reduced = precision.reduce_dtype is Dtype.float32 and not precision.loss_scaling
        fused = config.optimizer.implementation is OptimizerImplementation.fused
        if fused or not reduced or (sharded and not (in_float32 and config.optimizer.name is OptimizerName.sgd)):
            raise ModelError(
                f"the parameter {name} is {_dtype(parameter)}: it trains with reductions in float32, no loss scaling "
                "and no fused optimizer, and under FSDP2 with optimizer=sgd precision=fp32 only; use these, or "
                "register torch.view_as_real(x), and view it as complex in forward."
            )
    if sharded and not parameter.ndim:
        raise ModelError(
            f"{_sharding(config)}: the parameter {name} is a scalar, and {config.sharding.api_name} shards the first "
            "dimension; register it with one, as x.reshape(1), or use sharding=ddp."
        )
    if sharded and parameter.dtype is torch.float64 and not in_float32:
        raise ModelError(
            f"precision.param_dtype={precision.param_dtype.value}: the parameter {name} is {_dtype(parameter)}, of "
            f"which {config.sharding.api_name} would keep too little; use precision=fp32, which keeps the dtypes of a "
            "model."
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sharding(config: TrialConfig) -> str:
    return f"sharding={config.sharding.granularity.name}"
