"""Models that use their weights as sharding does not expect train as plain loops do, or are refused by name. The loops
import nothing of the package."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import default_collate

from fsdp_lab.config.errors import UserError
from tests.ranks import run_ranks, train_all

HERE = __name__
DDP, ROOT, BLOCK, LAYER = "sharding=ddp", "sharding=root", "sharding=per_block", "sharding=per_layer"
ALWAYS, NEVER, FSDP1 = "reshard_after_forward=always", "reshard_after_forward=never", "sharding.api=fsdp1"
SCALED, FUSED = (
    "precision.loss_scaling=true",
    "optimizer=custom optimizer._target_=torch.optim.AdamW optimizer.fused=true",
)
RECOMPUTED = "activation_checkpointing=full"


class Rows:
    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.x = torch.randn(64, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True).tanh()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    value = F.mse_loss(model(batch[0]), batch[1])
    return value + F.mse_loss(model(batch[0], True), batch[1]) if getattr(model, "has_two_heads", False) else value


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def block(self) -> nn.Module:
        return Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Functional(Net):
    """Its last block is called with another weight, which comes of one of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.head(functional_call(self.blocks[1], {"inner.weight": 0.5 * self.weight}, (x,)))


class Recurrent(Net):
    """Blocks whose class keeps a list of its weights."""

    def block(self) -> nn.Module:
        return nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True, proj_size=4)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        for block in self.blocks:
            x = block(x)[0]
        return self.head(x[:, -1])


class Forces(Net):
    """The gradient of an energy by its inputs is part of what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = super().forward(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=torch.is_grad_enabled())
        return energy + force.pow(2).sum(1, keepdim=True)


class Penalised(Net):
    """It adds a penalty of all its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class TwoHeads(Net):
    """It is called twice in a step, and each call uses one head of three."""

    has_two_heads = True

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, second: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.second(x) if second else self.head(x)


class Spectral(Net):
    """It computes a Fourier transform."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.fft.rfft(block(x)).abs().repeat(1, 2)[:, :8]
        return self.head(x)


class Inverts(Net):
    """It solves an equation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.linalg.solve(torch.eye(8, dtype=x.dtype), self.blocks[0](x).t()).t())


class Widens(Net):
    """It weighs by a table that it makes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x) * torch.linspace(0, 1, 8))


class Overflows(Net):
    """Its second step overflows, and the scaler of its loss skips it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return super().forward(x) * (float("inf") if self.training and self.steps == 2 else 1)


class Decays(Net):
    """Its optimizer is the one below."""


class Fused(torch.optim.AdamW):
    """An optimizer that chooses fused kernels."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, fused=True)


class AddsWeights(Net):
    """It uses the weights of a block itself, in a product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.blocks[0].inner.weight).mean(1, keepdim=True)


class Uses(Net):
    """It makes tensors of the type of a weight, and moves a weight of a block without a gradient, by nothing."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[0].inner.weight
        with torch.no_grad():
            weight.lerp_(self.blocks[1].inner.weight, 0.0)
        return super().forward(x + weight.new_zeros(8))


class AddsWrites(Net):
    """It adds up what `.data` has of the weights of a block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.blocks[0].inner.weight.data.abs().sum()


class Merges(Net):
    """In eval() it adds one weight of a block to another, as low-rank adapters do."""

    def train(self, mode: bool = True) -> Merges:
        if self.training and not mode:
            self.blocks[1].inner.weight.data += 0.1 * self.blocks[0].inner.weight.data.abs().sum()
        return super().train(mode)


def words(kind: type[nn.Module], *more: str) -> list[str]:
    own = [f"optimizer._target_={HERE}.Fused"] if kind is Decays else ["optimizer=sgd", "optimizer.momentum=0"]
    return [
        f"model._target_={HERE}.{kind.__name__}", f"data._target_={HERE}.Rows", f"task.loss={HERE}.loss", *own,
        "optimizer.lr=0.05", "data.num_train=64", "training.global_batch_size=16", *more,
    ]  # fmt: skip


@cache
def plain(kind: type[nn.Module]) -> list[float]:
    """The losses of a script that a user would write."""
    torch.manual_seed(0)
    model, rows, losses = kind(), Rows("train"), []
    optimizer = (Fused if kind is Decays else torch.optim.SGD)(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=kind is Overflows)
    for indices in torch.randperm(64, generator=torch.Generator().manual_seed(0)).split(16):
        value = loss(model, default_collate([rows[i] for i in indices.tolist()]))
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def outcomes(cases: list[list[str]]) -> list[list[float] | str]:
    """The losses of each case, or the message that refuses it."""
    results: list[list[float] | str] = []
    for case in cases:
        try:
            results.append(train_all([case])[0][0])
        except UserError as error:
            results.append(str(error))
    return results


