"""Starts Ray or connects to a cluster, and ends Ray with all its processes."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fsdp_lab.config import UserError
from fsdp_lab.config.checks import check_cluster
from fsdp_lab.config.machine import RunningCluster
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.config.target import user_root
from fsdp_lab.engine.files_of_ranks import remove_left_scratch
from fsdp_lab.engine.ray_job import in_job, is_rays_copy
from fsdp_lab.machine import hardware

HASH_SEED = "PYTHONHASHSEED"
# Set before Ray is imported. Ray prints little and keeps paths relative to the working directory. Its controller polls
# workers often, because a report waits for the poll (2 s by default).
ENVIRONMENT = {
    HASH_SEED: "0",  # so that a set of words has one order on all ranks and in every sweep
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",  # never: nobody reads Tune's snapshots of all trials
    "TUNE_WARN_SLOW_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "60",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # no paragraph per killed worker: a trial's error is one line
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # it adds a line to a rank's log for each report
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it logs each printed line twice
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_process_group_cleanup_enabled": "1",  # children of a killed worker end with it
    "RAY_worker_niceness": "0",  # Ray's default of 15 gives way to other processes and lowers speeds
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "30",  # time for a stopped trial to free its workers
    "TUNE_MAX_PENDING_TRIALS_PG": "64",  # trials that start at a time; by default Tune starts one
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the driver has its own
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a missing metric stops no sweep
}

_PROBE_TIMEOUT_S = 8.0
_END_S = 6.0  # in which killed processes must end
# Ray's servers speak HTTP/2 (RFC 9113), in which both sides first send a settings frame, here an empty one.
_SETTINGS = b"\x04"
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)
_REFUSED = ("InvalidAuthToken", "Unauthenticated", "authentication token")  # texts in Ray's error or in its cause
_own_token = secrets.token_hex(32)

_servers: dict[str, psutil.Process] = {}  # of a Ray that was started here
_own_folders: list[Path] = []  # its temporary files: logs and sockets


def set_environment() -> None:
    """Set Ray's environment variables that the user has not set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # with Ray's new output Tune rejects a callback that reports progress


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}


def start_ray(cluster: ClusterConfig, code: Sequence[str] = ()) -> None:
    """Start Ray on this machine, or connect to the cluster at `cluster.address`. Does nothing if connected.

    Args:
        code: dotted paths to the user's code, which Ray copies to a cluster's nodes. Processes on this machine import
            the original.

    Raises:
        UserError: Ray does not start, does not answer at the address, or rejects this process's token.
    """
    loaded = sys.modules.get("ray")
    if cluster.address is not None and loaded is not None and loaded.is_initialized():
        return
    set_environment()
    if cluster.address is None:
        _start_here()
    else:
        _connect(cluster.address, code)


