"""Models of twenty blocks, equal or not, or not used equally. They import nothing of fsdp_lab."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, split: str = "train") -> None:
        self.items = torch.linspace(-1, 1, 32 * 24 * 64).view(32, 24, 64)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index], index % 10


class Block(nn.Module):
    def __init__(self, place: int, wide: int = 128) -> None:
        super().__init__()
        self.place = place
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, wide), nn.Linear(wide, 64)
        self.act = partial(torch.nn.functional.gelu, approximate="tanh")  # equal, but another object in each block

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(self.act(self.up(self.norm(rows))))


class Equal(nn.Module):
    """Rows of 64 -> ten classes."""

    def __init__(self, depth: int = 20) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(self.block(place) for place in range(depth))
        self.head = nn.Linear(64, 10)

    def block(self, place: int) -> nn.Module:
        return Block(place)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows.mean(1))


class Alternating(Equal):
    """Every second block is wider."""

    def block(self, place: int) -> nn.Module:
        return Block(place, 128 + 64 * (place % 2))


class OneWider(Equal):
    def block(self, place: int) -> nn.Module:
        return Block(place, 256 if place == 10 else 128)


class OneScaled(Equal):
    """One block has another attribute, which its forward pass does not read."""

    def block(self, place: int) -> nn.Module:
        block = Block(place)
        block.scale = 2.0 if place == 10 else 1.0
        return block


class Tied(Equal):
    """The blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = self.blocks[0].up


class Tapped(Equal):
    """The head sees what several blocks return."""

    def forward(self, rows: Tensor) -> Tensor:
        rows, seen = self.embed(rows), []
        for place, block in enumerate(self.blocks):
            rows = block(rows)
            if place in (3, 9, 15):
                seen.append(rows)
        return self.head(torch.stack([rows, *seen]).mean((0, 2)))


class Jumping(Equal):
    """One block gets what an earlier one returned: the same operators, other arguments."""

    def forward(self, rows: Tensor) -> Tensor:
        rows, seen = self.embed(rows), [rows]
        for place, block in enumerate(self.blocks):
            rows = block(seen[-3] if place == 10 else rows)
            seen = [*seen[-3:], rows]
        return self.head(rows.mean(1))


class Keeping(Equal):
    """Holds what one block returns until the next step."""

    kept: Any = None

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for place, block in enumerate(self.blocks):
            rows = block(rows)
            if place == 12:
                self.kept = rows
        return self.head(rows.mean(1))


class Twice(Equal):
    """One block runs twice."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for place, block in enumerate(self.blocks):
            rows = block(rows)
            rows = block(rows) if place == 11 else rows
        return self.head(rows.mean(1))


class ByLength(Equal):
    """Divides by the number of its blocks, and knows the last one."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for place, block in enumerate(self.blocks):
            rows = block(rows) / len(self.blocks)
            rows = (rows.float() * 2).to(rows.dtype) if place == len(self.blocks) - 1 else rows
        return self.head(rows.mean(1))


class Hooked(Equal):
    """Changes the gradient of what one block returns, of which a forward pass shows nothing."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for place, block in enumerate(self.blocks):
            rows = block(rows)
            if place == 12 and rows.requires_grad:
                rows.register_hook(lambda gradient: gradient.clamp(-1, 1) * 2)
        return self.head(rows.mean(1))


class OfTheDevice(Equal):
    """Keeps more of one block where it trains for real: nothing of it shows on `meta`."""

    kept: Any = None

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for place, block in enumerate(self.blocks):
            rows = block(rows)
            if place == 3 and rows.device.type != "meta":
                self.kept = rows
        return self.head(rows.mean(1))


class PartlyFrozen(Equal):
    """Half of the blocks compute without gradients, as in finetuning."""

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            rows = self.embed(rows)
            for block in self.blocks[:10]:
                rows = block(rows)
        for block in self.blocks[10:]:
            rows = block(rows)
        return self.head(rows.mean(1))


class PartlyRecomputed(Equal):
    """Checkpoints half of its blocks by itself."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for place, block in enumerate(self.blocks):
            rows = checkpoint(block, rows, use_reentrant=False) if place >= 10 else block(rows)
        return self.head(rows.mean(1))


class PartlyCast(Equal):
    """Enters autocast for half of its blocks."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for place, block in enumerate(self.blocks):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=place >= 10):
                rows = block(rows)
            rows = rows.float()
        return self.head(rows.mean(1).to(self.head.weight.dtype))


class Dropping(Block):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().forward(rows), 0.1, self.training)


class PartlyTraining(Equal):
    """Keeps some of its blocks in evaluation mode."""

    def block(self, place: int) -> nn.Module:
        return Dropping(place)

    def train(self, mode: bool = True) -> PartlyTraining:
        super().train(mode)
        for block in self.blocks[8:]:
            block.eval()
        return self


def wide(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
    return tensor.double(), tensor.dtype


def narrow(kept: tuple[Tensor, torch.dtype]) -> Tensor:
    return kept[0].to(kept[1])


class PartlyPacked(Equal):
    """Keeps what half of its blocks need for the backward pass in another type."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.embed(rows)
        for place, block in enumerate(self.blocks):
            if place >= 10:
                with torch.autograd.graph.saved_tensors_hooks(wide, narrow):
                    rows = block(rows)
            else:
                rows = block(rows)
        return self.head(rows.mean(1))


class Nested(nn.Module):
    """The blocks are called by a module inside, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Equal()

    def forward(self, rows: Tensor) -> Tensor:
        return self.trunk(rows) * 2


class TwoStacks(nn.Module):
    """A stack of twenty blocks, and one of twelve of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Equal(20), Equal(12)

    def forward(self, rows: Tensor) -> Tensor:
        return self.first(rows) + self.second(rows)
