"""Which addresses of object storage and of clusters are taken. tests/refusals.py has those that are refused."""

from __future__ import annotations

import pytest

from fsdp_lab.config import ConfigError, is_address
from fsdp_lab.config.address import check_address
from fsdp_lab.config.sweep import ClusterConfig


@pytest.mark.parametrize("address", ["s3://bucket", "s3://my.bucket-1/a/b_c=1", "gs://bucket/prefix"])
def test_a_bucket_and_a_prefix_are_taken(address: str):
    ClusterConfig(storage_path=address).check()
    assert is_address(address)


@pytest.mark.parametrize("place", [None, "shared", "/mnt/shared"])
def test_a_folder_is_no_address(place: str | None):
    ClusterConfig(storage_path=place).check()
    assert not is_address(place)


@pytest.mark.parametrize("address", ["s3://me:pass4711@bucket/x", "s3://bucket/x?secret=pass4711"])
def test_an_address_with_credentials_is_refused_without_repeating_them(address: str):
    with pytest.raises(ConfigError) as caught:
        check_address("resume", address)
    assert "resume" in str(caught.value) and "pass4711" not in str(caught.value)
