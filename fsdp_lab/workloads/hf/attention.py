"""Attention whose masks do not depend on values.

transformers reads a mask's values, to skip a mask that masks nothing. This synchronizes a GPU in each forward pass.
Under fake tensors it cannot read them, and builds the mask, so a forecast would hold more than training does. Both
names below are PyTorch's attention; they differ in what is known about masks.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

from fsdp_lab.workloads.hf.hf_private import attention_of, attention_parts
from fsdp_lab.workloads.hf.library import transformers

UNPADDED = "fsdp_lab_unpadded"  # rows are full: a causal model needs no mask but its own
PADDED = "fsdp_lab_padded"  # a mask that is given masks something
_ASKS = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")


def use(model: Any, name: str) -> None:
    """Switch a model that uses PyTorch's attention to one of our names for it.

    Other models are unchanged: those with another attention, and those with code that checks for the name `sdpa`, which
    would skip their own masks.
    """
    if attention_of(model) == "sdpa" and not _asks_for_name(model):
        _register()
        model.set_attn_implementation(name)


def change(model: Any, name: str) -> None:
    """Switch a model that uses one of our names to this one. Other models are unchanged."""
    if attention_of(model) in {UNPADDED, PADDED} - {name}:
        model.set_attn_implementation(name)


def _asks_for_name(model: Any) -> bool:
    modules = {type(module).__module__ for module in model.modules()}
    ours = (sys.modules[name] for name in sorted(modules) if name.startswith("transformers.models."))
    return any(_ASKS.search(inspect.getsource(module)) for module in ours)


@cache
def _register() -> None:
    library = transformers()
    attend, sdpa_mask = attention_parts()

    def without_padding(**options: Any) -> Any:
        return sdpa_mask(**{**options, "attention_mask": None})

    def with_padding(**options: Any) -> Any:
        if options.get("attention_mask") is not None:
            options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(**options)

    for name, mask in ((UNPADDED, without_padding), (PADDED, with_padding)):
        library.AttentionInterface.register(name, attend)
        library.AttentionMaskInterface.register(name, mask)
