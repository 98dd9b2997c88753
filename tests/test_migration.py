"""docs/fsdp1-to-fsdp2.md: its two versions of one training learn the same, and read each other's checkpoints."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import ROOT
from tests.ranks import Memo, config, run_ranks

PAGE = (ROOT / "docs" / "fsdp1-to-fsdp2.md").read_text()
STEPS = 4  # before a checkpoint, and as many after it
VERSIONS = ("FSDP1", "FSDP2")
FP32, BF16 = "float32", "bfloat16"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def code_of(name: str) -> dict[str, Any]:
    """Return what the page's block with this first line defines."""
    (code,) = re.findall(rf"^```python\n# {name}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, name, "exec"), names)
    return names


def train(version: str, dtype: str, accum: int, folder: str, loaded: str = "") -> list[float]:
    """Return the losses of the steps until a checkpoint and after it; with `loaded` only those after that one."""
    code, checkpoint = code_of(version), code_of("checkpoint")
    torch.manual_seed(0)
    # one rank has nothing of the last layer
    plain = nn.Sequential(nn.Linear(8, 32), *(Block() for _ in range(3)), nn.Linear(32, 1))
    model = code["shard"](plain, Block, torch.device("cpu"), getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(F.mse_loss(model(batch[0]).float().flatten(), batch[1]))
        return seen[-1]

    if loaded:
        checkpoint["load"](model, optimizer, loaded)
    for step in range(STEPS if loaded else 0, 2 * STEPS):
        drawn = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batches = [(torch.randn(16, 8, generator=drawn), torch.randn(16, generator=drawn)) for _ in range(3)]
        code["train_step"](model, optimizer, loss, batches[:accum])
        if not loaded and step == STEPS - 1:
            checkpoint["save"](model, optimizer, folder)
    total = torch.stack(seen).detach().view(-1, accum).mean(1) / dist.get_world_size()
    dist.all_reduce(total)
    return total.tolist()  # type: ignore[no-any-return]


def train_all(folder: str) -> dict[tuple[str, str, int], tuple[list[float], list[float]]]:
    """Return the losses of each version, and those with which it continues the other's checkpoint."""
    cases = [(version, dtype, accum) for dtype, accum in ((FP32, 3), (BF16, 1), (BF16, 3)) for version in VERSIONS]
    whole = {case: train(*case, f"{folder}/{case}") for case in cases}
    other = dict(zip(VERSIONS, VERSIONS[::-1], strict=True))
    return {(v, d, n): (whole[v, d, n], train(v, d, n, "", f"{folder}/{(other[v], d, n)}")) for v, d, n in cases}


@pytest.mark.ci
def test_both_versions_of_the_page_train_alike(tmp_path: Path) -> None:
    """In bfloat16 until gradients are accumulated, which FSDP1 does in that type."""
    found = run_ranks(2, train_all, str(tmp_path))[0]
    for dtype, accum in ((FP32, 3), (BF16, 1)):
        (one, _), (two, _) = (found[version, dtype, accum] for version in VERSIONS)
        assert len(one) == 2 * STEPS
        assert one == pytest.approx(two, abs=1e-6)
        for version in VERSIONS:
            losses, continued = found[version, dtype, accum]
            assert continued == pytest.approx(losses[STEPS:], abs=1e-6), version
    apart = [found[version, BF16, 3][0] for version in VERSIONS]
    assert apart[0][0] == pytest.approx(apart[1][0], abs=1e-6)
    assert apart[0] != pytest.approx(apart[1], abs=1e-4)


def take_over(folder: str) -> dict[tuple[str, str], list[float]]:
    """Return the losses of a trial of each API that starts from a checkpoint of each."""
    from fsdp_lab.training.train import train

    found = {}
    words = ("model=mlp", "sharding=per_block", "checkpoint.mode=sync")
    for source, api in (("", "fsdp1"), ("", "fsdp2"), *product(("fsdp1", "fsdp2"), repeat=2)):
        own = Path(folder, f"{api} from {source}")
        start = [f"checkpoint.resume_from={folder}/{source} from /checkpoints"] if source else []
        losses: list[float] = []
        train(config(*words, f"sharding.api={api}", *start), own, Memo(), losses.extend)
        found[source, api] = losses
    return found


@pytest.mark.ci
def test_a_trial_starts_from_a_checkpoint_of_the_other_api(tmp_path: Path) -> None:
    found = run_ranks(2, take_over, str(tmp_path))[0]
    first, second = found["", "fsdp1"], found["fsdp2", "fsdp2"]
    assert first == pytest.approx(found["", "fsdp2"], abs=1e-6)
    assert max(second) < max(first), "it has learned before"
    for source, api in product(("fsdp1", "fsdp2"), repeat=2):
        assert found[source, api] == pytest.approx(second, abs=1e-6), f"{api} from {source}"
