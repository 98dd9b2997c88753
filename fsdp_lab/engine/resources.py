"""The cluster's resources: what it has, what a trial's workers need, and their placement groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from fsdp_lab.config import ConfigError
from fsdp_lab.config.sweep import ClusterConfig, Placement
from fsdp_lab.config.wording import resources_text
from fsdp_lab.machine import hardware

_ROUNDING = 1e-6  # rounding of quotients of shares of a core


def num_gpus() -> int:
    """Return the number of GPUs of the whole cluster."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def resolve_cpus_per_worker(cluster: ClusterConfig) -> float:
    """Return the CPUs that `cluster.cpus_per_worker` stands for in the connected cluster."""
    if cluster.cpus_per_worker is not None:
        return cluster.cpus_per_worker
    import ray

    return cpus_per_worker_on(ray.nodes())


def cpus_per_worker_on(nodes: list[dict[str, Any]]) -> float:
    """Return the default on these nodes of `ray.nodes()`: the cores per GPU of the GPU node with the fewest.

    If any node has GPUs, nodes without GPUs get no workers.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("GPU")]
    shares = [hardware.default_cpus_per_worker(r.get("CPU", 0), int(r["GPU"])) for r in resources]
    return min(shares, default=hardware.default_cpus_per_worker(0, 0))


def check_capacity(cluster: ClusterConfig, num_workers: int, tp: int = 1) -> dict[str, float]:
    """Check that the cluster can hold a trial's workers, and return their total resources.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.
        tp: the number of workers that must share a node.

    Raises:
        ConfigError: the cluster can never hold it; the message has both numbers and the remedy.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if len(nodes) > 1 and cluster.storage_path is None:
        raise ConfigError(
            f"cluster.storage_path=null: the cluster has {len(nodes)} nodes, and all workers of a trial write into one "
            "folder; set cluster.storage_path to a folder that all of them mount, or to s3://bucket/prefix."
        )
    each = worker_resources(resolve_cpus_per_worker(cluster), use_gpu=num_gpus() > 0)
    needed = {name: amount * num_workers for name, amount in each.items()}
    if (fits := groups_that_fit(each, nodes)) < num_workers:
        raise ConfigError(
            f"cluster.num_workers={num_workers} with {resources_text(each)} each: the cluster's nodes hold {fits} of "
            f"these workers; use cluster.num_workers={max(1, fits)}, a smaller cluster.cpus_per_worker, or more nodes."
        )
    in_groups = tp * groups_that_fit({name: amount * tp for name, amount in each.items()}, nodes)
    if in_groups < num_workers:
        raise ConfigError(
            f"sharding.tp={tp} with cluster.num_workers={num_workers}: {tp} workers ({resources_text(each)} each) must "
            f"share a node, and the cluster's nodes hold {in_groups} workers in such groups; use a smaller sharding.tp"
            f"{f', or cluster.num_workers={in_groups}' if in_groups else ''}."
        )
    if cluster.placement is Placement.strict_pack and not groups_that_fit(needed, nodes):
        most = max(groups_that_fit(each, [node]) for node in nodes)
        raise ConfigError(
            f"cluster.placement=strict_pack with cluster.num_workers={num_workers}: no node holds more than {most} of "
            f"these workers ({resources_text(each)} each); use cluster.num_workers={max(1, most)}, or "
            "cluster.placement=pack."
        )
    return needed


def groups_that_fit(group: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> int:
    """Return how many groups of workers nodes with these resources can hold, each group on one node."""
    needed = {name: amount for name, amount in group.items() if amount}
    return sum(min(int(node.get(name, 0.0) / needed[name] + _ROUNDING) for name in needed) for node in nodes)


def worker_resources(cpus_per_worker: float, use_gpu: bool) -> dict[str, float]:
    """Return the resources of one worker, by Ray's names."""
    return {"CPU": cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}


def mark_of(folder: Path) -> float:
    """Return a few bytes of memory that each worker of a trial requests; they identify its placement group."""
    return 2.0 + crc32(str(folder).encode()) % 2**24


def release_placement_group(folder: Path) -> None:
    """Free the resources of the trial in a folder: kill its workers and remove their placement groups.

    Ray does not do that if the trial's process was killed, or a scheduler stopped it.
    """
    import ray
    from ray.util import placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    job = ray.get_runtime_context().get_job_id()
    for number, group in placement_group_table().items():
        is_of_trial = any(bundle.get("memory") == mark_of(folder) for bundle in group["bundles"].values())
        if is_of_trial and number.endswith(job) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))


def driver_node() -> dict[str, float]:
    """Return a resource that only the driver's node has, if there are others: the trial's process needs that disk."""
    import ray

    name = f"node:{ray.util.get_node_ip_address()}"
    return {name: 0.001} if sum(n["Alive"] for n in ray.nodes()) > 1 and name in ray.cluster_resources() else {}
