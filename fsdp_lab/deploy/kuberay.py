"""Kubernetes with the KubeRay operator: a manifest for `kubectl` in the folder of a sweep.

It is a RayJob, or a RayCronJob for every night.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from pathlib import Path
from typing import Any

from fsdp_lab.config import ConfigError, is_address
from fsdp_lab.config.key_value_args import quoted
from fsdp_lab.deploy.job import SCRIPT_VARIABLE, Job

_API = "ray.io/v1"
_STOP_WAIT_S = "20"  # for a sweep to end, before Ray kills it
_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}  # by the names that the operator looks for


def launch(job: Job) -> int:
    """Write the manifest of a job and print how to apply it.

    Returns:
        the exit status of the command: 0.

    Raises:
        ConfigError: the job's results would be lost with its pods.
    """
    import yaml

    check_stays(job)
    content = cron_job(job) if job.schedule else ray_job(job)
    kind, name = content["kind"].lower(), content["metadata"]["name"]
    text = yaml.safe_dump(content, sort_keys=False, width=1000)
    file = job.write(f"{kind}.yaml", f"# Written by fsdp_lab.\n{text}")
    print(
        f"manifest: {file}\n"
        f"  start:  {shlex.join(['kubectl', 'apply', '-f', str(file)])}\n"
        f"  watch:  kubectl get {kind} {name}"
        + ("" if job.schedule else f"   kubectl logs --follow --selector=job-name={name}")
        + f"\n  end:    kubectl delete {kind} {name}"
        + ("" if job.schedule else f"\n  resume: {shlex.join(['kubectl', 'replace', '--force', '-f', str(file)])}"),
        flush=True,
    )
    return 0


def check_stays(job: Job) -> None:
    """Check that results outlive the pods.

    Raises:
        ConfigError: without a volume, some results would be written inside the pods.
    """
    if job.config.volume is not None:
        return
    values = dict(word.partition("=")[::2] for word in job.command if "=" in word)
    places = {
        "cluster.storage_path=s3://bucket/prefix": is_address(values.get("cluster.storage_path", "").strip("'\"")),
        "tracking.uri=http://mlflow:5000": "://" in (uri := values.get("tracking.uri", "")) and "sqlite" not in uri,
    }
    if lost := [word for word, stays in places.items() if not stays]:
        raise ConfigError(
            "cluster=kuberay: files in the pods are deleted with them; add a persistent volume with "
            f"cluster.job.volume=<claim>:/shared, or set other places, for example {' '.join(lost)}."
        )


def ray_job(job: Job) -> dict[str, Any]:
    """Return a RayJob: a Ray cluster for one command line, which is removed when the command has ended."""
    return {"apiVersion": _API, "kind": "RayJob", "metadata": {"name": job.name}, "spec": _job_spec(job)}


def cron_job(job: Job) -> dict[str, Any]:
    """Return a RayCronJob: the same at the times of `nightly.cron`."""
    assert job.schedule is not None
    cron, timezone = job.schedule
    spec: dict[str, Any] = {"schedule": cron, "jobTemplate": _job_spec(job)}
    if timezone is not None:
        spec["timeZone"] = timezone
    return {"apiVersion": _API, "kind": "RayCronJob", "metadata": {"name": job.name}, "spec": spec}


def _job_spec(job: Job) -> dict[str, Any]:
    cluster: dict[str, Any] = {
        "rayVersion": importlib.metadata.version("ray"),
        # the operator makes a token and gives it to the pods by a Secret
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": _start_params(job), "template": _pod(job, "ray-head", head=True)},
    }
    if job.config.nodes > 1:
        count = job.config.nodes - 1
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": count,
                "minReplicas": count,
                "maxReplicas": count,
                "rayStartParams": _start_params(job),
                "template": _pod(job, "ray-worker", head=False),
            }
        ]
    return {
        "entrypoint": entrypoint(job),
        "shutdownAfterJobFinishes": True,
        "backoffLimit": 0,  # a failed trial is a result
        "runtimeEnvYAML": f'env_vars: {{RAY_JOB_STOP_WAIT_TIME_S: "{_STOP_WAIT_S}"}}',
        "rayClusterSpec": cluster,
    }


def entrypoint(job: Job) -> str:
    """Return the command line for a shell of the head pod.

    It runs in the volume, so its files stay and the same manifest resumes it.
    """
    reached = ["cluster.address=auto", f"cluster.job.nodes={job.config.nodes}"]
    first, again = (shlex.join(["python", *words, *reached]) for words in (job.command, job.again))
    if job.config.volume is None:
        return first
    path = job.config.volume.partition(":")[2]
    if job.config.nodes > 1 and not any(word.startswith("cluster.storage_path=") for word in job.command):
        first = shlex.join(["python", *job.command, *reached, "cluster.storage_path=" + quoted(f"{path}/storage")])
    enter = f"cd {shlex.quote(path)} || exit; "
    if not job.mark:
        return f"{enter}exec {first}"
    manifest = Path(job.mark).parent / "job" / "rayjob.yaml"
    known = f"export {SCRIPT_VARIABLE}={shlex.quote(str(manifest))}; "
    return f"{enter}{known}if [ -e {shlex.quote(job.mark)} ]; then exec {again}; fi; exec {first}"


def _start_params(job: Job) -> dict[str, str]:
    gpus = {} if job.config.gpus_per_node is None else {"num-gpus": str(job.config.gpus_per_node)}
    return {"num-cpus": str(job.config.cpus_per_node), **gpus}


def _pod(job: Job, name: str, head: bool) -> dict[str, Any]:
    memory = f"{round((job.config.memory_gib_per_node or 0) * 1024)}Mi"
    limits: dict[str, Any] = {"cpu": str(job.config.cpus_per_node), "memory": memory}
    if job.config.gpus_per_node is not None:
        limits["nvidia.com/gpu"] = str(job.config.gpus_per_node)
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]  # Ray's objects
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.config.volume is not None:
        claim, _, path = job.config.volume.partition(":")
        volumes.append({"name": "results", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "results", "mountPath": path})
    container: dict[str, Any] = {
        "name": name,
        "image": job.config.image,
        "resources": {"requests": dict(limits), "limits": limits},
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if head:
        container["ports"] = [{"name": port, "containerPort": number} for port, number in _PORTS.items()]
    security = {"runAsNonRoot": True, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": security,
            "containers": [container],
            "volumes": volumes,
        }
    }
