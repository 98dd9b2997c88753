"""Starting or reaching Ray, and what it can hold."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fsdp_lab import hardware
from fsdp_lab.config import ConfigError, UserError, default_num_workers
from fsdp_lab.config.sweep import ClusterConfig, Placement
from fsdp_lab.config.target import user_root
from fsdp_lab.engine.ray_job import is_rays_copy
from fsdp_lab.engine.ray_token import check_token, is_refusal, sends_token, set_own_token, wrong_token
from fsdp_lab.engine.rendezvous import end_meetings, keep_meetings_here
from fsdp_lab.engine.session import claim_session, keep_session

# Set before Ray is imported. Ray prints little, keeps paths relative to where the command was typed, and
# its controller looks after workers often: a report waits for that look (2 s by default).
ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "60",
    "TUNE_WARN_SLOW_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "60",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # which writes every printed line into a worker's log twice
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "30",  # for a stopped trial to let go of its workers, before the next
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the driver has its own
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a metric that a trial cannot have stops no sweep
}

_PROBE_TIMEOUT_S = 8.0

_servers: dict[str, psutil.Process] = {}  # of a Ray that was started here
_own_folders: list[Path] = []  # what it writes in the folder for temporary files: logs and sockets


@dataclass(frozen=True)
class Resources:
    """What one trial's workers take together, and what the cluster has in all."""

    needed: dict[str, float]
    total: dict[str, float]

    @property
    def side_by_side(self) -> int:
        """How many such trials fit at the same time."""
        return min(int(self.total.get(name, 0) / amount) for name, amount in self.needed.items() if amount)


def set_environment() -> None:
    """Ray's settings, where the user has not set them."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def start_ray(cluster: ClusterConfig, code: Sequence[str] = ()) -> None:
    """Start Ray on this machine, or reach the one at `cluster.address`.

    Args:
        code: dotted paths to code of the user's, which a cluster's nodes get a copy of. Processes on this machine
            import it from where it is.

    Raises:
        UserError: no Ray answers at the address, or not to this process's token.
    """
    set_environment()
    if cluster.address is None:
        # Ray's servers listen on every interface unless the node's address is the loopback; it takes that
        # one only on machines that it thinks cannot be clusters. (`_node_ip_address` is overruled.)
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        set_own_token()
    else:
        check_token(cluster.address)
        probe(cluster.address)
        if sends_token():  # else Ray asks once a second, twenty times, also one that answers and refuses the token
            os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if cluster.address is None:
        adopt_orphans()
        keep_meetings_here()
        # "local" and not None, which would join a Ray that somebody else started on this machine
        # and with our counts: Ray's own takes no notice of MIG, nor of an invalid entry in CUDA_VISIBLE_DEVICES
        cpus, gpus = hardware.num_cpus(), hardware.num_gpus()
        context = ray.init("local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, **quiet)
        if folder := getattr(context, "address_info", {}).get("session_dir"):
            _own_folders.append(Path(folder))
            claim_session(Path(folder))
        _servers.update({p.name(): p for p in psutil.Process().children() if p.name() in ("raylet", "gcs_server")})
        return
    with kept_stderr() as printed:  # Ray's own code prints a line a second while it tries
        try:
            ray.init(address=cluster.address, runtime_env=code_environment(code), **quiet)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            refused = is_refusal(printed() + str(error))
            raise (wrong_token(cluster.address) if refused else no_ray(cluster.address, error)) from error


def code_environment(code: Sequence[str]) -> dict[str, Any] | None:
    """Return the runtime environment that brings the packages of dotted paths to every node; None where there are none:
    with one, workers that Ray has started in advance are of no use. What came with a job is on every node already."""
    found = {root for path in code if (root := user_root(path)) is not None}
    roots = sorted(str(root) for root in found if not is_rays_copy(root))
    return {"py_modules": roots} if roots else None


@contextmanager
def kept_stderr() -> Iterator[Callable[[], str]]:
    """Hold back what this process prints to its standard error, native code included: it is printed at the end, or
    left out where the block raises. Gives what was printed so far."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as kept:

        def printed() -> str:
            kept.seek(0)
            return kept.read().decode(errors="replace")

        os.dup2(kept.fileno(), 2)
        try:
            yield printed
        except BaseException:
            os.dup2(shown, 2)
            raise
        else:
            os.dup2(shown, 2)
            sys.stderr.write(printed())
        finally:
            os.close(shown)


