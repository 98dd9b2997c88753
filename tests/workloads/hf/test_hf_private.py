"""Names of transformers that its manual does not promise: each is there in this version, as we use it."""

from __future__ import annotations

import pytest

from fsdp_lab.private import Name
from fsdp_lab.workloads.hf.hf_private import NAMES


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.name)
def test_transformers_has_the_name_as_we_use_it(name: Name):
    pytest.importorskip("transformers")
    assert name.lacks() is None, f"this version lacks {name.lacks()}: see fsdp_lab/workloads/hf/hf_private.py"
