"""FSDP1's units, what it calls our settings, and what only it cannot do."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.optim.lr_scheduler import LambdaLR

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.axes import Where, notes
from fsdp_lab.config.axes.api import strategy_of
from fsdp_lab.config.compare import effective_settings
from fsdp_lab.config.rules import check_trial
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.checkpoint import TrainState
from fsdp_lab.training.loop import update
from fsdp_lab.training.parallel import fsdp1
from fsdp_lab.training.parallel.units import sharding_units
from fsdp_lab.workloads.base import original_name
from fsdp_lab.workloads.examples.language.llama import Block as LlamaBlock
from fsdp_lab.workloads.examples.language.llama import Llama
from tests.ranks import config, parallel_of, run_ranks
from tests.workloads.user.odd import Block, Odd

FSDP1 = "sharding.api=fsdp1"
LLAMA = partial(Llama, vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16,
                rope_theta=1e4, norm_eps=1e-5, tied=False)  # fmt: skip
ATTENTION = partial(nn.TransformerEncoderLayer, 8, 2, 16)
CASES: list[tuple[Any, Any, int | None]] = [
    (Odd, Block, None),
    (LLAMA, LlamaBlock, None),
    (LLAMA, LlamaBlock, 1000),
    (LLAMA, LlamaBlock, 5000),
    (ATTENTION, nn.Linear, 100),
]


def _wrapped(model: nn.Module) -> list[tuple[str, int]]:
    """The names of FSDP1's units, and the elements of their parameters that are no other's."""
    named = model.named_modules()
    units = [(original_name(name), one) for name, one in named if isinstance(one, FullyShardedDataParallel)]
    return [(name, sum(handle.numel() for handle in unit.params)) for name, unit in units]


def _units_of_both() -> list[tuple[Any, Any]]:
    """Of each case: our units, and those of PyTorch's own policy for that."""
    found = []
    mesh, device = init_device_mesh("cpu", (2,)), torch.device("cpu")
    for build, kind, size in CASES:
        words = ["sharding=per_block"] if size is None else ["sharding=size_based", f"sharding.min_num_params={size}"]
        trial, model = config(FSDP1, *words), build()
        ours = parallel_of(trial, mesh=mesh)
        ours.divide(model, sharding_units(model, (kind,), trial.sharding), [])
        ours.wrap(model, find_unused=False)
        policy: Any = partial(size_based_auto_wrap_policy, min_num_params=size) if size else ModuleWrapPolicy({kind})
        theirs = FullyShardedDataParallel(build(), auto_wrap_policy=policy, device_id=device, use_orig_params=True)
        found.append((_wrapped(ours.model), _wrapped(theirs)))
    return found


