"""Language models: what their words imply, Llama and its loss by formulas, tokens, and the memory that is forecast."""

from __future__ import annotations

import collections
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_lab.config import to_dict, with_custom
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.__main__ import read_config
from fsdp_lab.workloads.build import build_model_spec, build_workload
from fsdp_lab.workloads.language import pydoc
from fsdp_lab.workloads.language.llama import Llama
from fsdp_lab.workloads.language.pydoc import PydocTokens
from fsdp_lab.workloads.language.task import Language
from fsdp_lab.workloads.language.tokens import PackedTokens, SyntheticTokens


@pytest.mark.parametrize(
    ("typed", "implied"),
    [
        ("task=language", "model=lm_tiny data=pydoc"),
        ("data=pydoc", "task=language model=lm_tiny"),
        ("-m model=llama3_1b,llama3_8b sharding=root", "task=language data=synthetic_tokens"),
        ("model=llama3_8b data=pydoc task=language", ""),
        ("model._target_=my.Net task=language", "data=pydoc model=custom"),
        ("experiment=zero2_zero3 task=language", "model=lm_tiny data=pydoc"),
        ("data=pydoc_summaries model._target_=my.Net", "task=seq2seq model=custom"),
        ("model=vit_tiny data=synthetic task=classification", ""),
    ],
)
def test_words_that_one_word_implies(typed: str, implied: str) -> None:
    got = with_custom(typed.split())
    assert sorted(got) == sorted([*typed.split(), *implied.split()])
    assert [word for word in got if word in typed.split()] == typed.split(), "in the order in which they were typed"


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


SMALL: dict[str, Any] = {
    "vocab_size": 50, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 16,
    "rope_theta": 100.0,
}  # fmt: skip


def small(**sizes: Any) -> Llama:
    torch.manual_seed(0)
    return Llama(**{**SMALL, **sizes})


def naive(weights: dict[str, Any], tokens: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    """The logits of one row, position by position and head by head, in float64.

    A rotation (arXiv 2104.09864, equation 12) is of the pair i at position m, as a complex number, times
    `exp(1j * m * theta ** (-2i / d))`.
    """
    heads, kv_heads, size = 4, 2, 8

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        turned = (x[: size // 2] + 1j * x[size // 2 :]) * np.exp(
            1j * position * 100.0 ** (-np.arange(0, size, 2) / size)
        )
        return np.concatenate((turned.real, turned.imag))

    x = weights["embedding.weight"][tokens]
    for layer in range(2):
        w = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        h, out = norm(x, w["attention_norm.weight"]), np.zeros_like(x)
        for head in range(heads):
            mine, shared = slice(head * size, (head + 1) * size), head // (heads // kv_heads)
            theirs = slice(shared * size, (shared + 1) * size)
            q = [rotate(row @ w["attention.q_proj.weight"][mine].T, i) for i, row in enumerate(h)]
            k = [rotate(row @ w["attention.k_proj.weight"][theirs].T, i) for i, row in enumerate(h)]
            v = h @ w["attention.v_proj.weight"][theirs].T
            for i in range(len(tokens)):
                scores = np.exp([q[i] @ k[j] / np.sqrt(size) for j in range(i + 1)])
                out[i, mine] = scores / scores.sum() @ v[: i + 1]
        x = x + out @ w["attention.o_proj.weight"].T
        h = norm(x, w["ffn_norm.weight"])
        gate = h @ w["ffn.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn.up_proj.weight"].T)) @ w["ffn.down_proj.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["head.weight"].T


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_formulas(tied: bool) -> None:
    model = small(tied=tied)
    assert (model.head.weight is model.embedding.weight) == tied
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):  # norms of ones and tiny weights would hide a mistake
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(i))
    tokens = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    got = model(tokens).detach().double().numpy()
    for row, logits in zip(tokens.numpy(), got, strict=True):
        expected = naive(weights, row)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("chunks", "tied"), [(1, False), (3, True), (7, False)])
