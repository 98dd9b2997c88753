"""Logits equal those of transformers alone: of models with masks of their own, of padded rows and of packed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from fsdp_lab.workloads.hf.models import causal_lm

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
WINDOW = {"model_type": "mistral", **SIZES, "sliding_window": 4}
SPARSE = {
    "model_type": "deepseek_v32", **SIZES, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 4, "index_n_heads": 2,
    "index_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
TOKENS = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))


def both(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return our model and that of transformers alone, with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {name: value for name, value in config.items() if name != "model_type"}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values), dtype=torch.float32)
    ours: Any = causal_lm(config)
    ours.load_state_dict(plain.state_dict())
    return ours.eval(), plain.eval()


def logits(model: Any, **given: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(TOKENS, use_cache=False, **given).logits
    return result


def left_padded() -> Tensor:
    mask = torch.ones_like(TOKENS)
    mask[0, :8] = 0
    return mask


def packed() -> Tensor:
    return torch.cat([torch.arange(6), torch.arange(10)])[None].expand(2, -1)


@pytest.mark.parametrize("config", [LLAMA, WINDOW, SPARSE], ids=lambda config: config["model_type"])
def test_full_rows_padded_ones_and_packed_ones_have_the_logits_of_transformers(config: dict[str, Any]) -> None:
    ours, plain = both(config)
    mask = left_padded()
    full = logits(ours)
    torch.testing.assert_close(full, logits(plain))
    padded = logits(ours, attention_mask=mask)
    torch.testing.assert_close(padded[mask.bool()], logits(plain, attention_mask=mask)[mask.bool()])
    assert (padded - full)[0, 8:].abs().max() > 1e-3  # the mask hides something
    in_packs = logits(ours, position_ids=packed())
    torch.testing.assert_close(in_packs, logits(plain, position_ids=packed()))
    assert (in_packs - full)[:, 6:].abs().max() > 1e-3
    torch.testing.assert_close(logits(ours), full)  # as before
