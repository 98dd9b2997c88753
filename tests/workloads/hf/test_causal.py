"""A model that is to predict tokens does not see them, or is refused: some of transformers' causal models are encoders
unless their configuration says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fsdp_lab.config import UserError
from fsdp_lab.workloads.hf.models import causal_lm
from tests.workloads.hf.cases import CONFIGS
from tests.workloads.hf.test_configuration import check

# Of transformers' own sizes: what is asked about a model does not build it.
ENCODERS = ("bert", "roberta", "electra", "big_bird", "xmod")
CAUSAL = ("gpt_neox", "bart", "opt", "mixtral", "mamba", "gemma3")  # two of them say is_decoder=False


def values(name: str, **others: Any) -> dict[str, Any]:
    return transformers.CONFIG_MAPPING[name](**others).to_dict()


def moved(model: Any) -> float:
    """How far the last of eight tokens moves the logits of those before it."""
    rows = torch.randint(4, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    rows[1, :-1] = rows[0, :-1]
    with torch.no_grad():
        one, two = model.eval()(input_ids=rows).logits[:, :-1]
    return float((one - two).abs().max())


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 256,
}  # fmt: skip


def test_an_encoder_is_refused_and_its_decoder_sees_no_later_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values("bert", **SMALL)))
    assert moved(causal_lm(str(tmp_path))) > 1e-5 and moved(causal_lm(str(tmp_path), is_decoder=True)) < 1e-6
    typed = f"model.config={tmp_path}"
    message = (
        f"^{typed}: bert attends to later tokens, so it sees the tokens that it must predict; "
        "use model.is_decoder=true, or a causal model such as gpt2 or llama.$"
    )
    with pytest.raises(UserError, match=message):
        check("gpt2", typed)
    check("gpt2", typed, "model.is_decoder=true")


def test_encoders_of_full_size_are_refused() -> None:
    for name in ENCODERS:
        with pytest.raises(UserError, match=rf"{name}.* attends to later tokens, .* use model.is_decoder=true"):
            causal_lm.check(values(name))
        causal_lm.check(values(name), is_decoder=True)


def test_causal_models_of_full_size_are_taken() -> None:
    for name in CAUSAL:
        causal_lm.check(values(name))


def test_the_models_of_our_tests_see_no_later_token() -> None:
    for name in ("gpt2", "llama", "qwen3"):
        assert moved(causal_lm(f"{CONFIGS}/{name}.json")) < 1e-6
