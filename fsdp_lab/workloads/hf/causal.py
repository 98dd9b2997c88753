"""Detects a model that sees the tokens it is to predict: encoders are among the causal models of transformers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger(__name__)
# A model of these sizes attends as one of its own: by whichever names its configuration has.
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip
_WIDTHS = (
    "hidden_size", "d_model", "n_embd", "emb_dim", "intermediate_size",
    "embedding_size", "input_embedding_size", "output_embedding_size",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
_SMALL = {**dict.fromkeys(_LAYERS, 1), **dict.fromkeys(_WIDTHS, 32), **dict.fromkeys(_HEADS, 2), "d_head": 16}
_MOST_PARAMS = 50_000_000  # one that is larger is not built: its sizes have other names
_TOKENS = 8
_ROUNDING = 1e-5  # of the largest logit; a token that is attended to changes them by more


def sees_later_tokens(config: Any, build: Callable[[Any], Any]) -> bool:
    """Return whether a model's logits depend on later tokens, measured on a small model of the same kind.

    If no small model can be built, a configuration with `is_decoder=False` counts as True.

    Args:
        config: of a model of any size.
        build: makes the model to train from a configuration.
    """
    try:
        small = _shrunk(config)
        if sum(parameter.numel() for parameter in _on_meta(small, build).parameters()) <= _MOST_PARAMS:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
                torch.manual_seed(0)
                return _depends(build(small).eval(), small)
    except Exception as error:  # noqa: BLE001 (each model raises what it likes)
        _log.debug("no small %s could be tried: %s", config.model_type, error)
    if getattr(config, "is_decoder", None) is not False:
        return False
    try:
        return not _on_meta(copy.deepcopy(config), build).config.is_decoder  # decoders of pairs set it themselves
    except Exception:  # noqa: BLE001 (it is said when its sizes are checked)
        return False


def _on_meta(config: Any, build: Callable[[Any], Any]) -> Any:
    with torch.device("meta"):
        return build(config)


def _shrunk(config: Any) -> Any:
    values = {name: size for name, size in _SMALL.items() if hasattr(config, name)}
    known = copy.deepcopy(config.to_dict())
    if isinstance(known.get("layer_types"), list):
        known["layer_types"] = known["layer_types"][:1]
    known.pop("head_dim", None)
    return type(config).from_dict({**known, **{config.attribute_map.get(name, name): values[name] for name in values}})


def _depends(model: Any, config: Any) -> bool:
    """Whether the logits of the first tokens change when the last token does."""
    size = config.get_text_config().vocab_size
    tokens = torch.arange(_TOKENS)[None] % size
    other = tokens.clone()
    other[0, -1] = (_TOKENS + 1) % size
    one, two = (model(input_ids=rows).logits[:, :-1] for rows in (tokens, other))
    return bool((one - two).abs().max() > _ROUNDING * one.abs().max())
