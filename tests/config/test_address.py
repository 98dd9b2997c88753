"""Which addresses of object storage are taken, and what is said of the others."""

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


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("file:///mnt/x", "cluster.storage_path=file:///mnt/x: give a mounted folder as its path, without file://"),
        ("memory://x", "memory storage ends with its process; give a mounted folder, or s3://bucket/prefix, gs://bucket/prefix"),
        ("http://host/x", "http:// is not a known storage; give a mounted folder, or s3://"),
        ("s3://bucket/x/", "write s3://bucket/prefix with letters, digits and ._=+- only, without a slash at the end"),
        ("s3:///x", "is not a bucket and a prefix"),
        ("s3://bucket/../x y", "is not a bucket and a prefix"),
    ],
)  # fmt: skip
def test_other_addresses_are_refused_with_what_to_type(address: str, words: str):
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(storage_path=address).check()
    assert words in str(caught.value)


@pytest.mark.parametrize("address", ["s3://me:pass4711@bucket/x", "s3://bucket/x?secret=pass4711"])
def test_an_address_with_credentials_is_refused_without_repeating_them(address: str):
    with pytest.raises(ConfigError) as caught:
        check_address("resume", address)
    assert "give credentials in the environment" in str(caught.value) and "pass4711" not in str(caught.value)


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "https://head:8265"])
def test_rays_other_addresses_are_refused_with_what_to_use(address: str):
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(address=address).check()
    assert str(caught.value).startswith(f"cluster.address={address}: Ray Tune and Ray Train do not run through")
    assert "cluster.address=<head>:6379" in str(caught.value) and "ray job submit" in str(caught.value)
    for good in ("auto", "head:6379", "[::1]:6379", None):
        ClusterConfig(address=good).check()