FUNCTIONAL = r"blocks\.1{} is called with another tensor as blocks\.1\.inner\.weight.*functional_call, but {}.*ddp"
OUTSIDE = r"fsdp1: (blocks\.\d\.inner|head)\.\w+ is used outside of its unit \(.*test_odd_uses\.py:\d+: .*\), but"
IN_16_BITS = r"param_dtype={}: .* \(.*test_odd_uses\.py:\d+: .*\)\. PyTorch does not compute this.*\(x\.float\(\)\)"
WIDENED = r"storage_dtype=bfloat16: .* \(.*test_odd_uses\.py:\d+: return .*\)\. .* forward makes another: cast it there"
# A model and a setting: how it is refused; None: it trains as the plain loop.
CASES: list[tuple[type[nn.Module], str, str | None]] = [
    (Functional, f"{DDP}", None),
    (Functional, f"{ROOT} {ALWAYS}", None),
    (Functional, f"{ROOT} {FSDP1}", FUNCTIONAL.format(r"\.inner", "FSDP1")),
    (Functional, f"{BLOCK} {NEVER}", FUNCTIONAL.format("", "FSDP2")),
    (Functional, f"{BLOCK} {FSDP1}", FUNCTIONAL.format("", "FSDP1")),
    (Recurrent, DDP, None),
    (Recurrent, f"{BLOCK} {ALWAYS}", None),
    (Recurrent, f"{LAYER} {RECOMPUTED}", None),
    (Recurrent, f"{ROOT} {ALWAYS}", None),
    (Recurrent, f"{BLOCK} {FSDP1}", None),
    (Forces, DDP, None),
    (Forces, f"{ROOT} {ALWAYS}", None),
    (Forces, f"{BLOCK} {ALWAYS}", None),
    (Forces, f"{BLOCK} {NEVER} training.grad_accum_steps=2", None),
    (Forces, f"{BLOCK} {ALWAYS} {RECOMPUTED}", None),
    (Forces, f"{BLOCK} sharding.embeddings=own", None),
    (Forces, f"{LAYER} {ALWAYS} training.max_grad_norm=100", None),
    (Forces, f"{BLOCK} {FSDP1}", None),
    (Penalised, DDP, None),
    (Penalised, f"{ROOT} {FSDP1}", None),
    (Penalised, f"{BLOCK} {FSDP1}", OUTSIDE),
    (Penalised, f"{ROOT} {NEVER}", None),
    (
        Penalised,
        f"{BLOCK} {ALWAYS}",
        r"a weight of a unit is used outside of it \(.*: return .*, but FSDP2",
    ),
    (AddsWeights, f"{LAYER} {FSDP1}", OUTSIDE),
    (AddsWeights, f"{ROOT} {FSDP1}", None),
    (Uses, f"{BLOCK} {FSDP1}", None),
    (AddsWrites, f"{BLOCK} {FSDP1}", OUTSIDE),
    (Merges, f"{BLOCK} {FSDP1}", OUTSIDE),
    (Merges, f"{ROOT} {FSDP1}", OUTSIDE),
    (
        TwoHeads,
        DDP,
        "sharding=ddp: a parameter is ready twice in one step, as where a loss calls the model twice",
    ),
    (TwoHeads, ROOT, None),
    (Overflows, f"{DDP} {SCALED}", None),
    (Overflows, f"{BLOCK} {SCALED} training.max_grad_norm=100", None),
    (Overflows, f"{LAYER} {FSDP1} {SCALED}", None),
    (Decays, f"{BLOCK} {SCALED}", None),
    (
        Decays,
        f"{BLOCK} {FSDP1} {SCALED}",
        r"Fused is fused, .*true and sharding\.api=fsdp1: .*optimizer\.fused=",
    ),
    (TwoHeads, f"{BLOCK} {ALWAYS}", None),
    (TwoHeads, f"{BLOCK} {FSDP1}", None),
    *((Widens, f"{sharding} precision=bf16_pure", WIDENED) for sharding in (DDP, ROOT)),
    (Spectral, f"{ROOT} precision=bf16_mixed", IN_16_BITS.format("bfloat16")),
    (Spectral, f"{BLOCK} precision=fp16", IN_16_BITS.format("float16")),
    (Inverts, f"{BLOCK} {FSDP1} precision=bf16_mixed", IN_16_BITS.format("bfloat16")),
    (Net, f"{BLOCK} {FSDP1} {RECOMPUTED} memory_profile=peaks", None),
    (Net, f"{LAYER} {FSDP1} {NEVER}", None),
    (Net, f"{LAYER} {RECOMPUTED} reshard_after_forward=to_size reshard_after_forward.size=2", None),
]


def test_odd_uses_train_as_plain_loops_or_are_refused() -> None:
    cases = [words(kind, *setting.split()) for kind, setting, _ in CASES]
    got: list[Any] = run_ranks(2, outcomes, cases)
    for (kind, setting, refused), first, second in zip(CASES, *got, strict=True):
        if refused is None:
            assert first == second == pytest.approx(plain(kind), rel=1e-6), (kind, setting)
        else:
            assert re.search(refused, str(first)) and re.search(refused, str(second)), (setting, first, second)