def probe(address: str) -> None:
    """Knock at `host:port`: Ray itself would try for minutes.

    Raises:
        UserError: nobody opens.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto`, for which Ray looks on this machine, and whatever else it understands
    try:
        socket.create_connection((host, int(port)), _PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise no_ray(address, error) from error


def no_ray(address: str, error: Exception) -> UserError:
    return UserError(
        f"cluster.address={address}: no Ray answers there ({str(error).splitlines()[0]}); start one with "
        "`ray start --head`, or leave cluster.address=null to have it started here."
    )


def stop_ray() -> None:
    """Leave Ray; a Ray that was started here ends with all its processes and temporary files. Where one of its servers
    has ended by itself the files stay: its logs may say why."""
    lost = lost_server()
    _servers.clear()
    shutdown = getattr(sys.modules.get("ray"), "shutdown", None)
    if shutdown is not None:  # else Ctrl-C came while Ray was being imported
        shutdown()
    end_descendants()
    end_meetings()
    while _own_folders:
        folder = _own_folders.pop()
        if lost is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            keep_session(folder)


_adopting = False


def adopt_orphans() -> None:
    """Let what Ray's servers leave behind become children of this process, which can then end them: Ray does not know
    its agents yet when it is interrupted in its start, and forgets them when its servers are killed."""
    global _adopting
    if sys.platform == "linux":
        pr_set_child_subreaper = 36  # linux/prctl.h
        _adopting = ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0


def end_descendants() -> None:
    """End what is left of a Ray that was started here: with it, everything below this process."""
    if not _adopting:
        return
    # Python's own keeper of semaphores ends with this process; ended before, another one is started and complains
    for _ in range(3):  # what had a parent a moment ago is ours now
        below = [child for child in psutil.Process().children(recursive=True) if not _keeps_semaphores(child)]
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=2.0)


def _keeps_semaphores(process: psutil.Process) -> bool:
    """Whether it is the process that Python starts to keep semaphores; it ends with the one that started it."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def lost_server() -> str | None:
    """The server of a Ray that was started here that has ended by itself, by its name; None where all is well."""
    return next((name for name, server in _servers.items() if has_ended(server)), None)


def has_ended(process: psutil.Process) -> bool:
    """A zombie has ended too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def num_gpus() -> int:
    """GPUs of the whole cluster."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def resolve_num_workers(cluster: ClusterConfig) -> int:
    """What `cluster.num_workers` stands for: null is the GPUs of a node, or 2 where there are none."""
    if cluster.num_workers is not None:
        return cluster.num_workers
    if cluster.address is None:
        return default_num_workers()
    import ray

    return max((int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]), default=0) or 2


def resolve_cpus_per_worker(cluster: ClusterConfig) -> float:
    """What `cluster.cpus_per_worker` stands for in the cluster that is there."""
    if cluster.cpus_per_worker is not None:
        return cluster.cpus_per_worker
    import ray

    return cpus_per_worker_on(ray.nodes())


