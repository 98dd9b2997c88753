"""The registry: names that a config can use, and the module that defines each.

Names and module paths only: nothing is imported here, so a misspelled name fails without PyTorch, Ray or Optuna.
"""

from __future__ import annotations

from fsdp_lab.config.errors import ConfigError

# The key that names an entry -> its entries: name -> module.
REGISTRY: dict[str, dict[str, str]] = {
    # a module with `build_task(TaskConfig, ModelConfig) -> Task`
    "task.name": {
        "classification": "fsdp_lab.workloads.vision.classification",
        "language": "fsdp_lab.workloads.language.task",
        "seq2seq": "fsdp_lab.workloads.seq2seq.task",
        "model_loss": "fsdp_lab.workloads.user.task",
        "custom": "fsdp_lab.workloads.user.task",
    },
    # a module with `build_sampler(seed) -> optuna.samplers.BaseSampler`; a grid samples nothing
    "search.name": {
        "grid": "",
        "random": "fsdp_lab.sweep.samplers.random",
        "optuna": "fsdp_lab.sweep.samplers.tpe",
    },
    # a module with `build_scheduler(SweepConfig, watched) -> ray.tune.schedulers.TrialScheduler`
    "scheduler.name": {
        "fifo": "fsdp_lab.sweep.schedulers.fifo",
        "asha": "fsdp_lab.sweep.schedulers.asha",
        "median": "fsdp_lab.sweep.schedulers.median",
    },
}


def register(key: str, name: str, module: str) -> None:
    """Add a name to a key of the registry, for a module of another package, in this process.

    Args:
        key: `task.name`, `search.name` or `scheduler.name`.
        name: the value that users type.
        module: the dotted path of the module that defines it.
    """
    REGISTRY[key][name] = module


def module_of(key: str, name: str) -> str:
    """Return the path of the module that a value of a key of the registry stands for.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    known = REGISTRY[key]
    if name not in known:
        raise ConfigError(f"{key}={name} is not an option. Choose one of: {', '.join(known)}.")
    return known[name]
