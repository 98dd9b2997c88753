"""The registry: names that a config can use, and the module, class or function behind each.

Names and module paths only: nothing is imported here, so a misspelled name fails without PyTorch, Ray or Optuna.
"""

from __future__ import annotations

from fsdp_lab.config.errors import ConfigError

# The key that names an entry -> its entries: name -> module.
REGISTRY: dict[str, dict[str, str]] = {
    # a module with `build_task(TaskConfig, ModelConfig) -> Task`
    "task.name": {
        "classification": "fsdp_lab.workloads.tasks.classification",
        "language": "fsdp_lab.workloads.tasks.language",
        "seq2seq": "fsdp_lab.workloads.tasks.seq2seq",
        "model_loss": "fsdp_lab.workloads.user.task",
        "custom": "fsdp_lab.workloads.user.task",
    },
    # a callable `(seed=...) -> optuna.samplers.BaseSampler`; a grid samples nothing
    "search.name": {
        "grid": "",
        "random": "optuna.samplers.RandomSampler",
        "optuna": "optuna.samplers.TPESampler",
    },
    # a function `(SweepConfig, watched) -> ray.tune.schedulers.TrialScheduler`
    "scheduler.name": {
        "fifo": "fsdp_lab.sweep.schedulers.fifo",
        "asha": "fsdp_lab.sweep.schedulers.asha",
        "median": "fsdp_lab.sweep.schedulers.median",
    },
}


def register(key: str, name: str, path: str) -> None:
    """Add a name to a key of the registry, for code of another package, in this process.

    Args:
        key: `task.name`, `search.name` or `scheduler.name`.
        name: the value that users type.
        path: the dotted path of what the comment at the key asks for.
    """
    REGISTRY[key][name] = path


def path_of(key: str, name: str) -> str:
    """Return the dotted path that a value of a key of the registry stands for.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    known = REGISTRY[key]
    if name not in known:
        raise ConfigError(f"{key}={name} is not an option. Choose one of: {', '.join(known)}.")
    return known[name]