def cpus_per_worker_on(nodes: list[dict[str, Any]]) -> float:
    """The default on these nodes of `ray.nodes()`: what the GPU node with the fewest cores a GPU can give to each.

    Where any node has GPUs, the nodes without get no workers.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("GPU")]
    shares = [hardware.default_cpus_per_worker(r.get("CPU", 0), int(r["GPU"])) for r in resources]
    return min(shares, default=hardware.default_cpus_per_worker(0, 0))


def check_capacity(cluster: ClusterConfig) -> Resources:
    """Compare what a trial needs with all that the cluster has.

    Raises:
        ConfigError: it can never be had; both numbers and what to change.
    """
    import ray

    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and cluster.storage_path is None:
        raise ConfigError(
            f"cluster.storage_path=null: the cluster has {nodes} nodes, and a trial's workers write into one folder; "
            "set cluster.storage_path to a folder that all of them mount, or to s3://bucket/prefix."
        )
    num_workers = resolve_num_workers(cluster)
    total = ray.cluster_resources()
    each = worker_resources(resolve_cpus_per_worker(cluster), use_gpu=num_gpus() > 0)
    needed = {name: amount * num_workers for name, amount in each.items()}
    for name, amount in needed.items():
        have = total.get(name, 0.0)
        if amount > have:
            fits = int(have / each[name])
            raise ConfigError(
                f"cluster.num_workers={num_workers} needs {amount:g} {name}, the cluster has {have:g} in all; use "
                f"cluster.num_workers={max(1, fits)}"
                + (" or a smaller cluster.cpus_per_worker." if name == "CPU" else " or add nodes.")
            )
    check_one_node(cluster, needed, ray.nodes())
    return Resources(needed, total)


def check_one_node(cluster: ClusterConfig, needed: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> None:
    """
    Raises:
        ConfigError: with `cluster.placement=strict_pack`, no node of `ray.nodes()` holds a trial's workers.
    """
    if cluster.placement is not Placement.strict_pack:
        return
    largest = {name: max(node["Resources"].get(name, 0.0) for node in nodes if node["Alive"]) for name in needed}
    if short := [name for name, amount in needed.items() if amount > largest[name]]:
        name = short[0]
        raise ConfigError(
            f"cluster.placement=strict_pack puts a trial's workers on one node: they need {needed[name]:g} {name}, and "
            f"the largest node has {largest[name]:g}; use a smaller cluster.num_workers or cluster.placement=pack."
        )


def worker_resources(cpus_per_worker: float, use_gpu: bool) -> dict[str, float]:
    """Of one worker."""
    return {"CPU": cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}


def remove_places(folder: Path) -> None:
    """Free what the trial in a folder holds: its workers are killed, and their resources are there for others.

    Ray does not do it by itself where the trial's process was killed, or stopped by a scheduler.
    """
    from ray import PlacementGroupID
    from ray.util import placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    (mark,) = places_mark(folder).items()
    for number, group in placement_group_table().items():
        ours = group["name"].rpartition("#")[0] == str(folder)
        marked = any(mark in bundle.items() for bundle in group["bundles"].values())
        if (ours or marked) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(number))))


def places_mark(folder: Path) -> dict[str, float]:
    """A resource of the workers of the trial in a folder by which their places are known, where they have no name: up
    to one MiB of the memory that Ray counts, of which it has thousands."""
    return {"memory": float(1 + zlib.crc32(str(folder).encode()) % 2**20)}


def driver_node() -> dict[str, float]:
    """A resource that only the driver's node has, where there are others: a trial's own process needs its disk."""
    import ray

    name = f"node:{ray.util.get_node_ip_address()}"
    return {name: 0.001} if sum(n["Alive"] for n in ray.nodes()) > 1 and name in ray.cluster_resources() else {}


def unmet_request() -> bool:
    """Whether somebody's workers wait to be placed: the cluster is full."""
    from ray.util import placement_group_table

    return any(group["state"] in ("PENDING", "RESCHEDULING") for group in placement_group_table().values())


def total_resources() -> dict[str, float]:
    """What the nodes that are there have together."""
    import ray

    return dict(ray.cluster_resources())


def free_resources() -> dict[str, float]:
    """What is not in use now."""
    import ray

    return ray.available_resources()
