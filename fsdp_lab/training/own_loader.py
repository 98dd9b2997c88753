"""The user's own loader as ranks train with it: in step, counted, resumed at its place.

A pass is one iteration over the loader. An epoch is a pass, or `training.epoch_steps` steps of consecutive passes.
Ranks vote before each step: a pass ends on all of them when it ends on one.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist

from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.metrics import CHECK_BATCHES
from fsdp_lab.config.rules import check_vocab_size
from fsdp_lab.config.target import in_words
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.alike import check_data, digest
from fsdp_lab.training.data import Loaders, build_loaders, load_data, microbatch_size
from fsdp_lab.training.distributed import DistributedContext, ParallelDims, gather, together
from fsdp_lab.training.speed import StepTimer
from fsdp_lab.workloads.base import Batch, Workload, tensors_of
from fsdp_lab.workloads.construct import seed_all
from fsdp_lab.workloads.user.data import Marked
from fsdp_lab.workloads.user.loader import begin_epoch, check_batch, data_of, explained, length_of
from fsdp_lab.workloads.user.units import num_items

_END = object()  # the end of a loader, which may yield None by mistake


class OwnLoaders:
    """Both splits of `data.loader` as this rank reads them; every rank calls each method as often.

    Attributes:
        data: its digest, and what loaders know of their texts; without items.
        steps_per_epoch: None: not known.
        passes: how many have ended.
        taken: batches of this rank in the pass that has not ended.

    Raises:
        UserError: a rank has no batch.
        ConfigError: nothing says how many steps there are.
    """

    def __init__(self, workload: Workload, config: TrialConfig, dims: ParallelDims, ranks: DistributedContext) -> None:
        self.config, self._dims, self._task, make = config, dims, workload.task, workload.data.loader
        self.passes = self.taken = 0
        assert make is not None
        size = microbatch_size(config.training, dims)
        place = {"rank": dims.dp_rank, "world_size": dims.dp_degree, "seed": config.training.seed}
        self._train = together(lambda: make("train", batch_size=size, **place))
        self._make_val = lambda: make("val", batch_size=size, **place)
        self._val = together(self._make_val)
        self.data = data_of(config.data, self._train, self._val)
        check_vocab_size(config.model, config.data, self.data.vocab_size)
        self._accum, self._epoch_steps = config.training.grad_accum_steps, config.training.epoch_steps
        # for tensors on the host, so that no device waits
        self._group: Any = dist.new_group(backend="gloo") if ranks.device.type == "cuda" else None
        self.steps_per_epoch = self._epoch_steps or self._steps_of(gather(length_of(self._train)))
        self._batches: Iterator[Batch] | None = None
        self._in_epoch, self._ran_out = 0, False
        self._state, self._resumes, self._checked = b"", False, False
        self._spare: Batch = None  # repeated by a rank that has no more batch of a validation
        self._compared = False

    def _steps_of(self, lengths: list[int | None]) -> int | None:
        training, kind = self.config.training, type(self._train).__name__
        for rank, length in enumerate(lengths):
            if length is not None and length < self._accum:
                raise self._too_few(rank, length)
        known = [length for length in lengths if length is not None]
        if len(known) == len(lengths):
            return min(known) // self._accum
        unknown = f"{self.config.data.typed} returns a {kind} without __len__ for split=train, so"
        if training.max_steps is None:
            raise ConfigError(
                f"{unknown} training.max_steps=null leaves the steps of the trial unknown; set training.max_steps, or "
                "training.epoch_steps."
            )
        if (name := self.config.lr_schedule.name.name) != "constant":  # max_steps may change in a resume
            raise ConfigError(f"{unknown} lr_schedule={name} does not know its steps; set training.epoch_steps.")
        return None

    def _too_few(self, rank: int, batches: int) -> UserError:
        several = f" (training.grad_accum_steps={self._accum})" if self._accum > 1 else ""
        has = f"{batches} batch{'es' * (batches != 1)}"
        return UserError(
            f"{self.config.data.typed}: rank {rank} has {has} of split=train in pass {self.passes + 1}, "
            f"and a step takes {self._accum}{several}; give each rank at least so many."
        )

    def go_to(self, epoch: int, steps_done: int) -> None:
        """Start in an epoch after so many steps, wherever the pass is."""
        self._in_epoch, self._ran_out = steps_done, False

    def is_over(self, steps_done: int) -> bool:
        """Return whether the last epoch has ended, after so many steps."""
        return self._ran_out or (self.steps_per_epoch is not None and steps_done >= self.steps_per_epoch)

    @property
    def train(self) -> OwnLoaders:
        return self

    def by_step(self, timer: StepTimer) -> Iterator[list[Batch]]:
        """Yield this rank's batches of each step of the epoch."""
        any_step = False
        while self._epoch_steps is None or self._in_epoch < self._epoch_steps:
            with timer.waiting():
                step, failed = _attempt(self._read)
            if self._all_have(len(step) == self._accum, failed):
                self._spare = step[0] if self._spare is None else self._spare
                self._compare(step[0])
                self.taken, self._in_epoch, any_step = self.taken + self._accum, self._in_epoch + 1, True
                items = sum(map(num_items, step))
                tokens = [self._task.units(batch) or 0 for batch in step] if self._task.unit == "tokens" else []
                timer.items, timer.tokens = items, sum(tokens)
                yield step
                continue
            if self.taken == 0:
                sizes = gather(len(step))
                raise self._too_few(sizes.index(min(sizes)), min(sizes))
            self._batches, self.passes, self.taken = None, self.passes + 1, 0
            if any_step and self._epoch_steps is None:
                self._ran_out = True
                return

    def _read(self) -> list[Batch]:
        """Return the batches of the next step: fewer where the pass ends."""
        self._batches = self._batches or self._pass()
        return list(islice(self._batches, self._accum))

    def _compare(self, batch: Batch) -> None:
        """Compare the first batches of ranks.

        Raises:
            UserError: ranks that share samples have read others, or those that do not the same.
        """
        if self._compared:
            return
        self._compared = True
        first = gather((self._dims.dp_rank, [digest(tensor) for tensor in tensors_of(batch)]))
        of_part: dict[int, list[str]] = {}
        for rank, (part, own) in enumerate(first):
            if own != of_part.setdefault(part, own):
                raise UserError(
                    f"{self.config.data.typed}: rank {rank} has another first batch than the ranks that it shares "
                    f"samples with (sharding.tp={self._dims.tp}); let the batches depend on the arguments alone."
                )
        if self._dims.dp_degree > 1 and all(own == first[0][1] for own in of_part.values()):
            raise UserError(
                f"{self.config.data.typed} gives every rank the same first batch: each must have its own part; use "
                "rank and world_size, or draw by a torch.Generator that is seeded by seed and rank: those of the "
                "process are alike on all ranks."
            )

    def _pass(self, state: bytes = b"") -> Iterator[Batch]:
        """Start the pass, after the batches that were taken; with a state of the loader, at its place."""
        with explained(self.config.data, f"pass {self.passes + 1} of split=train"):
            begin_epoch(self._train, self.passes)
            if state:
                self._train.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
            return self._seeded(self._train, str(self.passes), self.taken)

    def _seeded(self, loader: Any, name: str, start: int = 0) -> Iterator[Batch]:
        """Return the batches of a loader. What they draw depends on seed and number, not on the rank."""
        where = "split=val" if name == "val" else f"pass {self.passes + 1} of split=train"

        def draw(i: int) -> None:
            seed_all(zlib.crc32(f"{self.config.training.seed}/{name}/{i}".encode()))

        def read() -> Iterator[Batch]:
            for i in count(start):
                draw(i)
                with explained(self.config.data, f"batch {i + 1} of {where}"):
                    batch = next(iterator, _END)
                if batch is _END:
                    return
                check_batch(self.config.data, batch)
                yield batch

        draw(-1)
        with explained(self.config.data, where):
            iterator = iter(loader)
        return read()

    def _all_have(self, has: bool, failed: Exception | None = None, every: bool = True) -> bool:
        """Return whether every rank has what it needs, or any of them; raise the error of the first that failed."""
        votes = torch.tensor([has, not has, failed is not None], dtype=torch.int64)
        dist.all_reduce(votes, group=self._group)
        if votes[2]:
            together(lambda: _raise(failed))
        return not votes[1] if every else bool(votes[0])

    @property
    def val(self) -> Iterator[Marked]:
        """The batches of a validation: as many on each rank, each counted once."""
        return self._validation(None, self._val)

    @property
    def first_val(self) -> Iterator[Marked]:
        """The first batches of each rank, for a comparison with a plain loop."""
        return self._validation(CHECK_BATCHES, together(self._make_val))  # its own loader, which is not read to the end

    def _validation(self, most: int | None, loader: Any) -> Iterator[Marked]:
        batches, spare = together(lambda: self._seeded(loader, "val")), self._spare
        for i in count() if most is None else range(most):
            step, failed = _attempt(lambda: list(islice(batches, 1)))
            if not self._all_have(bool(step), failed, every=False):
                if i == 0:
                    raise UserError(f"{self.config.data.typed} gives no rank a batch of split=val; give it one.")
                return
            spare = step[0] if step else spare
            yield Marked(spare, torch.tensor(num_items(spare) if step else 0))

    @staticmethod
    def items_of(batch: Batch) -> int:
        return num_items(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the loader, with each rank's own state as bytes, empty without one.

        If a pass has ended, the next one is started first: a loader may still be at its place in the old one.
        """
        state = b""
        if self.passes + self.taken and callable(getattr(self._train, "state_dict", None)):
            state = together(self._packed_state)
        return {"passes": self.passes, "taken": self.taken, f"rank{self._dims.dp_rank}": state}

    def _packed_state(self) -> bytes:
        self._batches = self._batches or self._pass()
        with explained(self.config.data, "its state_dict"):
            torch.save(self._train.state_dict(), content := io.BytesIO())
        self._check_state(content.getvalue())
        return content.getvalue()

    def _check_state(self, state: bytes) -> None:
        """Refuse, in the first checkpoint, a state that a resume could not load."""
        if not self._checked:
            try:
                torch.load(io.BytesIO(state), weights_only=True)
            except pickle.UnpicklingError as error:
                raise UserError(
                    f"{self.config.data.typed}: its state_dict has more than plain values and tensors, which a "
                    f"checkpoint would not load again; convert them: {in_words(error)}"
                ) from error
        self._checked = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the place; `resume` goes there."""
        self.passes, self.taken, self._state = state["passes"], state["taken"], state[f"rank{self._dims.dp_rank}"]
        self._resumes = True

    def resume(self) -> list[str]:
        """Go to the place that was loaded, and return a note about the way."""
        if not self._resumes:
            return []
        self._resumes = False
        has_state = bool(self._state) and callable(getattr(self._train, "load_state_dict", None))
        where = f"{self.config.data.typed} continues after {self.taken} batches of pass {self.passes + 1} on each rank"

        def go() -> None:
            if has_state:
                self._batches = self._pass(self._state)
                return
            start, self.taken = self.taken, 0
            self._batches = self._pass()
            skipped = sum(1 for _ in islice(self._batches, start))
            self.taken = start
            if skipped < start:
                raise UserError(f"{where}, but has only {skipped} now; use the same data, or a new folder.")

        together(go)
        return [f"{where}, {'by its state_dict' if has_state else 'which were read again: it has no state_dict'}."]


def make_loaders(
    workload: Workload, config: TrialConfig, dims: ParallelDims, ranks: DistributedContext
) -> Loaders | OwnLoaders:
    """Return both splits as this rank reads them, of a data set or of the user's own loader.

    Raises:
        UserError: data are missing, or ranks have other data.
    """
    if workload.data.loader is not None:
        return OwnLoaders(workload, config, dims, ranks)
    data = load_data(workload.data, ranks)
    check_data(data, config.training)
    return build_loaders(data, config, dims, ranks.device)


def _attempt(read: Callable[[], list[Batch]]) -> tuple[list[Batch], Exception | None]:
    """Return batches, or the error, which the caller raises on every rank."""
    try:
        return read(), None
    except Exception as error:  # noqa: BLE001
        return [], error


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