def test_units_are_those_of_pytorchs_policies() -> None:
    """But for attention of `torch.nn`, which the policy by size never wraps: here it is a unit."""
    for (ours, theirs), (build, _, size) in zip(run_ranks(2, _units_of_both)[0], CASES, strict=True):
        assert len(theirs) > 1, "a unit beside the root"
        if build is ATTENTION:
            (_, in_root), *units = ours
            ours = [("", in_root + dict(units).pop("self_attn")), *(one for one in units if one[0] != "self_attn")]
        assert ours == theirs, size


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("reshard_after_forward=always", ShardingStrategy.FULL_SHARD),
        ("reshard_after_forward=default", ShardingStrategy.FULL_SHARD),
        ("reshard_after_forward=never", ShardingStrategy.SHARD_GRAD_OP),
        ("reshard_after_forward=default sharding.dp_replicate=2", ShardingStrategy.HYBRID_SHARD),
        ("reshard_after_forward=never sharding.dp_replicate=2", ShardingStrategy._HYBRID_SHARD_ZERO2),
    ],
)
def test_what_fsdp1_calls_it(words: str, expected: ShardingStrategy) -> None:
    assert ShardingStrategy[strategy_of(config(FSDP1, *words.split()))] is expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"forward_prefetch": False, "limit_all_gathers": True}),
        ("", {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}),
        ("sharding.forward_prefetch=1", {"forward_prefetch": True}),
        ("sharding.backward_prefetch=0", {"backward_prefetch": None}),
        ("sharding.limit_all_gathers=false", {"limit_all_gathers": False}),
        # batch norm, too: it would stay in float32
        ("precision=bf16", {"mixed_precision": MixedPrecision(
            torch.bfloat16, torch.bfloat16, cast_forward_inputs=True, _module_classes_to_ignore=())}),
    ],
)  # fmt: skip
def test_what_only_changes_speed_or_memory_reaches_fsdp1(
    words: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mesh:
        ndim = 1

    given: dict[str, Any] = {}
    monkeypatch.setattr(fsdp1, "FullyShardedDataParallel", lambda model, **options: given.update(options) or model)
    parallel, model = parallel_of(config(FSDP1, *words.split()), mesh=Mesh()), nn.Linear(1, 1)
    parallel.divide(model, [], [])
    parallel.wrap(model, find_unused=False)
    assert {name: given[name] for name in expected} == expected


def test_settings_that_are_the_same_with_fsdp1_are_one_trial() -> None:
    def settings(*words: str, workers: int = 2) -> dict[str, Any]:
        return effective_settings(config(FSDP1, *words), workers)

    always, default, never = (settings(f"reshard_after_forward={policy}") for policy in ("always", "default", "never"))
    assert always == default != never
    assert settings("reshard_after_forward=always", workers=1) == settings("reshard_after_forward=never", workers=1)
    assert settings("sharding.backward_prefetch=1") == settings() != settings("sharding.backward_prefetch=0")
    assert settings("sharding.forward_prefetch=0") == settings() != settings("sharding.forward_prefetch=1")
    assert settings() != effective_settings(config(), 2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", ""),
        ("reshard_after_forward=always", "keeps the root's parameters"),
        ("precision=bf16_mixed training.grad_accum_steps=2", "microbatches in bfloat16, FSDP2 in float32"),
        ("precision=bf16_mixed training.grad_accum_steps=2 training.sync_each_microbatch=true", ""),
        ("optimizer=custom optimizer._target_=torch.optim.RAdam", "flat parts of parameters"),
    ],
)
def test_what_fsdp1_does_unlike_fsdp2_has_a_note(words: str, named: str) -> None:
    said = [*notes(config(FSDP1, *words.split()), Where(cuda=False))]
    assert len(said) == bool(named) and all(named in note for note in said)


def test_offload_loses_no_microbatch() -> None:
    """FSDP1 would keep the gradients of the last one: only with offload, several, and a reduction of each."""
    words = ("offload=cpu", "training.grad_accum_steps=2", "training.sync_each_microbatch=true")
    for left_out in words:
        check_trial(config(FSDP1, *(word for word in words if word != left_out)), 2)
    with pytest.raises(ConfigError, match="last microbatch only"):
        check_trial(config(FSDP1, *words), 2)


def _scales_after_an_overflow() -> list[list[float]]:
    """Of each kind of scaler and optimizer: before and after a step in which only the gradients of rank 1 overflow."""
    found = []
    for words, fused in product((FSDP1, "sharding.tp=2"), (False, True)):
        trial, model = config(words, "precision=fp16"), nn.Linear(2, 1, bias=False)
        parallel, optimizer = parallel_of(trial, model), torch.optim.SGD(model.parameters(), fused=fused)
        state = TrainState(
            parallel, {"model": optimizer}, scaler := parallel.scaler(), [LambdaLR(optimizer, lambda step: 1.0)]
        )
        before, weights = scaler.get_scale(), model.weight.tolist()
        model.weight.grad = torch.full((1, 2), float("inf") if dist.get_rank() else 1.0)
        update(state, optimizer, has_norm=False)
        found.append([before, scaler.get_scale(), model.weight.tolist() == weights])
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    assert run_ranks(2, _scales_after_an_overflow) == [[[65536.0, 32768.0, True]] * 4] * 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("offload=cpu", r"sharding\.api=fsdp1 with offload=cpu has no forecast for a GPU: FSDP1 moves parameters"),
        (
            "sharding.limit_all_gathers=false",
            r"limit_all_gathers=false has no .* how far the host runs ahead",
        ),
    ],
)
def test_what_has_no_forecast_for_a_gpu_says_why(words: str, why: str) -> None:
    trial = config(FSDP1, words)
    with pytest.raises(UserError, match=why):
        forecast_profile(trial, 2, cuda=True)
    assert forecast_profile(trial, 2, cuda=False).peaks == forecast_profile(config(FSDP1), 2, cuda=False).peaks
