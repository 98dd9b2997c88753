"""Runs a function on all ranks of a running cluster with Ray Train: one rank per GPU, or two ranks on CPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from fsdp_lab.config import UserError
from fsdp_lab.config.checks import check_cluster
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray
from fsdp_lab.engine.rendezvous import backend_config


def on_all_ranks(address: str, function: Callable[[], Any]) -> Any:
    """Call a function on ranks with the variables that launchers set, and return the first rank's result: plain values.

    Args:
        function: of a module that the nodes have; it joins the process group itself.

    Raises:
        UserError: no Ray answers at the address, some of its GPUs are in use, or a rank failed.
    """
    check_cluster(cluster := ClusterConfig(address=address))
    try:
        start_ray(cluster)
        return _on_all_ranks(address, function)
    finally:
        stop_ray()


def _on_all_ranks(address: str, function: Callable[[], Any]) -> Any:
    import ray.train
    from ray.train.torch import TorchTrainer

    gpus, free = (int(each().get("GPU", 0)) for each in (ray.cluster_resources, ray.available_resources))
    if free < gpus:
        raise UserError(
            f"cluster.address={address}: {free} of its {gpus} GPUs are free, and a probe measures on all of them; try "
            "again when nothing else runs there (`ray status`)."
        )
    placed = ray.train.ScalingConfig(
        num_workers=gpus or 2, use_gpu=gpus > 0, placement_strategy="PACK" if gpus else "SPREAD"
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = ray.train.RunConfig(storage_path=folder)
            trainer: Any = TorchTrainer(
                function, torch_config=backend_config(None), scaling_config=placed, run_config=run
            )
            return trainer.fit().return_value
    except (ray.exceptions.RayError, ray.train.TrainingFailedError) as error:
        raise UserError(
            f"cluster.address={address}: a rank failed: {' '.join(str(error).split())[-300:]}. The nodes need "
            "fsdp_lab and PyTorch of the versions here, and GPUs that nothing else uses."
        ) from error
