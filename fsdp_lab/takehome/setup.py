"""A trial's training setup, as the script needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_lab.config.parallel import Granularity
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.layout import Layout, read_layout


@dataclass(frozen=True)
class Setup:
    """A trial's config, and the facts that were known when it started.

    Attributes:
        name: of the trial, for people.
        config: of the trial.
        layout: how the model was divided.
        world_size: the number of ranks.
        num_params: of the model.
        num_train: the training samples that it used.
        torch: the version of PyTorch.
        channels: of the images that the model takes; 1 for other models.
        data_arguments: of the data set, with the sizes that it took from the model.
    """

    name: str
    config: TrialConfig
    layout: Layout
    world_size: int
    num_params: int
    num_train: int
    torch: str
    channels: int
    data_arguments: Mapping[str, Any]

    @property
    def is_ddp(self) -> bool:
        """Whether the trial used DDP."""
        return self.config.sharding.granularity is Granularity.ddp

    @property
    def dp_replicate(self) -> int:
        """Replicas of the model: all ranks for DDP."""
        return self.world_size if self.is_ddp else self.config.sharding.dp_replicate

    @property
    def lr(self) -> float:
        """The learning rate with `optimizer.scale_lr` applied."""
        return self.config.optimizer.lr * (self.world_size if self.config.optimizer.scale_lr else 1)

    @property
    def microbatch_size(self) -> int:
        """Samples of one rank in one forward pass."""
        training = self.config.training
        return training.global_batch_size // self.world_size // training.grad_accum_steps

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole training."""
        training = self.config.training
        planned = self.num_train // training.global_batch_size * training.epochs
        return planned if training.max_steps is None else min(planned, training.max_steps)


def read_setup(name: str, config: TrialConfig, facts: Mapping[str, Any] | None) -> Setup | None:
    """Return the setup of a trial from its facts; None if facts are missing.

    Nothing that the config names is imported: a record may come from anywhere.
    """
    facts = facts or {}
    sizes, of_model = facts.get("data_sizes"), facts.get("model_sizes")
    layout = read_layout(facts.get("layout"))
    numbers = {
        "world_size": facts.get("world_size"),
        "num_params": facts.get("num_params"),
        "num_train": facts.get("data_num_train"),
        "channels": of_model.get("num_channels", 1) if isinstance(of_model, dict) else None,
    }
    if layout is None or not isinstance(sizes, dict) or not all(isinstance(n, int) for n in numbers.values()):
        return None
    torch, arguments = str(facts.get("torch")), {**sizes, **config.data.arguments}
    return Setup(name, config, layout, data_arguments=arguments, torch=torch, **numbers)  # type: ignore[arg-type]
