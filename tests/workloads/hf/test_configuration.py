"""What is typed below `model` for a model of transformers is a value of its configuration, or is refused before Ray
starts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from fsdp_lab.config import UserError, with_custom
from fsdp_lab.config.rules import check_files, check_trial
from fsdp_lab.training.__main__ import read_config as read_words
from fsdp_lab.workloads.build import build_model_spec
from fsdp_lab.workloads.hf import library
from fsdp_lab.workloads.hf.configuration import read_config
from fsdp_lab.workloads.hf.weights import load_whole
from tests import forked
from tests.ranks import config
from tests.workloads.hf.cases import CONFIGS, WORDS
from tests.workloads.language.test_config import composed

GPT2, LLAMA, QWEN, T5 = (str(CONFIGS / f"{name}.json") for name in ("gpt2", "llama", "qwen3", "t5"))


def test_other_keys_are_values_of_the_configuration(tmp_path: Path) -> None:
    """By the name that the file has, or by the common one."""
    assert read_config(GPT2, {"n_layer": 3}).n_layer == read_config(GPT2, {"num_hidden_layers": 3}).n_layer == 3
    (tmp_path / "config.json").write_text(Path(LLAMA).read_text())
    assert read_config(str(tmp_path), {"rope_parameters": {"rope_theta": 5e5}}).rope_parameters["rope_theta"] == 5e5
    model = build_model_spec(config(*WORDS["gpt2"], "model.num_hidden_layers=3").model).build()
    assert len(model.transformer.h) == 3  # type: ignore[union-attr,arg-type]


def test_the_types_of_layers_follow_their_number(tmp_path: Path) -> None:
    assert read_config(QWEN, {}).layer_types == ["full_attention", "sliding_attention"]
    written = tmp_path / "config.json"
    written.write_text(json.dumps(read_config(QWEN, {}).to_dict()))
    assert read_config(str(tmp_path), {"num_hidden_layers": 1}).layer_types == ["full_attention"]
    assert len(read_config(str(tmp_path), {"num_hidden_layers": 3}).layer_types) == 3


def test_a_model_of_transformers_is_float32_and_trains_on_text_by_itself() -> None:
    model = build_model_spec(config(*WORDS["llama"]).model).build()
    assert json.loads(Path(LLAMA).read_text())["dtype"] == "bfloat16"
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert with_custom(["model=hf_causal_lm"]) == ["task=language", "data=pydoc", "model=hf_causal_lm"]


def test_random_tokens_are_those_of_the_configuration() -> None:
    words = ["model=hf_causal_lm", f"model.config={QWEN}", "data=synthetic_tokens"]
    size = json.loads(Path(QWEN).read_text())["vocab_size"]
    for typed, known in (([], size), (["model.vocab_size=300"], 300), (["data.vocab_size=7"], 7)):
        for trial in (composed(*words, *typed), read_words(None, [*words, *typed])):
            assert trial.data.to_keys()["vocab_size"] == known  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"Identity has no key model\.vocab_size, .* set data\.vocab_size=<number>"):
        composed("task=language", "model._target_=torch.nn.Identity", "data=synthetic_tokens")
    with pytest.raises(UserError, match=r"model\.config=./none: there is no file none"):
        composed("model=hf_causal_lm", "model.config=./none", "data=synthetic_tokens")


def check(name: str, *words: str) -> None:
    trial = config(*WORDS[name], *words)
    check_trial(trial, 2)
    check_files(trial)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("gpt2", ["model.config=null"], "model.config is not set; give a folder"),
        ("gpt2", ["model.config=./none"], r"model.config=./none: there is no file none; give a folder"),
        ("gpt2", [f"model.config={CONFIGS}"], "there is no file .*/config.json; give a folder"),
        ("gpt2", [f"model.config={__file__}"], "is not a valid JSON file.*; give another file"),
        ("gpt2", ["model.num_layer=3"], r"has no key num_layer. Did you mean model.n_layer\? Its keys"),
        ("gpt2", ["model.model_type=llama"], "has no key model_type"),
        ("gpt2", ["model.n_layer=two"], "model.n_layer=two: .*expected int, got str"),
        ("gpt2", ["model.n_embd=33"], "model.n_embd=33: .*must be divisible by"),
        ("gpt2", ["model.pretrained=maybe"], "model.pretrained=maybe is a str; use true or false"),
        ("gpt2", [f"model.config={CONFIGS}/t5.json"], "t5 is not a causal language model; use model=hf_seq"),
        ("gpt2", ["model.vocab_size=100"], "model.vocab_size=100 is less than the 256 tokens of data"),
        ("gpt2", ["data.seq_len=33"], "data.seq_len=33 is more than the model's 32 positions; use"),
        ("gpt2", ["task.loss_chunks=2"], "task.loss_chunks=2: models of transformers compute all logits at once"),
        ("vit", ["model.num_labels=2"], "model.num_labels=2 is less than the 10 classes of data=digits; use model.n"),
        ("t5", ["task=model_loss", "task.loss=null"], "seq2seq does not compute a loss; use task=seq2seq"),
        ("t5", ["task=language", "task.loss=null"], "seq2seq is for pairs of texts, task=language is for tokens"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_in_one_message(name: str, words: list[str], message: str) -> None:
    check(name)
    with pytest.raises(UserError, match=message):
        check(name, *words)


def test_a_language_model_trains_on_no_images() -> None:
    words = [word for word in WORDS["gpt2"] if not word.startswith("data.")]
    with pytest.raises(UserError, match=r"causal_lm is for tokens, data._target_=.*Digits is for im"):
        check_trial(config(*words, "task=classification", "data=digits"), 2)


BART = {
    "model_type": "bart", "vocab_size": 384, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "max_position_embeddings": 32,
}  # fmt: skip


def test_a_t5_without_a_folder_has_no_weights_and_names_its_keys() -> None:
    with pytest.raises(UserError, match=r"but model\.config has the values of a configuration; use"):
        check_files(config("task=seq2seq", "model.pretrained=true"))
    with pytest.raises(UserError, match=r"the configuration below model\.config \(t5\) has no key d_modl\. Did you"):
        check_trial(config("task=seq2seq", "model.d_modl=32"), 2)


def check_pairs(folder: Path, values: dict[str, Any], *words: str) -> None:
    (folder / "config.json").write_text(json.dumps(values))
    trial = config("task=seq2seq", "data=pydoc_summaries", "model=hf_seq2seq", f"model.config={folder}", *words)
    check_trial(trial, 2)
    check_files(trial)


def test_pairs_are_no_longer_than_the_positions_of_a_model(tmp_path: Path) -> None:
    check_pairs(tmp_path, BART, "data.source_len=32", "data.target_len=32")
    for words in (["data.source_len=33", "data.target_len=8"], ["data.source_len=8", "data.target_len=33"]):
        name = next(word for word in words if "33" in word)
        with pytest.raises(UserError, match=f"{name} is more than the model's 32 positions; use"):
            check_pairs(tmp_path, BART, *words)


def test_a_model_that_makes_no_tokens_of_labels_is_refused(tmp_path: Path) -> None:
    message = "M2M100ForConditionalGeneration has no prepare_decoder_input_ids_from_labels, which .* such as T5 or BART"
    with pytest.raises(UserError, match=message):
        check_pairs(tmp_path, BART | {"model_type": "m2m_100"}, "data.source_len=8", "data.target_len=8")


def written(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text(json.dumps(json.loads(Path(GPT2).read_text()) | values))
    return f"model.config={folder}"


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration.Mine", "AutoModelForCausalLM": "modeling.Mine"}
    (tmp_path / "configuration.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError, match=r"model_type=gpt22 is not one of transformers .* did you mean gpt2\? .*is off"):
        check("gpt2", written(tmp_path, model_type="gpt22", auto_map=auto_map))
    check("gpt2", written(tmp_path, auto_map=auto_map))


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "kernels-community/flash-attn2"},
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": {"text_config": "evil/kernel"}},
        {"parts": [{"text_config": {"_attn_implementation_internal": "evil/kernel"}}]},
    ],
)
def test_an_attention_that_may_be_code_of_the_hub_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    check("gpt2", written(tmp_path, attn_implementation="eager"))
    message = r"\w*attn_implementation\w*=\S* is not an attention of PyTorch, and code from the hub is not run; use"
    with pytest.raises(UserError, match=message):
        check("gpt2", written(tmp_path, **values))
    with pytest.raises(UserError, match=rf"below model\.config: {message}"):
        read_config(json.loads(Path(GPT2).read_text()) | values, {})
    (tmp_path / "config.json").write_text(json.dumps(json.loads(Path(T5).read_text()) | values))
    with pytest.raises(UserError, match=message):
        load_whole(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    values = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UserError, match="has quantized weights"):
        check("gpt2", written(tmp_path, **values))
    with pytest.raises(UserError, match=r"below model\.config has quantized weights"):
        read_config(json.loads(Path(GPT2).read_text()) | values, {})


def test_a_name_that_neither_the_cache_nor_the_hub_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no-one/nothing cannot be read .* hf download no-one/nothing --local-dir"):
        check("gpt2", "model.config=no-one/nothing")


def test_without_transformers_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    library.transformers.cache_clear()
    with pytest.raises(UserError, match=r"need the package transformers, .*pip install -e '\.\[hf\]'"):
        check("gpt2")
    library.transformers.cache_clear()


def test_nothing_else_imports_transformers(tmp_path: Path) -> None:
    words = ["task=language", "data=pydoc", "model=lm_tiny"]
    code = (
        "import sys; from fsdp_lab.training.__main__ import read_config; from fsdp_lab.training import train\n"
        "from fsdp_lab.workloads.build import build_workload; from fsdp_lab.config.rules import check_trial\n"
        f"c = read_config(None, {words}); check_trial(c, 2)\n"
        "build_workload(c.model, c.data, c.task); sys.exit('transformers' in sys.modules)"
    )
    assert forked.run(tmp_path, "-c", code).returncode == 0


def test_floats_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "vocab_size": 50}
    transformers.Mamba2Config(**sizes).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}], "its notation"
    assert list(read_config(str(tmp_path), {}).time_step_limit) == [0.0, math.inf]
