"""Tensor parallelism: neighbouring ranks share each layer and the samples, by a plan that names layers in words.

A plan maps patterns of module names, in which `*` stands for a number, to words:

- `colwise`: a linear layer divided by its outputs, which stay divided for a `rowwise` one; an embedding by its columns.
- `rowwise`: a linear layer divided by its inputs, whose results are added up; an embedding by its vocabulary.
- `sequence`: a norm. With it, tensors between the divided layers are divided along the sequence, dimension 1.
- `colwise_gathered`: as `colwise`, with whole outputs. `rowwise_split`: as `rowwise`, of whole inputs.
- `heads`: a norm of each head, between a `colwise` and a `rowwise` layer. Each rank has its own heads, so gradients are
  added up.
- `loss_parallel`: the head, as `colwise`. Its logits stay divided by the vocabulary in training, if the loss allows it.

A parameter that no plan names is whole on each of these ranks.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.key import divisors
from fsdp_lab.config.suggest import did_you_mean
from fsdp_lab.config.trial import ShardingConfig, TrialConfig
from fsdp_lab.config.workload import TP_WORDS
from fsdp_lab.memory.allocator_profile import not_reported
from fsdp_lab.memory.torch_private import own_plan, wait_for, without_modes
from fsdp_lab.training.distributed import ParallelDims
from fsdp_lab.training.layout import DividedLayers, matches
from fsdp_lab.training.parallel.base import MIXED, at
from fsdp_lab.training.parallel.fsdp2 import FSDP2
from fsdp_lab.training.parallel.sharded import FREED

_SIZES = (
    "invalid for input of size",
    "same reduction dim",
    "cannot be multiplied",
    "broadcast a dim",
    "must match the size",
)
_ROUNDING = 0.01  # of norms of gradients, because kernels may add in another order


class _Style(NamedTuple):
    """A tensor-parallel style of PyTorch."""

    kind: type[ParallelStyle]
    options: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the code that makes it."""
        return f"{self.kind.__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


