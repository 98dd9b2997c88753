"""Checkpoints: DCP shards, which are a checkpoint once a file names them all (`checkpoint_place.py`).

This file also has what wrote them, and the metrics of the epochs so far. If a checkpoint is damaged, the one before it
is loaded.
DCP's own files are read with pickle: load only checkpoints that you or your jobs wrote.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.training import CheckpointConfig, CheckpointMode
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.checkpoint_place import MARKER, Place, Saved, writer
from fsdp_lab.training.checkpoint_source import check_meta, check_same_trial, trial_identity
from fsdp_lab.training.distributed import DistributedContext, together
from fsdp_lab.training.layout import Layout
from fsdp_lab.training.model_state import AsSaved, CheckpointError, load_model_state, model_state
from fsdp_lab.training.parallel.base import Parallel
from fsdp_lab.workloads.base import original_name, unwrapped

Metrics = dict[str, float]


@contextmanager
def ordinary_errors(doing: str) -> Iterator[None]:
    """Raise the error of the first rank that failed, with a note of what was being done.

    DCP raises a `CheckpointException` on every rank instead, which is no `Exception` and would end the process.
    """
    try:
        yield
    except CheckpointException as failed:
        cause = failed.failures[min(failed.failures)][0]
        cause.add_note(doing)
        raise cause from failed


# What PyTorch's schedules set in groups.
_OF_SCHEDULES = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


@dataclass
class TrainState(Stateful):
    """Everything that training changes.

    Attributes:
        parallel: the model, and how ranks train it.
        optimizers: by the names that `task.step` has for them; without it one.
        lr_schedules: one of each optimizer.
        num_params: of the whole model; with FSDP1 a rank's parameters are only its own elements.
        scaler: of the loss; disabled without loss scaling.
        epoch: finished epochs.
        step: optimizer steps so far.
        epoch_step: optimizer steps of an epoch that is not finished.
        history: the metrics of every epoch so far.
        so_far: losses and other figures of an unfinished epoch, a number for each step.
        taken: optimizer steps of this run that loss scaling did not skip.
        lr: the rate of the last step, of the first group of parameters.
        loss_scale: the scaler's, of the next step, on the host.
        loss_dtype: in which the task computed the loss of the last step.
        num_labels: the labels that counted in the last step, over all ranks; None: its loss returned no count.
        figures: what the user's step returned last.
        after_step: of the user, called after each step that was taken; None: there is none.
        groups_compared: an own optimizer's groups were found to be those of the whole parameters.
        loader: of the user; its state is this rank's place in it. None: there is none.
    """

    parallel: Parallel
    optimizers: dict[str, torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    lr_schedules: list[LRScheduler]
    layout: Layout = field(default_factory=Layout)
    num_params: int = 0
    groups_compared: bool = False
    after_step: Callable[[dict[str, nn.Module], int], object] | None = None
    epoch: int = 0
    step: int = 0
    epoch_step: int = 0
    history: list[Metrics] = field(default_factory=list)
    so_far: dict[str, list[float]] = field(default_factory=dict)
    taken: int = 0
    lr: float | torch.Tensor = 0.0
    loss_scale: float = field(init=False)
    _modes: dict[nn.Module, bool] = field(default_factory=dict)  # training modes of modules, kept during eval
    loss_dtype: torch.dtype = torch.float32
    num_labels: torch.Tensor | None = None
    figures: dict[str, torch.Tensor] = field(default_factory=dict)
    loader: Stateful | None = None

    def __post_init__(self) -> None:
        """Read the first scale, so that a step only reads the next one."""
        self.loss_scale = self.scaler.get_scale()

    @property
    def model(self) -> nn.Module:
        return self.parallel.model

    def remember(self, metrics: Metrics) -> None:
        """Add an epoch to the history, replacing an earlier entry that `max_steps` had cut short."""
        self.history = [*(m for m in self.history if m["epoch"] != metrics["epoch"]), metrics]

    @property
    def schedule_is_ours(self) -> bool:
        """Whether the schedule is one of ours, of which a resume may change all but the step."""
        return self.parallel.config.lr_schedule.target is None

    @property
    def rate(self) -> float | Tensor:
        """The learning rate of the next step, of the first group of parameters."""
        rate: float | Tensor = next(iter(self.optimizers.values())).param_groups[0]["lr"]
        return rate.clone() if isinstance(rate, Tensor) else rate  # a clone: the schedule changes it in place

    def set_rates(self) -> None:
        """Give optimizers the rates of this trial's schedule: a checkpoint has those of the run that wrote it.

        A schedule of the user's continues with its own.
        """
        for schedule in self.lr_schedules if self.schedule_is_ours else ():
            assert isinstance(schedule, LambdaLR)
            groups = schedule.optimizer.param_groups
            for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
                rate = base * factor(schedule.last_epoch)
                group["initial_lr"] = base
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def train(self) -> None:
        """Set the model to train mode, and optimizers that have modes."""
        if self.parallel.config.task.step is None:
            self.model.train()
        elif self._modes:  # each module continues in the mode that it had
            for part in self.parallel.roots(self.model).values():
                part.train(self._modes[part])  # which may split weights again
            for module, mode in self._modes.items():
                module.training = mode
            self._modes = {}
        self._switch("train")

    def eval(self) -> None:
        """Set the model to eval mode, and optimizers that have modes: schedule-free ones then average the weights."""
        with self.parallel.explained(forward=True):
            self._switch("eval")
            self._modes = self._modes or {module: module.training for module in self.model.modules()}
            with self.parallel.watched():
                self.model.eval()  # which may merge weights

    def _switch(self, mode: str) -> None:
        for optimizer in self.optimizers.values():
            if callable(switch := getattr(optimizer, mode, None)):
                self.parallel.reshard()  # an evaluation has left weights of the other mode gathered
                switch()
                for parameter in [key for key, value in optimizer.state.items() if not value]:
                    del optimizer.state[parameter]  # reading makes an empty entry, which DCP takes for a state

    def weights(self) -> dict[str, Any]:
        """Return the sharded state of the model and of its optimizers."""
        return {
            "model": model_state(self.model),
            "optimizer": get_optimizer_state_dict(self.model, [*self.optimizers.values()]),
        }

    def load_weights(self, state: dict[str, Any]) -> None:
        """Load a state that `weights` returned. Some parameters may have had no gradient yet; the model has all."""
        load_model_state(self.model, state["model"])
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(self.model, [*self.optimizers.values()], state["optimizer"], options=options)

    def _keep_types(self, saved: dict[str, Any]) -> None:
        """Restore types that PyTorch has cast to a parameter's: for example a float32 state of a bfloat16 parameter."""
        states = [optimizer.state for optimizer in self.optimizers.values()]
        for name, parameter in unwrapped(self.model).named_parameters():
            held: dict[str, Any] = next((state[parameter] for state in states if parameter in state), {})
            for key, value in saved.get(original_name(name), {}).items():
                now = held.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype is not value.dtype:
                    if now.shape != value.shape:
                        raise CheckpointError(
                            f"the optimizer's {key} of {name} is {value.dtype} in the checkpoint, and PyTorch loads it "
                            f"as {now.dtype} with {self.parallel.api}; use sharding.api=fsdp2, or "
                            "precision.storage_dtype=float32."
                        )
                    held[key] = value

    def state_dict(self) -> dict[str, Any]:
        """Return what DCP saves: the sharded state and the position in the training. The history is not in it."""
        return {
            **self.weights(),
            "scaler": self.scaler.state_dict(),
            "lr_schedule": self._schedule_state(),
            "position": {"epoch": self.epoch, "step": self.step, "epoch_step": self.epoch_step},
            **({"loader": self.loader.state_dict()} if self.loader else {}),
        }

    def _schedule_state(self) -> dict[str, Any]:
        """Return the step of a schedule of ours, or the state of the user's as one value: DCP turns keys into text."""
        if self.schedule_is_ours:
            return {"last_epoch": self.lr_schedules[0].last_epoch}
        content = io.BytesIO()
        torch.save([schedule.state_dict() for schedule in self.lr_schedules], content)
        return {"state": content.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.load_weights(state)
        self._keep_types(state["optimizer"]["state"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
            self.loss_scale = self.scaler.get_scale()
        saved: dict[str, Any] = state["lr_schedule"]
        states = None if self.schedule_is_ours else torch.load(io.BytesIO(saved["state"]), weights_only=True)
        for i, schedule in enumerate(self.lr_schedules):
            if states is None:
                schedule.last_epoch = saved["last_epoch"]
            else:
                schedule.load_state_dict(states[i])
        position = state["position"]
        self.epoch, self.step, self.epoch_step = position["epoch"], position["step"], position["epoch_step"]
        self.set_rates()
        if self.loader is not None:
            self.loader.load_state_dict(state["loader"])


class Checkpoints:
    """The checkpoints of one trial.

    DCP saves each rank's parts of whole tensors; under FSDP2 and tensor parallelism these are DTensors. So any
    sharding, degree or number of ranks can read them (`checkpoint.resume_from`). In its own folder a trial must keep
    the settings of `CHECKPOINT` in `config/compare.py`.

    Attributes:
        notes: sentences about the checkpoint that was loaded.
        times_count: whether times in its history count for this run: as many workers, and the same kind of device.
    """

    def __init__(self, place: str, config: TrialConfig, ranks: DistributedContext) -> None:
        """Prepare the checkpoints of a trial.

        Args:
            place: a folder that all ranks see, or an address in object storage.
        """
        self.place, self.config, self.ranks = Place(place), config, ranks
        self.settings: CheckpointConfig = config.checkpoint
        self.notes: list[str] = []
        self.times_count = False
        self._newest = ""  # the name of the last one that was loaded or saved here
        self._writing: tuple[Future[Any], str, dict[str, Any], float] | None = None
        self._async_group: dist.ProcessGroup | None = None

    def load(self, state: TrainState) -> str | None:
        """Resume from this trial's own last checkpoint, else start with the weights of `checkpoint.resume_from`.

        From another run, only the weights and the optimizer's state are loaded, and the trial starts at step 0.

        Returns:
            the name of the checkpoint that was loaded; None: none was.

        Raises:
            CheckpointError: `resume_from` has no checkpoint, or the checkpoint is damaged or of another model or
                PyTorch.
        """
        source, is_own, self.notes = self._on_first_rank(self._find_source)  # ranks could see different files
        if source is None:
            return None
        name, meta = source.name, source.meta
        check_meta(meta, name, self.config)
        state.weights()  # makes the optimizer's state, by a step in train mode
        state.eval()  # weights are saved in this mode; DCP loads them in place
        if is_own:
            check_same_trial(meta, name, self.config, self.ranks.world_size)
        try:
            if is_own:
                self._load(state, source, state.model)
            else:
                self._load_another(state, source)
        except Exception as error:
            ours = isinstance(error, UserError) or not isinstance(error.__cause__, CheckpointException)
            if ours or is_of_the_machine(error):
                raise
            raise CheckpointError(
                f"the checkpoint {name} is damaged: its files have the expected sizes but cannot be read "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0][:200]}); to start "
                f"from the checkpoint before it, move {name}.json to another folder."
            ) from error
        if is_own:
            self._newest, state.history, state.so_far = name, meta["history"], meta.get("so_far", {})
            there, here = (meta["world_size"], meta["device"]), (self.ranks.world_size, self.ranks.device_name)
            self.times_count = there == here
        return name

    def _find_source(self) -> tuple[Saved | None, bool, list[str]]:
        """Return the checkpoint to load, whether it is this trial's, and a note about each damaged one."""
        source, damaged = self.place.find_latest()
        is_own = source is not None
        if source is None and self.settings.resume_from is not None:
            source, damaged_there = Place(self.settings.resume_from).find_latest()
            if source is None:
                raise CheckpointError(
                    f"checkpoint.resume_from={self.settings.resume_from} has no complete checkpoint; give a folder "
                    f"that has a {MARKER}, or that file." + "".join(f" Damaged: {each}." for each in damaged_there)
                )
            damaged += damaged_there
        instead = f"training starts from {source.name}" if source else "training starts from step 0"
        return source, is_own, [f"skipped a damaged checkpoint, {each}; {instead}" for each in damaged]

    def _load(self, into: TrainState | dict[str, Any], source: Saved, model: nn.Module) -> None:
        planner = AsSaved(model, self.ranks.device, source.name)
        with ordinary_errors(f"loading the checkpoint {source.name}"):
            dcp.load({"train": into}, storage_reader=source.reader(), planner=planner)
        if planner.left_out:
            self.notes.append(
                f"the checkpoint {source.name} has optimizer state of {', '.join(planner.left_out)}, which this trial "
                "does not train: it was not loaded."
            )

    def _load_another(self, state: TrainState, source: Saved) -> None:
        groups = [group for optimizer in state.optimizers.values() for group in optimizer.param_groups]
        is_ours = self.config.optimizer.target is None
        # an own optimizer may keep state in its groups
        typed = {*self.config.optimizer.arguments, "foreach", "fused", *_OF_SCHEDULES}
        settings = [
            {key: value for key, value in group.items() if key != "params" and (is_ours or key in typed)}
            for group in groups
        ]
        self._load(weights := state.weights(), source, state.model)
        state.load_weights(weights)
        groups = [group for optimizer in state.optimizers.values() for group in optimizer.param_groups]
        for group, of_this_trial in zip(groups, settings, strict=True):
            group.update(of_this_trial)
        state.set_rates()

    def save(self, state: TrainState, metrics: Metrics) -> Metrics:
        """Save now (`sync`) or start to (`async`); every rank calls it.

        Adds to `metrics` the seconds for which training waited (`checkpoint/blocked_s`), and the duration and size of a
        save that has finished. Then appends the metrics to the state's history.
        """
        if self.settings.mode is CheckpointMode["off"]:
            state.remember(metrics)
            return metrics
        begun = time.perf_counter()
        metrics.update(self.finish())
        making = self._on_first_rank(lambda: self.place.begin(state.step))
        if self.settings.mode is CheckpointMode["async"]:
            if self._async_group is None:  # its own group: a thread must not mix with training's messages
                group = dist.new_group(backend="gloo")
                assert isinstance(group, dist.ProcessGroup)
                self._async_group = group
            # Nothing copied ahead: every tensor is on the host by then. The saving thread has no device set, so on
            # every rank it would ask for a stream of GPU 0 and open a context there. The writer is also the stager, and
            # blocks as the default one does.
            stager = writer(making, per_thread_copy_ahead=0)
            with self._saving(making):
                future = dcp.async_save({"train": state}, storage_writer=stager, process_group=self._async_group)
            assert isinstance(future, Future)
            metrics["checkpoint/blocked_s"] = time.perf_counter() - begun
            state.remember(metrics)
            self._writing = (future, making, self._meta(state), begun)
            return metrics
        with self._saving(making):
            dcp.save({"train": state}, storage_writer=writer(making))
        metrics["checkpoint/bytes"] = self._size(making)
        metrics["checkpoint/save_s"] = metrics["checkpoint/blocked_s"] = time.perf_counter() - begun
        state.remember(metrics)
        self._publish(making, self._meta(state))
        return metrics

    def finish(self) -> Metrics:
        """Wait for a running save and publish it. Every rank calls it, also at the end of training.

        Returns:
            its duration and size as metrics; empty without a running save.
        """
        if self._writing is None:
            return {}
        future, making, meta, begun = self._writing
        with self._saving(making):
            future.result(timeout=1800)
        self._writing = None
        figures = {"checkpoint/save_s": time.perf_counter() - begun, "checkpoint/bytes": self._size(making)}
        self._publish(making, meta)
        return figures

    @contextmanager
    def _saving(self, making: str) -> Iterator[None]:
        """Raise ordinary errors, with the room on the disk. Once every rank has ended, remove what was written."""
        try:
            with ordinary_errors(f"saving the checkpoint {making.rpartition('.')[0]}"):
                yield
        except Exception as error:
            if isinstance(error.__cause__, CheckpointException):
                if room := self.place.room():
                    error.add_note(room)
                if self.ranks.is_first:
                    self.place.discard(making)
            raise

    def load_best_weights(self, state: TrainState) -> int:
        """Load the weights of the checkpoint with the least validation loss, and return its step.

        Every rank calls it, at the end of training.
        """
        best: Saved = self._on_first_rank(self.place.best)
        if best.name != self._newest:
            saved = {"model": model_state(state.model)}
            self._load(saved, best, state.model)
            load_model_state(state.model, saved["model"])
        return best.step

    def _on_first_rank(self, do: Callable[[], Any]) -> Any:
        """Return the result of `do` on rank 0, or raise its error, on every rank."""
        done = [together(do if self.ranks.is_first else lambda: None)]
        dist.broadcast_object_list(done, src=0)
        return done[0]

    def _size(self, making: str) -> float:
        """Return the bytes of a finished save. Only rank 0, which also publishes it, looks."""
        return float(self._on_first_rank(lambda: self.place.size(making)))

    def _publish(self, making: str, meta: dict[str, Any]) -> None:
        """Publish a save on rank 0, and then remove checkpoints that need not be kept."""

        def publish() -> str:
            name = self.place.publish(making, meta)
            self.place.prune(self.settings.keep_last, self.settings.keep_best)
            return name

        self._newest = self._on_first_rank(publish)

    def _meta(self, state: TrainState) -> dict[str, Any]:
        return {
            "torch_version": torch.__version__,
            "optimizer": self.config.optimizer.kind,
            "trial": trial_identity(self.config),
            "world_size": self.ranks.world_size,
            "device": self.ranks.device_name,
            "epoch": state.epoch,
            "step": state.step,
            "history": list(state.history),
            "so_far": state.so_far,
        }


def is_of_the_machine(error: BaseException) -> bool:
    """Return whether memory or a disk failed, not the content that was read."""
    return isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError)) or "memory" in str(error)
