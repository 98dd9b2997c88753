"""A block that saves tensors of many kinds for its backward pass, and what its hooks copy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.training import blocks
from tests.operators import Operators
from tests.ranks import config


class Block(nn.Module):
    """It saves views of one projection, expanded and transposed tensors, a mask of bytes, a buffer, and what is too
    small. One tensor is changed in place after it was saved."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place  # which no gradient survives if the tensor itself is saved
        self.project, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.register_buffer("scale", torch.rand(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(1, 64, 4, 8).transpose(1, 2) for part in self.project(x).split(32, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(64, 32)
        x = attended * x.mean(0).detach().expand(64, 32)
        total = x.clone()
        first = total * x.sin()
        total = total.add_(1) if self.in_place else total + 1
        second = total * x.cos()
        chosen = torch.where(x > 0, first, second)
        chosen = chosen * self.scale
        return self.out(chosen.t().contiguous().t() * x.mean().expand(64, 32))


def followed(where: str, checkpointing: str) -> tuple[list[Tensor], list[int]]:
    """The output of a block and its gradients, and the bytes of each copy in its forward pass."""
    torch.manual_seed(0)
    block, copies = Block(in_place=(where, checkpointing) == ("cpu", "none")), list[int]()
    blocks.apply_to_blocks(
        block, (Block,), [], config(f"activation_offload={where}", f"activation_checkpointing={checkpointing}")
    )
    x = torch.randn(64, 32, requires_grad=True)

    def note(name: str, args: Any, result: Any) -> None:
        if name == "aten::copy_":
            copies.append(args[0].untyped_storage().nbytes())

    with Operators(note):
        out = block(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in block.parameters())], copies