class TensorParallel(FSDP2):
    """FSDP2, after neighbouring ranks have divided layers."""

    def __init__(self, config: TrialConfig, dims: ParallelDims, device: torch.device) -> None:
        super().__init__(config, dims, device)
        self.asks_all_for = f"sharding.tp={dims.tp}"

    @staticmethod
    def axes(sharding: ShardingConfig, world_size: int) -> dict[str, int]:
        return {**FSDP2.axes(sharding, world_size), "tp": sharding.tp}

    def divide_layers(self, model: nn.Module, in_tokens: bool) -> DividedLayers:
        """Divide by the plan of the configuration, else by the model's own attribute `_tp_plan`."""
        assert self.dims.tp_mesh is not None
        if not (plan := self.config.model.known_tp_plan() or own_plan(model)):
            raise ModelError(
                f"sharding.tp={self.dims.tp}: {type(model).__name__} has no tensor-parallel plan; give one by "
                "model.tp_plan={<module>: colwise, <module>: rowwise}, or the class an attribute _tp_plan, or use "
                "sharding.tp=1."
            )
        return apply_tensor_parallel(model, plan, self.dims.tp_mesh, divided_loss=in_tokens)

    def divided_loss(self) -> AbstractContextManager[Any]:
        return loss_parallel()

    def explain(self, text: str, cause: BaseException, forward: bool) -> UserError | None:
        if MIXED in text:
            return ModelError(
                f"sharding.tp={self.dims.tp}: a tensor that is divided among ranks meets a whole one{at(cause)}; call "
                "modules that model.tp_plan names instead of using their weights, and name no module whose weight or "
                "output other code needs whole (a head gives whole logits by colwise_gathered); or use sharding.tp=1 "
                f"with {self.sharding}."
            )
        if forward and FREED not in text and any(words in text for words in _SIZES):
            return ModelError(
                f"sharding.tp={self.dims.tp}: {text.rstrip('.')}{at(cause)}. Between a `colwise` and a `rowwise` layer "
                "each worker has a part of the features: write -1 for their number or that of heads, name both layers "
                "in model.tp_plan, and use a degree that divides the heads."
            )
        return super().explain(text, cause, forward)

    def check_gradients(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Check the gradients of undivided parameters."""
        assert self.dims.tp_mesh is not None
        with without_modes(), not_reported():
            mine = {
                name: float(p.grad.to_local().float().norm())
                for name, p in named
                if isinstance(p.grad, DTensor) and "tp" not in (p.grad.device_mesh.mesh_dim_names or ())
            }
            ranks: list[dict[str, float]] = [{}] * self.dims.tp
            dist.all_gather_object(ranks, mine, group=self.dims.tp_mesh.get_group())
        for name in mine:
            norms = [norm[name] for norm in ranks if math.isfinite(norm[name])]
            if norms and max(norms) - min(norms) > _ROUNDING * max(norms):
                raise UserError(
                    f"{self.sharding} sharding.tp={self.dims.tp}: the gradient of {name} is not the same on ranks "
                    "that share a layer, since each has its own heads or columns where it is used. Name its module in "
                    "model.tp_plan, a norm of heads by `heads`, or leave the layer before it undivided."
                )

    def shard_to_draw(self) -> int:
        if self.home.type == "cpu":
            raise ModelError(
                f"init=meta with sharding.tp={self.dims.tp}: on a CPU PyTorch draws the same numbers for each part of "
                "a divided layer; use init=plain or init=rank0."
            )
        return 0


def apply_tensor_parallel(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, divided_loss: bool = True
) -> DividedLayers:
    """Divide the layers of a model among the ranks of a mesh, in place; before `fully_shard`. Return how.

    Args:
        model: not sharded yet.
        mesh: of one dimension.
        divided_loss: whether the loss takes logits that are divided by the vocabulary.

    Raises:
        ModelError: the plan does not fit the model.
    """
    words = _words_by_name(model, plan, mesh.size())
    holders, trained = parameter_holders(model), {name for name, p in model.named_parameters() if p.requires_grad}
    between = Shard(1) if "sequence" in words.values() else Replicate()
    sharing = _parents_that_gather(model, words) if between == Shard(1) else set()
    styles = {}
    for name, word in words.items():
        given = Replicate() if name.rpartition(".")[0] in sharing else between
        styles[name] = _style(word, model.get_submodule(name), given, between, divided_loss)
    made = {name: style.kind(**style.options) for name, style in styles.items()}
    parallelize_module(model, mesh, made, src_data_rank=None)
    for name in sharing:
        model.get_submodule(name).register_forward_pre_hook(partial(_gather_first, mesh), with_kwargs=True)
    for name, word in words.items():
        module = model.get_submodule(name)
        if between == Shard(1) and (word.startswith("rowwise") or isinstance(module, nn.Embedding)):
            module.register_forward_pre_hook(_length_check(mesh.size(), name))
        module.register_forward_hook(_arrived)
    tie_again(holders)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)  # PyTorch's `SequenceParallel` trains what was frozen
    # that norms are reduced over one dimension after the other; that layers return views, see `UnitHooks`
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    code = {pattern: next(str(styles[name]) for name in words if matches([pattern], name)) for pattern in plan}
    return DividedLayers(code, sorted(sharing), divided_loss and "loss_parallel" in words.values())


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


def _words_by_name(model: nn.Module, plan: Mapping[str, str], tp: int) -> dict[str, str]:
    """Return the word of each module that a plan names."""
    words = {}
    for pattern, word in plan.items():
        named = {name: module for name, module in model.named_modules() if matches([pattern], name)}
        if word not in TP_WORDS:
            raise ModelError(f"the tensor-parallel plan has {pattern}: {word}; use one of {', '.join(TP_WORDS)}.")
        if not named:
            known = [re.sub(r"\d+", "*", name) for name, _ in model.named_modules()]
            raise ModelError(
                f"the tensor-parallel plan has {pattern}: {word}, but {type(model).__name__} has no module of that "
                f"name. {did_you_mean(pattern, known)}`*` stands for a number."
            )
        for name, module in named.items():
            _check_module(name, module, word, tp)
            words[name] = word
    left = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in words]
    if "sequence" in words.values() and left:
        raise ModelError(
            f"the tensor-parallel plan has no word for {left[0]}, which would see a part of the sequence only; with "
            "`sequence` a plan names every module that has parameters."
        )
    return words


def _check_module(name: str, module: nn.Module, word: str, tp: int) -> None:
    is_linear, is_embedding = isinstance(module, nn.Linear), isinstance(module, nn.Embedding)
    of_norm, of_both, kind = word in ("sequence", "heads"), word in ("colwise", "rowwise"), type(module).__name__
    if of_norm and "Norm" in kind and "BatchNorm" not in kind:  # there are many classes of LayerNorm and RMSNorm
        return
    if of_norm or not (is_linear or (is_embedding and of_both)):
        takes = (
            "norms, whose class has Norm in its name"
            if of_norm
            else "nn.Linear and nn.Embedding"
            if of_both
            else "nn.Linear"
        )
        raise ModelError(f"the tensor-parallel plan has {name}: {word}, but that is a {kind}; {word} is for {takes}.")
    own = {leaf for leaf, _ in module.named_parameters()}
    if "weight" not in own or own - {"weight", "bias"}:
        raise ModelError(
            f"the tensor-parallel plan has {name}: {word}, but this {kind} computes its weight or bias from other "
            f"parameters ({', '.join(sorted(own))}), as weight_norm does, and these are not divided with it; leave it "
            "out of the plan, or use a plain layer."
        )
    by_columns = word.startswith("rowwise") == is_linear
    size = module.get_parameter("weight").shape[int(by_columns)]
    if size % tp:
        raise ModelError(
            f"sharding.tp={tp} does not divide the {size} {'columns' if by_columns else 'rows'} of {name}.weight; use "
            f"one of {divisors(size)}."
        )


def _style(word: str, module: nn.Module, given: Placement, between: Placement, divided_loss: bool) -> _Style:
    """Return PyTorch's style of a word."""
    if isinstance(module, nn.Embedding):
        kind = RowwiseParallel if word == "rowwise" else ColwiseParallel
        return _Style(kind, {"input_layouts": Replicate(), "output_layouts": between})
    match word:
        case "colwise":
            return _Style(ColwiseParallel, {"input_layouts": given})
        case "rowwise":
            return _Style(RowwiseParallel, {"output_layouts": between})
        case "colwise_gathered":
            return _Style(ColwiseParallel, {"input_layouts": given, "output_layouts": Replicate()})
        case "rowwise_split":
            return _Style(RowwiseParallel, {"input_layouts": Replicate(), "output_layouts": between})
        case "sequence":
            return _Style(SequenceParallel, {})
        case "heads":  # its heads may be in any dimension but the last
            return _Style(SequenceParallel, {"use_local_output": True})
        case _:
            outputs = {"output_layouts": Shard(-1) if divided_loss else Replicate()}
            return _Style(ColwiseParallel, {"input_layouts": given, **outputs, "use_local_output": not divided_loss})


def _parents_that_gather(model: nn.Module, words: Mapping[str, str]) -> set[str]:
    """Return the modules in which several layers need the whole sequence, and nothing else uses a part of it.

    They gather it once for all these layers. The model itself, and a module with its own norm, do not.
    """
    of_parent: dict[str, list[str]] = {}
    for name, word in words.items():
        of_parent.setdefault(name.rpartition(".")[0], []).append(word)
    return {name for name, inside in of_parent.items() if name and "colwise" in inside and "sequence" not in inside}


def _length_check(tp: int, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return a check that ranks get equal parts of a sequence. Otherwise gloo and NCCL end, or wait, silently.

    A closure, because with the name as an argument a block's compiled code would not be used for others.
    """

    def check(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args and args[0].shape[1] % tp:
            raise ModelError(
                f"sharding.tp={tp} does not divide the {args[0].shape[1]} positions that {name} gets, and the plan "
                "divides them by `sequence`; pad them to a multiple, or use a plan without `sequence`."
            )

    return check


def _gather_first(mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Gather the sequence of the first argument."""

    def gather(part: Tensor) -> Tensor:
        if not isinstance(part, DTensor):
            part = DTensor.from_local(part, mesh, (Shard(1),), run_check=False)
        return part.redistribute(placements=(Replicate(),))

    if args:
        return (gather(args[0]), *args[1:]), kwargs
    first, *_ = kwargs
    return args, {**kwargs, first: gather(kwargs[first])}


def _arrived(module: nn.Module, args: Any, output: Any) -> Any:
    """Wait for a layer's output, unless its code is compiled: code that is compiled later would give it no gradient."""
    return output if torch.compiler.is_compiling() else wait_for(output)
