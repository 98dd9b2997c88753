"""Models of transformers: which configurations are taken, and that ours compute what transformers alone computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_lab.config import UserError
from fsdp_lab.config.rules import check_files, check_trial
from fsdp_lab.training.parallel.base import whole
from fsdp_lab.training.parallel.tensor import apply_tensor_parallel
from fsdp_lab.workloads.build import build_model_spec
from fsdp_lab.workloads.hf import library
from fsdp_lab.workloads.hf.configuration import read_config
from fsdp_lab.workloads.hf.hf_private import NAMES
from fsdp_lab.workloads.hf.models import causal_lm
from tests.ranks import config, run_ranks
from tests.workloads.hf.cases import CONFIGS, WORDS, plain_model

GPT2, LLAMA, QWEN = (json.loads((CONFIGS / f"{name}.json").read_text()) for name in ("gpt2", "llama", "qwen3"))


def check(name: str, *words: str) -> None:
    trial = config(*WORDS[name], *words)
    check_trial(trial, 2)
    check_files(trial)


def test_other_keys_are_values_of_the_configuration() -> None:
    """By the name that the file has, or by the common one; the types of layers follow their number."""
    assert read_config(GPT2, {"n_layer": 3}).n_layer == read_config(GPT2, {"num_hidden_layers": 3}).n_layer == 3
    assert read_config(LLAMA, {"rope_parameters": {"rope_theta": 5e5}}).rope_parameters["rope_theta"] == 5e5
    qwen = read_config(QWEN, {}).to_dict()
    assert qwen["layer_types"] == ["full_attention", "sliding_attention"]
    assert read_config(qwen, {"num_hidden_layers": 1}).layer_types == ["full_attention"]
    model: Any = build_model_spec(config(*WORDS["llama"], "model.num_hidden_layers=3").model).build()
    assert len(model.model.layers) == 3 and LLAMA["dtype"] == "bfloat16"
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}


def test_an_encoder_is_refused_unless_it_is_a_decoder() -> None:
    """And causal models of transformers' own sizes are taken, two of which say is_decoder=False."""
    for name in ("bert", "roberta", "big_bird", "xmod"):
        with pytest.raises(UserError, match=rf"{name}.* attends to later tokens, .* use model.is_decoder=true"):
            causal_lm.check({"model_type": name})
        causal_lm.check({"model_type": name}, is_decoder=True)
    for name in ("gpt_neox", "bart", "mixtral", "mamba", "gemma3"):
        causal_lm.check(transformers.CONFIG_MAPPING[name]().to_dict())


def test_a_tensor_parallel_plan_is_that_of_transformers() -> None:
    """In our words; the layers of a fused projection get and give whole rows."""
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    between = {f"{attention}.{name}_proj": "colwise" for name in "qkv"} | {f"{attention}.o_proj": "rowwise"}
    between |= {f"{mlp}.{name}_proj": "colwise" for name in ("gate", "up")} | {f"{mlp}.down_proj": "rowwise"}
    plan = {"lm_head": "loss_parallel", "model.embed_tokens": "rowwise", **between}
    assert causal_lm.tp_plan(LLAMA) == plan
    assert causal_lm.tp_plan(QWEN) == plan | {f"{attention}.{name}_norm": "heads" for name in "qk"}
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "pad_token_id": 0}
    fused = causal_lm.tp_plan({"model_type": "phi3", **sizes})
    assert fused[f"{mlp}.gate_up_proj"] == "colwise_gathered" and fused[f"{mlp}.down_proj"] == "rowwise_split"
    assert causal_lm.tp_plan(GPT2) == {}
    with pytest.raises(UserError, match=r"divides model.layers.*.experts.* by packed_colwise, .* with model.tp_plan"):
        causal_lm.tp_plan({"model_type": "mixtral", **sizes})


