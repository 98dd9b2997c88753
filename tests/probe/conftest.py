from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp_lab.training.distributed import leave_process_group, setup_distributed


@pytest.fixture
def rank_alone() -> Iterator[None]:
    """This process is the only rank."""
    setup_distributed()
    yield
    leave_process_group()
