"""Names of transformers that its manual does not promise: each is there in this version, as we use it."""

from __future__ import annotations

import pytest

from fsdp_lab.workloads.hf.hf_private import NAMES


def test_transformers_has_each_name_as_we_use_it():
    pytest.importorskip("transformers")
    assert {name.name: lacks for name in NAMES if (lacks := name.lacks()) is not None} == {}
