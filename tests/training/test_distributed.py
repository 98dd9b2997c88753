"""How the ranks divide the work."""

from __future__ import annotations

import pytest

from fsdp_lab.forecast.fake import HOST, fake_world
from fsdp_lab.training.distributed import ParallelDims, build_parallel_dims
from tests.ranks import config


@pytest.mark.parametrize(
    ("words", "replicate", "shard", "axes"),
    [
        (["sharding=per_block"], 1, 8, ("dp_shard",)),
        (["sharding=per_block", "sharding.dp_replicate=2"], 2, 4, ("dp_replicate", "dp_shard")),
        (["sharding=per_block", "sharding.dp_replicate=8"], 8, 1, ("dp_replicate", "dp_shard")),
        (["sharding=ddp"], 8, 1, ("dp_replicate",)),
    ],
)
def test_a_mesh_has_the_axes_that_are_divided(words: list[str], replicate: int, shard: int, axes: tuple[str, ...]):
    with fake_world(8, HOST, rank=3) as ranks:
        dims = build_parallel_dims(config(*words).sharding, ranks)
        assert dims.mesh is not None and dims.mesh.mesh_dim_names == axes
    assert dims == ParallelDims(replicate, shard, tp=1, rank=3)
    assert (dims.dp_degree, dims.dp_rank) == (8, 3)


def test_tensor_parallel_ranks_are_one_part_of_the_data():
    every = [ParallelDims(dp_replicate=2, dp_shard=2, tp=2, rank=rank) for rank in range(8)]
    assert {dims.dp_degree for dims in every} == {4}
    assert [dims.dp_rank for dims in every] == [0, 0, 1, 1, 2, 2, 3, 3]
