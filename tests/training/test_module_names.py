"""Which of the modules at work is meant, and what it is called where several hold it."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_lab.training.module_names import ModuleNames, plain_name


class Block(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"rotary": rotary, "proj": nn.Linear(1, 1)})


class Net(nn.Module):
    """Two blocks with one rotary embedding; a table of the model's own is in a part, too."""

    def __init__(self) -> None:
        super().__init__()
        rotary = nn.Sequential(nn.Identity())
        self.blocks = nn.ModuleList([Block(rotary), Block(rotary)])
        self.table = nn.Identity()
        self.part = nn.ModuleDict({"words": self.table})


ROTARY = "Net.blocks.1.attention.rotary"  # as PyTorch's tracker calls it: by the last that holds it


@pytest.mark.parametrize(
    ("entered", "expected"),
    [
        (["Net"], ""),
        (["Net", "Net.blocks.0", "Net.blocks.0.attention.proj"], "blocks.0.attention.proj"),
        (["Net", "Net.blocks.0", "Net.blocks.0.attention", ROTARY], "blocks.0.attention.rotary"),
        (["Net", "Net.blocks.0", f"{ROTARY}.0"], "blocks.0.attention.rotary.0"),
        # As a backward pass leaves them: an outer one of the block before is still open.
        (["Net", "Net.blocks.0", "Net.blocks.1.attention", ROTARY], "blocks.1.attention.rotary"),
        (["Net", "Net.blocks.1", "Net.blocks.0", ROTARY], "blocks.0.attention.rotary"),
        (["Net", ROTARY], "rotary"),
        (["Net", "Net.part.words"], "table"),
        (["Net", "Net.part", "Net.part.words"], "part.words"),
        ([], ""),
    ],
)
def test_a_module_is_called_as_the_one_that_uses_it_calls_it(entered: list[str], expected: str):
    names, at_work, result = ModuleNames(Net()), set[str](), ""
    for name in entered:
        at_work.add(name)
        result = names.innermost(at_work)
    assert result == expected


def test_a_module_that_the_user_calls_module_keeps_its_name():
    assert plain_name("module.blocks.0.module.weight") == "blocks.0.module.weight"