def _start_here() -> None:
    # Ray's servers listen on every interface unless the node's address is the loopback; it uses the loopback only on
    # systems that it believes cannot form clusters. Ray overrides `_node_ip_address`.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    set_own_token()
    cpus, gpus = hardware.num_cpus(), hardware.num_gpus()
    if gpus and cpus >= 2 * gpus:  # a core per rank is free for imports while the previous trial trains
        os.environ.setdefault("RAY_preload_python_modules", "torchvision.models,fsdp_lab.training")
    import ray

    adopt_orphans()
    # "local", because None would join a Ray that another process started on this machine. Our own counts, because Ray
    # counts invalid entries of CUDA_VISIBLE_DEVICES.
    try:
        context = ray.init("local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, **_QUIET)
    except Exception as error:  # its class if servers do not start in half a minute
        raise UserError(
            f"engine=ray: Ray did not start on this machine ({str(error).partition(chr(10))[0]}); see what else "
            "uses its cores, memory or /tmp (`python -m fsdp_lab doctor`) and try again, or use engine=inline."
        ) from error
    if folder := getattr(context, "address_info", {}).get("session_dir"):
        _own_folders.append(Path(folder))
    _servers.update({p.name(): p for p in psutil.Process().children() if p.name() in ("raylet", "gcs_server")})


def _connect(address: str, code: Sequence[str]) -> None:
    # By default Ray tries twenty times, once a second, even if the server rejects the token or requires one.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "8")
    import ray

    address, named = reachable(address)
    try:
        with without_stderr():  # Ray prints a line per second while it tries
            ray.init(address=address, runtime_env=code_environment(code), **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        refused = any(sign in f"{error}{error.__cause__}" for sign in _REFUSED)
        raise (wrong_token(named) if refused else no_ray(named, error)) from error


def running_cluster(address: str) -> RunningCluster:
    """Ask the cluster at an address for its nodes' resources, and disconnect, unless this process was connected before.

    Trials connect later, with the code that they need.

    Raises:
        UserError: see `start_ray`; or the address is invalid.
    """
    loaded = sys.modules.get("ray")
    connected = loaded is not None and loaded.is_initialized()
    cluster = ClusterConfig(address=address)
    check_cluster(cluster)
    if not connected:
        print(f"asking Ray at cluster.address={address} for its nodes", flush=True)
        start_ray(cluster)
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    with_gpus = [node for node in alive if node["Resources"].get("GPU")]
    places = {node["NodeManagerAddress"] for node in with_gpus or alive}
    most = max((int(node["Resources"]["GPU"]) for node in with_gpus), default=0)
    answer = RunningCluster(most or 2, places == {ray.util.get_node_ip_address()})
    if not connected:
        ray.shutdown()
    return answer


def set_own_token() -> None:
    """Make a Ray that is started here answer only to processes with this process's token.

    The token is only in the environment of its processes; Ray's default token is in the home folder.
    RAY_AUTH_MODE=disabled keeps authentication off. A Ray without authentication ignores the token.
    """
    if "ray" not in sys.modules:  # an imported Ray has read the mode, and from 2.59 on requires tokens
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ["RAY_AUTH_TOKEN"] = _own_token  # it has priority over a path


def code_environment(code: Sequence[str]) -> dict[str, Any] | None:
    """Return the runtime environment that copies the packages of dotted paths to every node; None for no packages.

    It also sets the hash seed of workers. With such an environment Ray cannot use workers that it started in advance.
    The files of a Ray job are on every node already.
    """
    user_roots = {root for path in code if (root := user_root(path)) is not None}
    roots = sorted(str(root) for root in user_roots if not is_rays_copy(root))
    if not roots:
        return None
    seed = os.environ.get(HASH_SEED, ENVIRONMENT[HASH_SEED])
    return {"py_modules": roots} | ({} if in_job() else {"env_vars": {HASH_SEED: seed}})  # a job may have its own


@contextmanager
def without_stderr() -> Iterator[None]:
    """Drop this process's standard error, including that of native code."""
    shown = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)


def reachable(address: str) -> tuple[str, str]:
    """Check that Ray answers at `cluster.address`; return the resolved address, and text that names both.

    Ray itself would try for more than five minutes, even at a port that accepts connections and is silent.

    Raises:
        UserError: nothing answers there, or something other than Ray.
    """
    named = f"cluster.address={address}"
    try:
        if address == "auto":
            address, origin = address_of_auto()
            if address == "auto":  # Ray finds a local cluster, or fails at once
                return address, named
            named += f", which is {address} by {origin}"
        probe(address)
    except (OSError, ValueError) as error:
        raise no_ray(named, error) from error
    return address, named


def address_of_auto() -> tuple[str, str]:
    """Return the address for `auto` and its origin; `auto` itself if neither the user nor `ray start` has set one.

    Ray itself would wait minutes for the last cluster that was started here, even if it is gone.
    """
    if (named := os.environ.get("RAY_ADDRESS", "")) not in ("", "auto"):
        return named, "RAY_ADDRESS"
    last = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    return last.read_text().strip() if last.exists() else "auto", "the last `ray start` on this machine"


def probe(address: str) -> None:
    """Check once that a server like Ray listens at `host:port`.

    Raises:
        OSError: nothing listens, or it is silent or not Ray.
        ValueError: the address has no port.
    """
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        raise ValueError("an address is <host>:<port>")
    with socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S) as there:
        there.sendall(_GREETING)
        try:
            answer = there.recv(len(_GREETING))
        except TimeoutError:
            raise OSError(f"it accepts connections, but sent nothing for {_PROBE_TIMEOUT_S:g} s") from None
    if answer[3:4] != _SETTINGS and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        raise OSError("something other than Ray listens there")


def no_ray(named: str, error: Exception) -> UserError:
    unset = ", unset RAY_ADDRESS" if "by RAY_ADDRESS" in named else ""
    return UserError(
        f"{named}: no Ray cluster answers there ({str(error).splitlines()[0]}); start one with `ray start "
        f"--head`{unset}, or use cluster.address=null to start one here."
    )


def wrong_token(named: str) -> UserError:
    off = " If the cluster has tokens off, unset RAY_AUTH_MODE." if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    return UserError(
        f"{named}: this Ray cluster asks for an authentication token, and none was given, or the one "
        "that was given does not match; set RAY_AUTH_MODE=token, and put the cluster's token into RAY_AUTH_TOKEN, the "
        f"file of RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token: `ray get-auth-token` on its head node prints it.{off}"
    )


def stop_ray() -> None:
    """Disconnect from Ray.

    End a Ray that was started here, and remove its temporary files. The files stay if one of its servers had crashed,
    because the logs may contain the reason.
    """
    lost = lost_server()
    _servers.clear()
    shutdown = getattr(sys.modules.get("ray"), "shutdown", None)
    if shutdown is not None:  # missing if Ctrl-C interrupted the import
        shutdown()
    end_descendants()
    while _own_folders:
        folder = _own_folders.pop()
        if lost is None:
            shutil.rmtree(folder, ignore_errors=True)
    remove_left_scratch()


_adopting = False


def adopt_orphans() -> None:
    """Make orphans of Ray's servers children of this process, which can then end them.

    Ray does not know its agents if its start is interrupted, and loses them if its servers are killed.
    """
    global _adopting
    if sys.platform == "linux":
        pr_set_child_subreaper = 36  # linux/prctl.h
        _adopting = ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0


def end_descendants(limit_s: float = _END_S) -> None:
    """End what is left of a Ray that was started here, which is all descendants of this process. Wait up to a limit."""
    if not _adopting:
        return
    until = time.monotonic() + limit_s
    # Python's semaphore tracker ends with this process; if it is killed, Python starts another one, which prints a
    # warning
    for _ in range(3):  # orphans of the processes that just ended
        below = [child for child in psutil.Process().children(recursive=True) if not _keeps_semaphores(child)]
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=max(0.0, until - time.monotonic()))


def _keeps_semaphores(process: psutil.Process) -> bool:
    """Return whether a process is Python's semaphore tracker, which ends with the process that started it."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def lost_server() -> str | None:
    """Return the name of a server that has crashed, of a Ray that was started here; None if all run."""
    for name, server in _servers.copy().items():  # another thread may end Ray meanwhile
        with suppress(psutil.NoSuchProcess):
            if server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
                continue
        return name
    return None
