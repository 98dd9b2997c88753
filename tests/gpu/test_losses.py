"""Every setting learns what a plain loop of PyTorch learns on the same device, step by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.gpu.conftest import Machine
from tests.gpu.ranks import Ranks
from tests.parity import Row, train_each, unsharded
from tests.parity_rows import GPU_CELLS, GPU_CELLS_OF_TWO
from tests.training.reference import apart

pytestmark = pytest.mark.gpu

ROWS = [Row(workload, cell, 1) for workload, cells in GPU_CELLS.items() for cell in cells]
ROWS_OF_TWO = [Row(workload, cell, 2) for workload, cells in GPU_CELLS_OF_TWO.items() for cell in cells]
ON_A_CPU = "sharding=per_block compile=true"  # the compiler takes half a minute there
CUDA_TF32 = 5e-2  # of products with 10 bits, against 23: as in 16 bits
CUDA_FP32 = 1e-4  # other kernels than the plain loop's; weights that start equal


def losses(row: Row, device: str) -> tuple[list[float], list[float]]:
    """On one rank: the losses of the steps and of the validation, of the trial and of the plain loop."""
    torch.backends.cudnn.allow_tf32 = False  # of convolutions; products have it off by default
    words = [word for word in row.words if not word.startswith("memory_profile")]
    profile = "peaks" if "memory_profile=peaks" in row.cell else "off"
    (result,) = train_each([[*words, f"memory_profile={profile}"]])
    plain = unsharded(row, device)
    return [*result.losses, result.metrics["val/loss"]], [*plain.losses, plain.val_loss]


@pytest.mark.parametrize("row", [*ROWS, *ROWS_OF_TWO], ids=str)
def test_a_setting_learns_what_a_plain_loop_learns(
    row: Row, machine: Machine, ranks: Ranks, figures: Callable[..., None]
) -> None:
    if row.ranks > machine.ranks:
        pytest.skip("needs two ranks")
    if not machine.cuda and "compile=true" in row.cell and row.cell != ON_A_CPU:
        pytest.skip("compiled on a GPU, and by tests/training/test_parity.py")
    later = {"separate_reduce": "set_separate_reduce_scatter_group", "find_unused": "set_reduce_scatter_unused_params"}
    for word, method in later.items():
        if word in row.cell and not hasattr(FSDPModule, method):
            pytest.skip(f"PyTorch {torch.__version__} has no {method}")
    (learned, plain), *others = ranks.run(losses, row, machine.device, seconds=180)
    on_cuda = CUDA_TF32 if "precision=tf32" in row.cell else CUDA_FP32
    tolerance = max(row.tolerance, on_cuda if machine.cuda else 0.0)
    figures(apart=apart(learned, plain), tolerance=tolerance)
    assert all(other[0] == learned for other in others), "ranks report different losses"
    assert min(plain[1:-1]) < plain[0], "it learns"
    assert apart(learned, plain) <= tolerance, f"{learned}\n{plain}"


def first_weights(words: list[str]) -> list[float]:
    (result,) = train_each([words])
    return [*result.losses, result.metrics["val/loss"]]


def test_weights_that_rank_0_sends_are_those_of_every_sharding(ranks: Ranks, figures: Callable[..., None]) -> None:
    """By NCCL, against a constructor on each rank under DDP."""
    results = {}
    for sharding in ("ddp", "root", "per_block", "per_layer"):
        init = "plain" if sharding == "ddp" else "rank0"
        words = Row("language", f"sharding={sharding} init={init} memory_profile=off").words
        results[sharding] = ranks.run(first_weights, words)[0]
    differences = {name: apart(result, results["ddp"]) for name, result in results.items()}
    figures(**differences)
    assert max(differences.values()) <= CUDA_FP32
