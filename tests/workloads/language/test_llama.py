"""Llama against published sizes, and against the same arithmetic written down again without PyTorch's modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fsdp_lab.training.__main__ import read_config
from fsdp_lab.workloads.build import build_workload
from fsdp_lab.workloads.language.llama import Llama, RotaryEmbedding
from tests.operators import Operators

SMALL: dict[str, Any] = {
    "vocab_size": 50, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 16,
    "rope_theta": 100.0,
}  # fmt: skip
LLAMA3_8B = {"vocab_size": 128256, "dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336}


def small(**sizes: Any) -> Llama:
    torch.manual_seed(0)
    return Llama(**{**SMALL, **sizes})


def test_rotation_is_a_product_of_complex_numbers():
    """The definition (arXiv 2104.09864, equation 12): the pair i at position m, as a complex number, times
    `exp(1j * m * theta ** (-2i / d))`."""
    x = torch.randn(2, 3, 11, 8, generator=torch.Generator().manual_seed(0))
    pairs = x[..., :4].numpy() + 1j * x[..., 4:].numpy()
    angles = np.arange(11)[:, None] * 10000.0 ** (-2 * np.arange(4) / 8)[None, :]
    rotated = pairs * np.exp(1j * angles)
    expected = np.concatenate((rotated.real, rotated.imag), axis=-1)
    np.testing.assert_allclose(RotaryEmbedding(8, 11, 10000.0)(x).numpy(), expected, atol=1e-6)


def test_a_row_longer_than_the_tables_is_refused():
    with pytest.raises(ValueError, match="17 tokens are more than max_seq_len=16"):
        small()(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("sizes", [{"num_heads": 5}, {"num_kv_heads": 3}, {"dim": 12, "num_heads": 4}])
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int]):
    with pytest.raises(ValueError, match="num_heads must divide dim into heads of an even size"):
        small(**sizes)


def naive(weights: dict[str, Any], tokens: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    """The logits of one row, position by position and head by head, in float64."""
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
def test_logits_are_those_of_the_formulas(tied: bool):
    model = small(tied=tied)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):  # norms of ones and tiny weights would hide a mistake
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(i))
    tokens = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    got = model(tokens).detach().double().numpy()
    for row, logits in zip(tokens.numpy(), got, strict=True):
        expected = naive(weights, row)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_tied_weights_are_one_parameter():
    model = small(tied=True)
    assert model.head.weight is model.embedding.weight
    assert sum(p.numel() for p in small().parameters()) - sum(p.numel() for p in model.parameters()) == 50 * 32


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_a_loss_in_parts_has_the_value_and_the_gradients_of_the_whole(chunks: int, tied: bool):
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


@pytest.mark.parametrize(("chunks", "rows"), [(1, 128), (4, 32)])
def test_a_loss_in_parts_never_holds_all_logits(chunks: int, rows: int):
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    model = small(vocab_size=5000, max_seq_len=128)
    sizes: list[int] = []
    with Operators(lambda _, __, result: sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)):
        model(tokens, labels=tokens, loss_chunks=chunks)[0].backward()
    assert max(sizes) == 2 * rows * 5000


def test_the_tables_of_rotations_are_shared_and_not_saved():
    model = small()
    assert [name for name, _ in model.named_buffers()] == [
        "blocks.0.attention.rotary.cos",
        "blocks.0.attention.rotary.sin",
    ]
    assert not [name for name in model.state_dict() if "rotary" in name]


def test_flops_per_token_of_llama3_8b_are_those_worked_out_by_hand():
    """Without the embedding of 128,256 x 4,096 it has 7,504,924,672 parameters; each of 32 layers has 32 heads of 128
    for queries and keys, and as many for values."""
    with torch.device("meta"):
        model = Llama(**LLAMA3_8B)
    expected = 6 * 7_504_924_672 + 6 * 32 * 32 * (128 + 128) * 8192
    assert model.flops_per_token(torch.empty(2, 8193, device="meta")) == expected == 57_914_449_920


def test_flops_per_token_of_a_small_model_are_those_worked_out_by_hand():
    """A layer has 2 x 32 x 32 (queries, output) + 2 x 32 x 16 (keys, values) + 3 x 32 x 48 + 2 x 32 (norms) = 7,744
    parameters; two of them, a norm of 32 and a head of 50 x 32 are 17,120. Two layers of 4 heads of 8 + 8 at 16 tokens:
    6 x 2 x 4 x 16 x 16 = 12,288."""
    assert small().flops_per_token(torch.empty(3, 17)) == 6 * 17_120 + 12_288 == 115_008


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_computed_twice_counts_once(recompute: bool):
    """Neither `loss_chunks` nor activation checkpointing changes what a token is worth."""
    words = ["task=language", *(["task.loss_chunks=4", "activation_checkpointing=full"] if recompute else [])]
    trial = read_config(None, words)
    workload = build_workload(trial.model, trial.data, trial.task)
    # 64 tokens: 2 layers of 49,280 parameters, a norm of 64, a head of 256 x 64; 2 x 4 heads of 16 + 16
    assert workload.train_flops_per_sample() == 64 * (6 * (2 * 49_280 + 64 + 16_384) + 6 * 2 * 4 * 32 * 64)
