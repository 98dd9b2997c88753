"""A forecast refuses tensors of several types where a kernel does. Expected: what the kernels of this CPU do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fsdp_lab.config.errors import ModelError
from fsdp_lab.forecast.fake import fake_tensors
from fsdp_lab.forecast.forecast import forecast_step
from tests.ranks import config

Dtypes = tuple[torch.dtype, torch.dtype]
Case = Callable[[torch.dtype, torch.dtype], object]
ones = torch.ones
PLACE = (torch.tensor([1]),)
CASES: dict[str, Case] = {
    "linear": lambda a, b: F.linear(ones(2, 4, dtype=a), ones(3, 4, dtype=b)),
    "linear, of rows": lambda a, b: F.linear(ones(2, 5, 4, dtype=a), ones(3, 4, dtype=b), ones(3, dtype=b)),
    "bias": lambda a, b: F.linear(ones(2, 4, dtype=a), ones(3, 4, dtype=a), ones(3, dtype=b)),
    "matmul": lambda a, b: ones(2, 5, 4, dtype=a) @ ones(4, 3, dtype=b),
    "bmm": lambda a, b: torch.einsum("bij,bjk->bik", ones(2, 5, 4, dtype=a), ones(2, 4, 3, dtype=b)),
    "mv": lambda a, b: ones(3, 4, dtype=a) @ ones(4, dtype=b),
    "conv": lambda a, b: F.conv2d(ones(1, 3, 8, 8, dtype=a), ones(4, 3, 3, 3, dtype=b)),
    "attention": lambda a, b: F.scaled_dot_product_attention(
        ones(1, 1, 4, 8, dtype=a), *[ones(1, 1, 4, 8, dtype=b)] * 2
    ),
    "layer_norm": lambda a, b: F.layer_norm(ones(2, 4, dtype=a), (4,), ones(4, dtype=b), ones(4, dtype=b)),
    "group_norm": lambda a, b: F.group_norm(ones(2, 4, dtype=a), 2, ones(4, dtype=b), ones(4, dtype=b)),
    "batch_norm": lambda a, b: F.batch_norm(ones(2, 4, dtype=a), None, None, *[ones(4, dtype=b)] * 2, training=True),
    "rms_norm": lambda a, b: F.rms_norm(ones(2, 4, dtype=a), (4,), ones(4, dtype=b)),
    "index_put": lambda a, b: torch.zeros(4, dtype=a).index_put(PLACE, ones(1, dtype=b)),
    "index_add": lambda a, b: torch.zeros(4, dtype=a).index_add(0, PLACE[0], ones(1, dtype=b)),
    "embedding_bag": lambda a, b: F.embedding_bag(
        ones(1, 2, dtype=torch.int64), ones(4, 3, dtype=a), per_sample_weights=ones(1, 2, dtype=b), mode="sum"
    ),
    "weights of classes": lambda a, b: F.nll_loss(ones(2, 4, dtype=a), ones(2, dtype=torch.int64), ones(4, dtype=b)),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(ones(2, 4, dtype=a), ones(2, 4, dtype=b)),
    "cdist": lambda a, b: torch.cdist(ones(2, 4, dtype=a), ones(3, 4, dtype=b)),
    "mse_loss": lambda a, b: F.mse_loss(ones(2, 4, dtype=a), ones(2, 4, dtype=b)),
    "sum": lambda a, b: ones(2, dtype=a) * 2 + ones(2, dtype=b),
    "where": lambda a, b: torch.where(ones(1, dtype=torch.bool), ones(1, dtype=a), ones(1, dtype=b)),
}


def _is_refused(case: Callable[[], object]) -> bool:
    try:
        case()
    except (RuntimeError, ValueError):
        return True
    return False


@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_types_are_refused_as_by_kernels(name: str, types: Dtypes):
    expected = _is_refused(partial(CASES[name], *types))
    with fake_tensors():
        assert _is_refused(partial(CASES[name], *types)) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_type_is_not_refused(name: str, dtype: torch.dtype):
    with fake_tensors():
        assert not _is_refused(partial(CASES[name], dtype, dtype))


class Net(torch.nn.Module):
    """Multiplies by a buffer, which stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 16), torch.nn.Linear(16, 10)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, images: Tensor) -> Tensor:
        last: Tensor = self.last(self.first(images.flatten(1)) * self.scale)
        return last


def test_a_step_that_cannot_run_has_no_forecast():
    """Its error names the buffer, as that of a trial does."""
    words = (f"model._target_={__name__}.Net", "data=digits", "sharding=root", "precision=bf16_mixed")
    with pytest.raises(ModelError, match=r"must have the same dtype, but got .*no buffers \(.*scale.*buffer\.to"):
        forecast_step(config(*words), 2, cuda=False)
