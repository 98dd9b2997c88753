"""Which addresses of object storage are taken. tests/refusals.py has those that are refused."""

from __future__ import annotations

import pytest

from fsdp_lab.config import is_address
from fsdp_lab.config.sweep import ClusterConfig


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("s3://bucket", True), ("s3://my.bucket-1/a/b_c=1", True), ("gs://bucket/prefix", True), (None, False),
        ("shared", False), ("/mnt/shared", False),
    ],
)  # fmt: skip
def test_a_bucket_with_a_prefix_is_an_address_and_a_folder_is_none(place: str | None, expected: bool):
    ClusterConfig(storage_path=place).check()
    assert is_address(place) is expected
