"""Every name of transformers that its manual does not document; `tests/workloads/test_transformers.py` checks each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_lab.machine.private import Name
from fsdp_lab.workloads.hf.library import transformers

NAMES = (
    Name("transformers.conversion_mapping", "get_model_conversion_mapping", ("model",)),
    Name("transformers.core_model_loading", "WeightRenaming"),
    Name("transformers.core_model_loading", "WeightConverter"),
    Name(
        "transformers.core_model_loading", "rename_source_key",
        ("source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"),
    ),
    Name("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    Name(
        "transformers.masking_utils", "sdpa_mask",
        ("attention_mask", "allow_is_causal_skip", "allow_is_bidirectional_skip"),
    ),
    Name("transformers", "PreTrainedModel._keys_to_ignore_on_load_unexpected"),
    Name("transformers", "PreTrainedConfig._attn_implementation"),
)  # fmt: skip


def attention_of(model: Any) -> str:
    return str(model.config._attn_implementation)


def superfluous(model: Any) -> tuple[str, ...]:
    """Return the patterns of tensors that a model's files may have in addition to its own."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


def attention_parts() -> tuple[Any, Any]:
    """Return transformers' wrapper of PyTorch's attention, and the function that makes its mask."""
    transformers()
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    return sdpa_attention_forward, sdpa_mask


def renamer(model: Any, state: Mapping[str, Any]) -> Any:
    """Return a function from a stored tensor's name to the model's name for it and a converter.

    The converter is None for a tensor that is stored as the model holds it.
    """
    transformers()
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    others = [change for change in changes if isinstance(change, WeightConverter)]
    return lambda name: rename_source_key(name, renamings, others, model.base_model_prefix, dict(state))
