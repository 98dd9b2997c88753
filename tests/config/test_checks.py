"""Every rule between the keys: what it refuses, and that the message gives key, value, rule and remedy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab import hardware
from fsdp_lab.config import (
    CombinationError,
    ConfigError,
    SweepConfig,
    UserError,
    cpu_notes,
    default_num_workers,
    effective_settings,
    from_dict,
    machine,
    sharding_notes,
)
from fsdp_lab.config.machine import check_local_capacity, cpus_per_worker_of, loader_workers_of
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.config.workload import DataConfig


def trial(*overrides: str) -> SweepConfig:
    """`a.b=text` on top of the defaults: texts, whole numbers, decimals and null as YAML has them."""
    import yaml

    values: dict[str, dict[str, object]] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        section, _, leaf = key.partition(".")
        place, name = (values.setdefault(section, {}), leaf) if leaf else (values, section)
        place[name] = yaml.safe_load(text)
    return from_dict(SweepConfig, values)


BELOW_ONE = [
    "model.image_size", "model.num_channels", "model.patch_size", "model.num_layers", "model.num_heads",
    "model.hidden_dim", "model.mlp_dim", "model.num_classes", "data.num_train", "data.num_val", "training.epochs",
    "training.max_steps", "training.global_batch_size", "training.grad_accum_steps", "sharding.dp_replicate",
    "sharding.min_num_params", "reshard_after_forward.size", "checkpoint.every_epochs", "checkpoint.keep_last",
    "cluster.num_workers", "precision.growth_interval", "lr_schedule.step_epochs",
]  # fmt: skip
NEGATIVE = [
    ("data.loader_workers", -1), ("training.timing_warmup_steps", -2), ("training.seed", -1),
    ("optimizer.weight_decay", -0.1), ("optimizer.momentum", -0.5), ("lr_schedule.warmup_steps", -1),
    ("lr_schedule.min_lr_ratio", -0.2), ("cluster.max_failures", -1), ("sharding.forward_prefetch", -1),
    ("sharding.backward_prefetch", -3),
]  # fmt: skip
NOT_POSITIVE = [
    ("optimizer.lr", 0.0), ("optimizer.lr", -0.1), ("training.max_grad_norm", 0.0), ("precision.init_scale", 0.0),
    ("cluster.cpus_per_worker", 0.0), ("cluster.wait_timeout_s", -1.0), ("lr_schedule.gamma", 0.0),
]  # fmt: skip
OUTSIDE = [("optimizer.beta1", 1.0), ("optimizer.beta2", 1.5), ("optimizer.beta1", -0.1)]


@pytest.mark.parametrize(
    ("key", "value", "rule", "remedy"),
    [
        *((key, 0, "below 1", "1 or more") for key in BELOW_ONE),
        *((key, value, "negative", "0 or more") for key, value in NEGATIVE),
        *((key, value, "not above 0", "positive") for key, value in NOT_POSITIVE),
        *((key, value, "outside [0, 1)", "use 0 or more, below 1") for key, value in OUTSIDE),
    ],
)
def test_ranges(key: str, value: float, rule: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trial(f"{key}={value}").check(2)
    for words in (f"{key}={value}", rule, remedy):
        assert words in str(caught.value)
    assert not isinstance(caught.value, CombinationError)


@pytest.mark.parametrize("overrides", [[], ["training.seed=0"], ["data.num_train=null"], ["optimizer.beta1=0.0"]])
def test_what_is_in_range_passes(overrides: list[str]) -> None:
    trial(*overrides).check(2)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_rate_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.lr={value}"):
        trial(f"optimizer.lr={value}").check(2)


DDP = "sharding.granularity=ddp"
TO_SIZE = "reshard_after_forward.policy=to_size"


@pytest.mark.parametrize(
    ("overrides", "workers", "words"),
    [
        (["model.patch_size=5"], 2, ["model.patch_size=5", "model.image_size=28", "use one of 1, 2, 4, 7, 14, 28"]),
        (["model.num_heads=3"], 2, ["model.num_heads=3", "model.hidden_dim=64", "use one of 1, 2, 4, 8"]),
        ([DDP, "offload.target=cpu"], 2, ["sharding=ddp", "offload=cpu", "use offload=none or a sharded"]),
        ([DDP, "offload.target=cpu_unpinned"], 2, ["offload=cpu_unpinned", "use offload=none"]),
        ([DDP, "sharding.dp_replicate=2"], 2, ["sharding=ddp", "use sharding.dp_replicate=1"]),
        ([DDP, "sharding.forward_prefetch=1"], 2, ["forward_prefetch=1", "use sharding.forward_prefetch=null"]),
        ([DDP, "sharding.backward_prefetch=1"], 2, ["sharding.backward_prefetch=1", "sharding.backward_prefetch=null"]),
        ([DDP, "sharding.blocks_per_unit=2"], 2, ["sharding.blocks_per_unit=2", "sharding=ddp", "=per_block"]),
        ([DDP, "sharding.separate_reduce_scatter_group=true"], 2,
         ["sharding=ddp", "use sharding.separate_reduce_scatter_group=false"]),
        (["sharding.granularity=per_layer", "activation_checkpointing=selective"], 2,
         ["sharding=per_layer", "activation_checkpointing=selective", "use sharding=per_block, root or ddp"]),
        (["precision.float8=true"], 2, ["precision.float8=true", "param_dtype=float32", "use precision=float8"]),
        (["compile_memory_budget=0.5"], 2, ["compile_memory_budget=0.5", "compile=false", "use compile=true"]),
        (["compile=true", "compile_memory_budget=0", "activation_checkpointing=full"], 2,
         ["compile_memory_budget=0", "activation_checkpointing=full", "use activation_checkpointing=none"]),
        (["sharding.granularity=root", "sharding.blocks_per_unit=3"], 2,
         ["sharding.blocks_per_unit=3", "sharding=root", "use sharding.blocks_per_unit=1"]),
        (["optimizer.name=sgd", "optimizer.state_dtype=bf16"], 2,
         ["optimizer.state_dtype=bf16", "optimizer=sgd", "use optimizer.state_dtype=fp32"]),
        (["sharding.dp_replicate=3"], 8, ["sharding.dp_replicate=3", "cluster.num_workers=8", "use one of 1, 2, 4, 8"]),
        (["training.global_batch_size=65"], 2, ["training.global_batch_size=65", "cluster.num_workers=2", "64 or 66"]),
        (["training.global_batch_size=30", "training.grad_accum_steps=2"], 4,
         ["training.global_batch_size=30", "training.grad_accum_steps=2", "= 8", "24 or 32"]),
        (["training.global_batch_size=3"], 4, ["training.global_batch_size=3", "use for example 4."]),
        ([TO_SIZE, "reshard_after_forward.size=3"], 4, ["reshard_after_forward.size=3", "degree 4", "one of 1, 2, 4"]),
        ([TO_SIZE, "reshard_after_forward.size=4", "sharding.dp_replicate=2"], 4,
         ["reshard_after_forward.size=4", "degree 2", "cluster.num_workers=4", "dp_replicate=2", "one of 1, 2"]),
        (["optimizer.momentum=0.9"], 2, ["optimizer.momentum=0.9", "optimizer=adam", "use optimizer=sgd"]),
        (["precision.loss_scaling=true", "precision.param_dtype=bfloat16"], 2,
         ["precision.loss_scaling=true", "precision.param_dtype=bfloat16", "use precision.loss_scaling=false"]),
        (["optimizer.implementation=fused", "optimizer.name=sgd"], 2,
         ["optimizer.implementation=fused", "optimizer=sgd", "auto or foreach"]),
        (["optimizer.implementation=fused", "precision.loss_scaling=true", "precision.param_dtype=float16"], 2,
         ["optimizer.implementation=fused", "precision.loss_scaling=true", "auto or foreach"]),
    ],
)  # fmt: skip
def test_combinations(overrides: list[str], workers: int, words: list[str]) -> None:
    with pytest.raises(CombinationError) as caught:
        trial(*overrides).check(workers)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_heads=null"], ["model.num_heads=null", "set model.num_heads to a number"]),
        (["model.patch_size=null"], ["model.patch_size=null"]),
        (["model.mlp_dim=null"], ["model.mlp_dim=null"]),
        (["sharding.granularity=size_based"], ["sharding.min_num_params=null", "sharding=size_based",
                                               "set for example sharding.min_num_params=20000"]),
        ([TO_SIZE], ["reshard_after_forward.size=null", "set reshard_after_forward.size to one of 1, 2"]),
    ],
)  # fmt: skip
def test_what_is_missing(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        trial(*overrides).check(2)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        (["sharding.dp_replicate=4"], 8),
        ([TO_SIZE, "reshard_after_forward.size=2", "sharding.dp_replicate=2"], 4),
        ([DDP, TO_SIZE], 2),  # DDP reshards nothing: the size is not looked at
        (["model.family=mlp", "model.patch_size=null", "model.num_heads=null", "model.mlp_dim=null"], 2),
        (["model.family=mlp", "model.patch_size=5"], 2),
        (["optimizer.name=sgd", "optimizer.momentum=0.9"], 2),
        ([DDP, "optimizer.name=sgd", "optimizer.implementation=fused"], 2),
        (["precision.loss_scaling=true", "precision.param_dtype=float16"], 2),
        (["training.global_batch_size=64", "training.grad_accum_steps=4"], 16),
    ],
)
def test_what_has_a_meaning_passes(overrides: list[str], workers: int) -> None:
    trial(*overrides).check(workers)


ROOT = "sharding.granularity=root"
ALWAYS, NEVER, DEFAULT = (f"reshard_after_forward.policy={p}" for p in ("always", "never", "default"))
SIZE_1, SIZE_2, SIZE_4 = ([TO_SIZE, f"reshard_after_forward.size={n}"] for n in (1, 2, 4))


@pytest.mark.parametrize(
    ("one", "other", "workers", "equal"),
    [
        ([DDP, ALWAYS], [DDP, NEVER], 2, True),
        ([DDP, DEFAULT], [DDP, *SIZE_2], 2, True),
        ([ALWAYS], [NEVER], 2, False),
        ([DEFAULT], [NEVER], 2, False),
        ([DEFAULT], [ALWAYS], 2, False),  # the root's own parameters
        ([ROOT, DEFAULT], [ROOT, NEVER], 2, True),
        ([ROOT, DEFAULT], [ROOT, ALWAYS], 2, False),
        (SIZE_1, [NEVER], 4, True),
        (SIZE_4, [ALWAYS], 4, True),
        (SIZE_2, [ALWAYS], 4, False),
        (SIZE_2, SIZE_4, 4, False),
        ([*SIZE_2, "sharding.dp_replicate=2"], [ALWAYS, "sharding.dp_replicate=2"], 4, True),
        ([ALWAYS], [ALWAYS, "optimizer.lr=0.1"], 2, False),
        ([ALWAYS, "cluster.num_workers=2"], [ALWAYS], 2, True),  # null stands for two here
    ],
)
def test_effective_settings(one: list[str], other: list[str], workers: int, equal: bool) -> None:
    same = effective_settings(trial(*one), workers) == effective_settings(trial(*other), workers)
    assert same is equal


@pytest.mark.parametrize(("target", "count"), [("none", 0), ("cpu", 1), ("cpu_unpinned", 1)])
def test_cpu_notes(target: str, count: int) -> None:
    notes = list(cpu_notes(trial(f"offload.target={target}")))
    assert len(notes) == count
    assert all(f"offload={target} has no effect on a CPU" in note for note in notes)


@pytest.mark.parametrize("granularity", ["ddp", "root", "per_block", "per_layer"])
def test_note_on_sharding_only_the_root(granularity: str) -> None:
    notes = list(sharding_notes(trial(f"sharding.granularity={granularity}")))
    assert len(notes) == (granularity == "root")
    assert all("sharding=root" in note and "sharding=per_block" in note for note in notes)


def test_note_on_resharding_what_is_not_sharded() -> None:
    settings = ("sharding.granularity=ddp", "reshard_after_forward.policy=never")
    assert list(sharding_notes(trial(*settings))) == [
        "reshard_after_forward=never has no effect with sharding=ddp: nothing is sharded."
    ]


def test_missing_data_message(tmp_path: Path) -> None:
    data = DataConfig(name="fashion_mnist", root=str(tmp_path))
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    files = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
    for name in files[:3]:
        (raw / name).touch()
    message = data.missing()
    assert message is not None
    for words in (f"data.root={tmp_path}", str(raw), "lacks Fashion-MNIST's t10k-labels-idx1-ubyte;", "data=digits"):
        assert words in message
    (raw / files[3]).touch()
    assert data.missing() is None
    assert DataConfig(root=str(tmp_path / "absent")).missing() is None  # digits need no files


def test_errors_are_reported_to_users() -> None:
    assert issubclass(CombinationError, ConfigError)
    assert issubclass(ConfigError, UserError)
    assert issubclass(ConfigError, ValueError)


def test_default_num_workers() -> None:
    import torch

    assert default_num_workers() == (torch.cuda.device_count() or 2)


@pytest.mark.parametrize(
    ("gpus", "cores", "given", "each"),
    [
        (0, 64, None, 1.0),
        (8, 96, None, 12.0),
        (8, 4, None, 1.0),
        (1, 64, None, 16.0),
        (8, 96, 2.0, 2.0),
        (0, 2, 0.5, 0.5),
    ],
)
def test_cpus_per_worker_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, given: float | None, each: float
) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "num_cpus", lambda: cores)
    assert cpus_per_worker_of(ClusterConfig(cpus_per_worker=given)) == each


@pytest.mark.parametrize(
    ("gpus", "cores", "cluster", "workers", "words"),
    [
        (0, 2, ClusterConfig(), 4, "=4 needs 4 CPUs (cluster.cpus_per_worker=1 each), this machine has 2; use cluster."
         "num_workers=2, or cluster.cpus_per_worker=0.5, so"),
        (8, 96, ClusterConfig(cpus_per_worker=16), 8, "=8 needs 128 CPUs (cluster.cpus_per_worker=16 each), this"),
        (8, 4, ClusterConfig(), 8, "=8 needs 8 CPUs (cluster.cpus_per_worker=1 each), this machine has 4; use cluster."
         "num_workers=4, or cluster.cpus_per_worker=0.5, so"),
        (0, 2, ClusterConfig(), 7, "=7 needs 7 CPUs (cluster.cpus_per_worker=1 each), this machine has 2; use cluster."
         "num_workers=2, or cluster.cpus_per_worker=0.28, so"),
        (0, 2, ClusterConfig(cpus_per_worker=9), 1, "=1 needs 9 CPUs (cluster.cpus_per_worker=9 each), this machine has"
         " 2; use cluster.cpus_per_worker=2."),
        (2, 96, ClusterConfig(), 3, "=3 needs a GPU for each, this machine has 2; use cluster.num_workers=2, or hide"),
    ],
)  # fmt: skip
def test_more_workers_than_this_machine_can_place(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, cluster: ClusterConfig, workers: int, words: str
) -> None:
    for module in (hardware, machine):
        monkeypatch.setattr(module, "num_gpus", lambda: gpus)
        monkeypatch.setattr(module, "num_cpus", lambda: cores)
    with pytest.raises(ConfigError, match=re.escape(f"cluster.num_workers{words}")):
        check_local_capacity(cluster, workers)
    check_local_capacity(replace(cluster, address="auto"), workers)
    if suggested := re.search(r"cluster\.cpus_per_worker=([\d.]*\d)(?:\.$|, so)", words):
        check_local_capacity(replace(cluster, cpus_per_worker=float(suggested[1])), workers)
    if (cluster.cpus_per_worker or 1) <= cores:
        check_local_capacity(cluster, 1)


@pytest.mark.parametrize(
    ("gpus", "cores", "settings", "workers"),
    [(0, 64, (), 0), (8, 96, (), 4), (8, 16, (), 1), (8, 8, (), 0), (8, 96, ("cluster.cpus_per_worker=3",), 2),
     (8, 96, ("data.loader_workers=0",), 0), (0, 2, ("data.loader_workers=2",), 2)],
)  # fmt: skip
def test_loader_workers_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, settings: tuple[str, ...], workers: int
) -> None:
    for module in (hardware, machine):
        monkeypatch.setattr(module, "num_gpus", lambda: gpus)
        monkeypatch.setattr(module, "num_cpus", lambda: cores)
    assert loader_workers_of(trial(*settings)) == workers


@pytest.mark.parametrize(("value", "expected"), [(None, None), (1, 1.0), (0.5, 0.5), (16.0, 16.0)])
def test_cpus_per_worker_as_it_was_and_is_written(value: float | None, expected: float | None) -> None:
    assert from_dict(SweepConfig, {"cluster": {"cpus_per_worker": value}}).cluster.cpus_per_worker == expected
