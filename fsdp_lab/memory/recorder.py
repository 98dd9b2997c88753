"""Records every tensor storage of an optimizer step, real or fake: when it is allocated, freed, resized or reused.

A dispatch mode sees the tensors that operators return. Their category follows from the phase, from hooks on
parameters, and from the ranges that FSDP2 marks for profilers.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_lab.memory.gloo import SynchronousGlooMode
from fsdp_lab.memory.profile import Event, Profile
from fsdp_lab.memory.torch_private import (
    DEVICE,
    FLAT_GATHER,
    FSDP_COPIES_OUT,
    FSDP_ENDS_FORWARD,
    FSDP_STARTS_PASS,
    GATHER,
    SCATTER,
    AccumulatesInPlace,
    Ranges,
    TorchDispatchMode,
    active_fake_mode,
    around_compiled,
    flat_units,
    in_backward,
    storages_of,
    wait_for_functional,
)
from fsdp_lab.workloads.base import original_name, tensors_of, unwrapped


class ModulesAtWork:
    """Names the innermost module in a forward or backward pass: the last one entered and not left.

    A module with several parents, such as the rotary embedding of all blocks, gets the name below the current parent.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = defaultdict[nn.Module, list[str]](list, {model: [""]})
        for name, module in unwrapped(model).named_modules(remove_duplicate=False):
            self._names[module].append(original_name(name))
        self._entered: list[tuple[str, bool]] = []  # the names, and whether in a backward pass
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow every module inside. Remove the hooks at the end: hooks on the graph would keep the model alive."""
        before = register_module_forward_pre_hook(self._forward_begins)
        self._handles += [before, register_module_forward_hook(self._forward_ends, always_call=True)]
        try:
            with around_compiled(self._names, self._forward_begins, self._forward_ends):
                yield
        finally:
            for handle in self._handles:
                handle.remove()

    def names(self) -> list[str]:
        """Return the names of all active modules, the innermost last."""
        if not in_backward():  # a backward pass does not leave a module whose inputs get no gradient
            self._entered = [entry for entry in self._entered if not entry[1]]
        return [name for name, _ in self._entered]

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._names:
            return
        users = self.names()
        names = self._names[module]
        name = next((name for name in names if users and name.startswith(f"{users[-1]}.")), names[0])
        self._entered.append((name, False))
        self._hook(args, partial(self._leave, name, True))

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._names:
            return
        name = next(name for name, backward in reversed(self._entered) if not backward)
        self._leave(name, False)
        given = tensors_of(args)
        made = [tensor for tensor in tensors_of(output) if all(tensor is not one for one in given)]
        self._hook(made, partial(self._backward_begins, name))

    def _hook(self, values: Any, hook: Callable[[Tensor], None]) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self._handles += [tensor.register_hook(hook) for tensor in tensors_of(values) if tensor.requires_grad]

    def _backward_begins(self, name: str, gradient: Tensor) -> None:
        if (name, True) in self._entered:
            return
        place, inside = len(self._entered), f"{name}." if name else ""
        while place and self._entered[place - 1][0].startswith(inside):  # its output is that of an inner module
            place -= 1
        self._entered.insert(place, (name, True))

    def _leave(self, name: str, backward: bool, gradient: Tensor | None = None) -> None:
        for place in reversed(range(len(self._entered))):
            if self._entered[place] == (name, backward):
                del self._entered[place]
                return


@dataclass
class _Storage:
    number: int
    place: str
    category: str
    num_bytes: int
    dies: weakref.ref[torch.UntypedStorage] | None = None


class Recorded(Protocol):
    """A model whose step is recorded: see `fsdp_lab.training.parallel.base.Parallel`."""

    @property
    def device(self) -> torch.device: ...
    @property
    def model(self) -> nn.Module: ...
    def sent(self, func: Any, output: Any, given: Any, seen: StepRecorder) -> Iterator[tuple[Any, str]]: ...
    def made_for(self, func: Any, args: Any, kwargs: dict[str, Any], seen: StepRecorder) -> str: ...


class StepRecorder(TorchDispatchMode):
    """Records each change of a step until `over`, so that freeing the model later adds no event.

    Args:
        parallel: tensors on its device count as `device`, all others as `host`.
        buffer_bytes: see `record_step`.

    Attributes:
        failed_at: where an operator raised an error: "backward of blocks.3".
    """

    def __init__(self, parallel: Recorded, buffer_bytes: Callable[[Any, Any], int] | None = None) -> None:
        super().__init__()
        self.over = False
        self.failed_at = ""
        self.profile = Profile()
        self._parallel, self._buffer_bytes = parallel, buffer_bytes
        self._modules = ModulesAtWork(parallel.model)
        self._fake_mode = active_fake_mode()
        self._ranges = Ranges()
        self._phase = "forward"
        self._in_optimizer = False
        self._storages: dict[int, _Storage] = {}
        self._named: dict[tuple[int, int], str] = {}  # storage and offset -> the name of the parameter
        self._numbers = count()
        # weak keys, because `reshard_after_forward=to_size` creates parameters and frees them
        self._hooks: Any = WeakIdKeyDictionary()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Record inside."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:  # no dispatch mode sees this call
            resize(storage, size)
            if (known := self._storages.get(id(storage))) is not None:
                self._has_size(known, storage)

        optimizer_hooks = [
            register_optimizer_step_pre_hook(partial(self._optimizer_steps, True)),
            register_optimizer_step_post_hook(partial(self._optimizer_steps, False)),
        ]
        self._hook_gradients("grad")
        try:
            with mock.patch.object(torch.UntypedStorage, "resize_", resize_), self._modules.followed(), self:
                yield
        finally:
            self.over = True
            for handle in (*optimizer_hooks, *self._hooks.values()):
                handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.over = True
        yield
        self.over, self._phase = False, "forward"

    def hold(self, tensor: Tensor, category: str, known_too: bool = True, name: str = "") -> None:
        """Note a tensor's storages, with a category.

        Args:
            known_too: also change the category of storages that were noted before.
            name: of the parameter or buffer that they are for; "": not known.
        """
        for storage in storages_of(tensor):
            known = self._storages.get(id(storage))
            if known is None:
                dies = weakref.ref(storage, partial(self._dies, id(storage)))
                place = "device" if tensor.device == self._parallel.device else "host"
                known = self._storages[id(storage)] = _Storage(next(self._numbers), place, category, 0, dies)
            elif known_too and known.category != category:
                known.category = category
                if known.num_bytes:
                    self._record(known)
            self._has_size(known, storage)
        self._own(name, tensor)

    def _owners(self, args: Any, made: Sequence[Tensor]) -> list[str]:
        """Return the parameter's name for each tensor that an operator outside of all modules made; "": not known.

        A list of tensors belongs to the owners of a list of arguments; others to the only owner among all arguments.
        """
        if not made or self._modules.names():
            return [""] * len(made)
        lists = [tensors_of(one) for one in args if isinstance(one, list | tuple)]
        if alike := next((one for one in lists if len(one) == len(made)), None):
            return [self._owner(tensor) for tensor in alike]
        owners = {self._owner(tensor) for tensor in tensors_of(args)} - {""}
        return [owners.pop() if len(owners) == 1 else ""] * len(made)

    def _own(self, name: str, tensor: Tensor) -> None:
        """Note a tensor's parameter by its offset in the storage: FSDP2 reduces a whole unit into one storage."""
        if not name:
            return
        with torch.no_grad():  # no view in the graph
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for storage in storages_of(local):
            known = self._storages.get(id(storage))
            if known and self._named.setdefault((known.number, int(local.storage_offset())), name) == name:
                self.profile.owners.setdefault(known.number, []).append(name)

    def _owner(self, tensor: Tensor) -> str:
        known = (self._storages.get(id(storage)) for storage in storages_of(tensor))
        return next((self._named.get((one.number, int(tensor.storage_offset())), "") for one in known if one), "")

    def place(self) -> tuple[str, str]:
        """Return the phase and the innermost active module; "" outside of all modules."""
        at_work = self._modules.names()
        if in_backward():
            self._phase = "backward"
        elif self._in_optimizer or (self._phase == "backward" and not at_work):
            self._phase = "optimizer"  # clipping and unscaling count as part of it
        elif at_work:
            self._phase = "forward"
        return self._phase, at_work[-1] if at_work else ""

    def finish(self) -> Profile:
        """Return the profile so far; a step that failed has one up to the failure."""
        return self.profile.with_peaks()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is DEVICE:  # changes no memory, so the modes below can miss it
            return args[0].device
        if DTensor in types:
            return NotImplemented  # DTensor calls again with this rank's parts
        # DTensor first tries an operator on fake tensors of the whole shape, which hold no memory
        if active_fake_mode() is not self._fake_mode:
            return func(*args, **kwargs)
        if func is wait_for_functional.default and self._fake_mode is not None:
            return args[0]  # the fake operator would return another tensor
        try:
            result = func(*args, **kwargs)
        except Exception:
            phase, module = self.place()  # the exception empties the active modules
            self.failed_at = f"{phase} of {module}" if module else ""
            raise
        if self._ranges.see(func, args).startswith(FSDP_ENDS_FORWARD):
            self._hook_gradients("unsharded_grad")
        if func in (GATHER, FLAT_GATHER, SCATTER):
            for sent, category in self._parallel.sent(func, args[0], args[1], self):
                for tensor in tensors_of(sent):
                    self.hold(tensor, category)
        category = self._category(func, args, kwargs)
        made = tensors_of((result, kwargs.get("out")))
        for tensor, name in zip(made, self._owners(args, made), strict=True):
            self.hold(tensor, category, known_too=False, name=name)
        if self._buffer_bytes is not None and (num_bytes := self._buffer_bytes(func, args)):
            number = next(self._numbers)
            for size in (num_bytes, 0):
                self._record(_Storage(number, "device", "temp", size))
        return result

    def at_work(self) -> list[str]:
        return self._modules.names()

    def known_as(self, tensor: Any) -> str:
        known = self._storages.get(id(tensor.untyped_storage())) if isinstance(tensor, Tensor) else None
        return known.category if known else ""

    def _category(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        """Return the category of an operator's results, as far as it is known at this point."""
        if self._in_optimizer:
            return "optimizer"
        if own := self._parallel.made_for(func, args, kwargs, self):
            return own
        if self._ranges.innermost.startswith((*FSDP_STARTS_PASS, FSDP_COPIES_OUT)):
            return "unsharded_param"
        if in_backward() and not torch.is_grad_enabled():
            return "temp"  # only a recomputation has gradients enabled
        return "activation"

    def _hook_gradients(self, category: str) -> None:
        """Hook the gradients of parameters and, after FSDP2 has gathered them, of their copies."""
        named = [(parameter, category, name) for name, parameter in self._parallel.model.named_parameters()]
        flat = [(handle.flat_param, "unsharded_grad", "") for _, handle in flat_units(self._parallel.model)]
        for parameter, what, name in (*named, *flat):
            if parameter.requires_grad and parameter not in self._hooks:
                self._own(name, parameter)
                note = partial(self._has_gradient, what, name)
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(note)

    def _optimizer_steps(self, begins: bool, *_: Any) -> None:
        self._in_optimizer = begins

    def _has_gradient(self, category: str, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.hold(parameter.grad, category, name=name)

    def _has_size(self, known: _Storage, storage: torch.UntypedStorage) -> None:
        if known.num_bytes != storage.nbytes():
            known.num_bytes = storage.nbytes()
            self._record(known)

    def _dies(self, key: int, _: Any) -> None:
        known = self._storages.pop(key)
        if known.num_bytes:
            known.num_bytes = 0
            self._record(known)

    def _record(self, known: _Storage) -> None:
        if not self.over:
            phase, module = self.place()
            self.profile.events.append(Event(known.number, known.place, known.category, known.num_bytes, module, phase))


@contextmanager
def record_step(
    parallel: Recorded,
    optimizers: Iterable[torch.optim.Optimizer],
    batch: Sequence[Tensor],
    buffer_bytes: Callable[[Any, Any], int] | None = None,
    inside: Callable[[StepRecorder], AbstractContextManager[object]] = lambda recorder: nullcontext(),
) -> Iterator[StepRecorder]:
    """Record every tensor of the step inside.

    Args:
        parallel: tensors on its device count as `device`, all others as `host`.
        batch: the step's tensors, which exist before it.
        buffer_bytes: returns the bytes that an operator's kernel allocates while it runs, from the operator and its
            arguments.
        inside: a context that is entered last.
    """
    recorder, model = StepRecorder(parallel, buffer_bytes), parallel.model
    named = [*model.named_parameters()]
    for name, parameter in named:
        recorder.hold(parameter, "param", name=name)
        if parameter.grad is not None:
            recorder.hold(parameter.grad, "grad", name=name)
    names: dict[Tensor, str] = {parameter: name for name, parameter in named}
    for name, buffer in model.named_buffers():
        recorder.hold(buffer, "buffer", name=name)
    for of, state in (of_one for optimizer in optimizers for of_one in optimizer.state.items()):
        for tensor in tensors_of(state):
            recorder.hold(tensor, "optimizer", name=names.get(of, ""))
    for tensor in batch:
        recorder.hold(tensor, "input")
    accumulates = AccumulatesInPlace()
    with SynchronousGlooMode(), recorder.following(), inside(recorder), accumulates:
        with recorder.paused():
            accumulates.learn(parallel.device)
        recorder.profile.begun = len(recorder.profile.events)
        yield recorder
