"""Language models: Llama and its loss by formulas, tokens, and the memory that is forecast."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_lab.config import to_dict
from fsdp_lab.config.without_hydra import read_config
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.workloads.build import build_model_spec, build_workload
from fsdp_lab.workloads.examples.language import pydoc
from fsdp_lab.workloads.examples.language.llama import Llama
from fsdp_lab.workloads.examples.language.pydoc import PydocTokens
from fsdp_lab.workloads.examples.language.tokens import PackedTokens
from fsdp_lab.workloads.tasks.language import Language


@pytest.mark.parametrize(
    ("option", "num_params"),
    [("llama3_1b", 1_235_814_400), ("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496)],
)
def test_options_have_the_published_number_of_parameters(option: str, num_params: int) -> None:
    """The checkpoints' own counts: meta-llama/Llama-3.2-1B, Meta-Llama-3-8B and Meta-Llama-3-70B on Hugging Face."""
    config = read_config(None, [f"model={option}"])
    with torch.device("meta"):
        model = build_model_spec(config.model).build()
    assert sum(p.numel() for p in model.parameters()) == num_params
    assert to_dict(config.data)["vocab_size"] == 128256, "random tokens are those of the model"


SIZES: dict[str, Any] = {"vocab_size": 50, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 16}
# A part of a name of Llama's here -> in transformers.
NAMES = {
    "embedding": "model.embed_tokens", "blocks": "model.layers", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "attention": "self_attn", "ffn_norm": "post_attention_layernorm", "ffn": "mlp",
}  # fmt: skip


def test_logits_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")

    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ))  # fmt: skip
    model = Llama(**SIZES, dim=32, ffn_dim=48, rope_theta=100.0)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):  # norms of ones and tiny weights would hide a mistake
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(i))
    weights = {}
    for name, weight in model.state_dict().items():
        weights[".".join(NAMES.get(part, part) for part in name.split("."))] = weight
    theirs.load_state_dict(weights)
    tokens = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_loss_in_parts_counts_the_labels_of_the_whole() -> None:
    """-1 is none: 8 and 5 are left."""
    model, tokens = Llama(**SIZES, dim=32, ffn_dim=48), torch.randint(50, (3, 8))
    labels = torch.randint(50, (3, 8))
    labels[0], labels[1, 5:] = -1, -1
    total, count = model(tokens, labels=labels, loss_chunks=3)
    whole = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    assert count == 13 and total.item() == pytest.approx(whole.item(), rel=1e-5)


def test_flops_of_llama3_8b_are_those_worked_out_by_hand() -> None:
    """Without the embedding of 128,256 x 4,096 it has 7,504,924,672 parameters; each of 32 layers has 32 heads of 128
    for queries and keys, and as many for values."""
    sizes = {"vocab_size": 128256, "dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336}
    with torch.device("meta"):
        model = Llama(**sizes)
    expected = 6 * 7_504_924_672 + 6 * 32 * 32 * (128 + 128) * 8192
    assert model.flops_per_token(torch.empty(2, 8193, device="meta")) == expected == 57_914_449_920


def test_what_is_computed_twice_counts_once() -> None:
    """64 tokens: 2 layers of 49,280 parameters, a norm of 64, a head of 256 x 64; 2 x 4 heads of 16 + 16."""
    for recompute in ([], ["task.loss_chunks=4", "activation_checkpointing=full"]):
        trial = read_config(None, ["task=language", *recompute])
        workload = build_workload(trial.model, trial.data, trial.task)
        assert workload.train_flops_per_sample() == 64 * (6 * (2 * 49_280 + 64 + 16_384) + 6 * 2 * 4 * 32 * 64)


def test_logits_count_in_float32() -> None:
    """A sum in bfloat16 would end at the first few tokens."""
    logits = torch.zeros(8, 512, 50, dtype=torch.bfloat16)
    total, count = Language().metrics(logits, torch.zeros(8, 513, dtype=torch.int64))["loss"]
    assert total.item() == pytest.approx(8 * 512 * math.log(50), rel=1e-5) and count == 8 * 512


def test_every_token_but_the_first_is_told_once() -> None:
    rows = PackedTokens(torch.arange(12, dtype=torch.uint8), seq_len=5)
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    assert rows[0].dtype is torch.int64 and len(PackedTokens(torch.arange(5), 5)) == 0
    other = PackedTokens(torch.tensor([*range(11), 99], dtype=torch.uint8), seq_len=5)
    assert rows.digest == PackedTokens(rows.tokens.clone(), 5).digest != other.digest


def test_pydoc_is_english_and_no_paragraph_is_in_both_splits() -> None:
    train, val = PydocTokens("train"), PydocTokens("val")
    assert train[0].shape == (257,) and int(train.tokens.max()) < 256
    assert len(train) > 1000 and 0.05 < len(val) / len(train) < 0.2
    texts = {split: pydoc.read(split) for split in ("train", "val")}
    assert '"assert" statement' in texts["train"] and " the " in texts["val"]
    paragraphs = [text.split("\n\n") for text in texts.values()]
    assert not set(paragraphs[0]) & set(paragraphs[1]) and len(set(paragraphs[0])) == len(paragraphs[0])
    for text in (text.encode() for text in texts.values()):  # the README: below 4.7 bits a model knows more than this
        shares = [count / len(text) for count in collections.Counter(text).values()]
        assert -sum(share * math.log2(share) for share in shares) == pytest.approx(4.7, abs=0.15)


@pytest.mark.ci
def test_of_a_loss_in_parts_the_logits_of_one_part_are_held() -> None:
    """16 rows of 64 tokens on a rank, 32,000 logits of 4 bytes for each. In the backward pass of a part there are three
    such tensors: logarithms of the softmax, their gradient, and that of the logits. Of the whole there are three, too,
    each twice as large; but a part's backward pass also holds the gradient of the head, 8 of 131 MB."""
    words = ["task=language", "data=synthetic_tokens", "data.seq_len=64", "training.global_batch_size=32"]
    cases = [[*words, "model.vocab_size=32000", f"task.loss_chunks={chunks}"] for chunks in (1, 2, 4)]
    whole, two, four = (forecast_profile(read_config(None, c), 2, cuda=False).peaks["device"]["total"] for c in cases)
    logits = 16 * 64 * 32_000 * 4
    assert two - four == 3 * logits // 4 and whole - two > 1.4 * logits