def test_a_loss_in_parts_has_value_and_gradients_of_the_whole(chunks: int, tied: bool) -> None:
    tokens = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(2))
    labels[0], labels[1, 5:] = -1, -1
    whole, parted = small(tied=tied), small(tied=tied)
    loss = F.cross_entropy(whole(tokens).flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    total, count = parted(tokens, labels=labels, loss_chunks=chunks)
    assert count == 5 + 8
    torch.testing.assert_close(total, loss, rtol=1e-6, atol=0)
    loss.backward()
    total.backward()
    for a, b in zip(whole.parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_flops_per_token_of_llama3_8b_are_those_worked_out_by_hand() -> None:
    """Without the embedding of 128,256 x 4,096 it has 7,504,924,672 parameters; each of 32 layers has 32 heads of 128
    for queries and keys, and as many for values."""
    sizes = {"vocab_size": 128256, "dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336}
    with torch.device("meta"):
        model = Llama(**sizes)
    expected = 6 * 7_504_924_672 + 6 * 32 * 32 * (128 + 128) * 8192
    assert model.flops_per_token(torch.empty(2, 8193, device="meta")) == expected == 57_914_449_920


@pytest.mark.parametrize("recompute", ["", "task.loss_chunks=4 activation_checkpointing=full"])
def test_what_is_computed_twice_counts_once(recompute: str) -> None:
    trial = read_config(None, ["task=language", *recompute.split()])
    workload = build_workload(trial.model, trial.data, trial.task)
    # 64 tokens: 2 layers of 49,280 parameters, a norm of 64, a head of 256 x 64; 2 x 4 heads of 16 + 16
    assert workload.train_flops_per_sample() == 64 * (6 * (2 * 49_280 + 64 + 16_384) + 6 * 2 * 4 * 32 * 64)


def losses_by_hand(batch: Tensor) -> list[float]:
    """The loss of each token that counts: minus the logarithm of what the model gave it."""
    losses = []
    for row in batch:
        if row[0] < 0:
            continue
        shares = small()(row[None, :-1])[0].detach().double().softmax(-1)
        losses += [-math.log(shares[i, token]) for i, token in enumerate(row[1:])]
    return losses


@pytest.mark.parametrize("chunks", [1, 3])
def test_each_token_is_told_from_those_before_it_without_padding(chunks: int) -> None:
    """Rows of -1 are padding, which is not a row of the embedding."""
    batch = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(3))
    task, losses = Language(loss_chunks=chunks), losses_by_hand(batch)
    assert len(losses) == 4 * 8 == task.units(batch)
    assert task.loss(task.forward(small(), batch), batch).item() == pytest.approx(sum(losses) / 32, rel=1e-6)
    batch[1:3] = -1
    losses = losses_by_hand(batch)
    total, count = task.metrics(task.forward(small(), batch), batch)["loss"]
    assert total.item() == pytest.approx(sum(losses), rel=1e-6) and count == len(losses) == task.units(batch) == 16
    assert task.units(batch.to("meta")) == 32, "by its shape"
    batch[:] = -1
    assert [x.item() for x in task.metrics(task.forward(small(), batch), batch)["loss"]] == [0, 0]


def test_logits_count_in_float32() -> None:
    """A sum in bfloat16 would end at the first few tokens."""
    logits = torch.zeros(8, 512, 50, dtype=torch.bfloat16)
    total, count = Language().metrics(logits, torch.zeros(8, 513, dtype=torch.int64))["loss"]
    assert total.item() == pytest.approx(8 * 512 * math.log(50), rel=1e-5) and count == 8 * 512


def test_every_token_but_the_first_is_told_once() -> None:
    rows = PackedTokens(torch.arange(12, dtype=torch.uint8), seq_len=5)
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    assert rows[0].dtype is torch.int64
    assert len(PackedTokens(torch.arange(5), 5)) == 0 and len(PackedTokens(torch.arange(6), 5)) == 1


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


def test_random_tokens_are_the_same_each_time_and_others_elsewhere() -> None:
    make: Any = lambda **kwargs: SyntheticTokens(**{"split": "train", "vocab_size": 1000, "seq_len": 50, **kwargs})  # noqa: E731
    row: Tensor = make()[3]
    assert row.shape == (51,) and row.dtype is torch.int64
    assert torch.equal(row, make()[3])
    for other in (make()[4], make(split="val")[3]):
        assert not torch.equal(row, other)
    every = torch.cat([make(vocab_size=7)[i] for i in range(100)])
    assert every.unique().tolist() == list(range(7))
    assert len({make().digest, make(vocab_size=7).digest, make(seq_len=51).digest}) == 3
    tokens = torch.arange(100, dtype=torch.uint8)
    other = torch.cat([tokens[:50], tokens[:1], tokens[51:]])
    assert PackedTokens(tokens, 5).digest == PackedTokens(tokens.clone(), 9).digest != PackedTokens(other, 5).digest


LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096  # queries, output; keys, values; SwiGLU; norms
REST = 2 * 128256 * 4096 + 4096  # embedding, head, norm


def test_a_rank_of_eight_holds_an_eighth_of_llama3_8b_with_adamw() -> None:
    """The whole model takes twenty times as long and repeats its layer: two of 32 here, every size divides by eight."""
    assert 32 * LAYER + REST == 8_030_261_248, "as published"
    words = ["model=llama3_8b", "model.num_layers=2", "data.seq_len=64", "optimizer=adamw", "precision=bf16_mixed"]
    result = forecast_profile(read_config(None, [*words, "sharding=per_block"]), 8, cuda=True).peaks["device"]
    sharded = 4 * (2 * LAYER + REST) // 8
    num_tensors = 2 * 9 + 3
    assert result["param"] == sharded
    assert result["optimizer"] == 2 * sharded + 4 * num_tensors, "two moments, and the number of steps of each tensor"
    assert result["buffer"] == 2 * 8192 * 64 * 4, "the tables of rotations are neither sharded nor cast"


@pytest.mark.ci
def test_of_a_loss_in_parts_the_logits_of_one_part_are_held() -> None:
    """16 rows of 64 tokens on a rank, 32,000 logits of 4 bytes for each. In the backward pass of a part there are three
    such tensors: logits, logarithms of their softmax, and the gradient. Of the whole there are more."""
    words = ["task=language", "data=synthetic_tokens", "data.seq_len=64", "training.global_batch_size=32"]
    cases = [[*words, "model.vocab_size=32000", f"task.loss_chunks={chunks}"] for chunks in (1, 2, 4, 8)]
    peaks = [forecast_profile(read_config(None, case), 2, cuda=False).peaks["device"] for case in cases]
    whole, *parts = [peak["total"] for peak in peaks]
    logits = 16 * 64 * 32_000 * 4
    assert [more - less for more, less in pairwise(parts)] == [3 * logits // 4, 3 * logits // 8]
    assert whole - parts[0] > 2 * logits