def test_a_plan_that_gathers_heads_takes_a_degree_that_does_not_divide_them(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
    file.write_text(json.dumps({"model_type": "phi3", **sizes, "num_attention_heads": 6}))
    words = ("task=language", "model=hf_causal_lm", f"model.config={file}", "data.vocab_size=64")
    check_trial(config(*words, "data=synthetic_tokens", "sharding=per_block", "sharding.tp=4"), 4)
    with pytest.raises(UserError, match=r"tp=3 does not divide .*use one of 1\."):
        check_trial(config(*words, "data=synthetic_tokens", "sharding=per_block", "sharding.tp=3"), 3)


def gradients_of_norms(divided: bool) -> dict[str, torch.Tensor]:
    """Of Qwen3's heads, alone or with its layers divided among the ranks."""
    torch.manual_seed(0)
    model: Any = causal_lm(QWEN)
    if divided:
        apply_tensor_parallel(model, causal_lm.tp_plan(QWEN), init_device_mesh("cpu", (dist.get_world_size(),)))
    tokens = torch.arange(32).view(2, 16)
    with loss_parallel():
        whole(torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten())).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if "_norm.weight" in name}


@pytest.mark.ci
def test_norms_of_heads_have_the_gradients_of_all_heads() -> None:
    expected = gradients_of_norms(divided=False)
    for got in run_ranks(2, gradients_of_norms, True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-9)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration.Mine", "AutoModelForCausalLM": "modeling.Mine"}
    file = tmp_path / "config.json"
    (tmp_path / "configuration.py").write_text("raise SystemExit(3)\n")
    file.write_text(json.dumps(GPT2 | {"model_type": "gpt22", "auto_map": auto_map}))
    with pytest.raises(UserError, match=r"model_type=gpt22 is not one of transformers .* did you mean gpt2\? .*is off"):
        check("gpt2", f"model.config={tmp_path}")
    file.write_text(json.dumps(GPT2 | {"auto_map": auto_map}))
    check("gpt2", f"model.config={tmp_path}")


def test_an_attention_that_may_be_code_of_the_hub_is_refused() -> None:
    """In a file: a row of tests/messages.txt."""
    values = GPT2 | {"attn_implementation": "kernels-community/flash-attn2"}
    message = r"\w*attn_implementation\w*=\S* is not an attention of PyTorch, and code from the hub is not run; use"
    with pytest.raises(UserError, match=rf"below model\.config: {message}"):
        read_config(values, {})


def test_what_is_not_on_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no-one/nothing cannot be read .* hf download no-one/nothing --local-dir"):
        check("gpt2", "model.config=no-one/nothing")
    monkeypatch.setitem(sys.modules, "transformers", None)
    library.transformers.cache_clear()
    with pytest.raises(UserError, match=r"need the package transformers, .*pip install -e '\.\[hf\]'"):
        check("gpt2")
    library.transformers.cache_clear()


def test_transformers_has_each_private_name_as_we_use_it() -> None:
    assert {name.name: lacks for name in NAMES if (lacks := name.lacks()) is not None} == {}


@pytest.mark.parametrize("kind", ["padded", "packed", "full"])
def test_padded_and_packed_rows_have_the_logits_of_transformers(kind: str) -> None:
    """With a mask of the model's own, too: a window in its second layer."""
    plain, ours = plain_model("qwen3"), causal_lm(QWEN)
    ours.load_state_dict(plain.state_dict())
    tokens = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :8] = 0  # padded on the left
    packs = torch.cat([torch.arange(6), torch.arange(10)])[None].expand(2, -1)
    given = {"padded": {"attention_mask": mask}, "packed": {"position_ids": packs}}.get(kind, {})
    counts = mask.bool() if kind == "padded" else torch.ones_like(mask).bool()
    for of_rows in (given, {}, given):  # what one call is given does not change another
        with torch.no_grad():
            got, expected = (model.eval()(tokens, use_cache=False, **of_rows).logits for model in (ours, plain))
        torch.testing.assert_close(got[counts], expected[counts])
