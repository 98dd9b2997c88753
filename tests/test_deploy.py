"""The files of deploy/, read by what reads them: their own checkers where installed, and our own parsers always."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from fsdp_lab.commands.nightly import night_times, read_study, read_words
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
BLOCKS = re.findall(r"```\n(.*?)```", (DEPLOY / "README.md").read_text(), flags=re.DOTALL)


def night_of(words: list[str]) -> Any:
    """The study of a command that runs one night: what follows `-m fsdp_lab.nightly`, read as we read it."""
    place = words.index("fsdp_lab.nightly")
    option, _, overrides = read_words(words[place + 1 :])
    study = read_study(overrides)
    assert (words[place - 1], option, study.name) == ("-m", "--once", "nightly")
    return study


def test_a_port_that_is_in_use_is_named_before_anything_is_served():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        for target, made in (("ui", ".installed"), ("docs-serve", ".docs")):
            words = ["make", "-o", f"{sys.prefix}/{made}", target, f"PORT={port}", f"VENV={sys.prefix}"]
            own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
            done = subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60)
            assert done.returncode == 2 and done.stdout == "", done.stdout
            assert f"port {port} of 127.0.0.1 cannot be used; choose another: make {target} PORT=" in done.stderr


def next_night(schedule: str) -> str:
    return night_times(schedule, "UTC", noon := datetime(2026, 11, 20, 12, tzinfo=UTC))(noon).isoformat()


def cron_line() -> list[str]:
    """The five fields of the schedule, and the command."""
    (line,) = [line for line in (DEPLOY / "crontab").read_text().splitlines() if not line.startswith("#")]
    return line.split(None, 5)


def kubernetes_night() -> Any:
    return yaml.safe_load((DEPLOY / "kuberay-cronjob.yaml").read_text())["spec"]


def read_unit(name: str) -> dict[str, str]:
    """The values of a unit, which systemd verifies below."""
    return dict(re.findall(r"^(\w+)=(.+)$", (DEPLOY / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("command", [
    ("shellcheck", "slurm.sbatch"),
    ("hadolint", "Dockerfile"),
    ("systemd-analyze", "--user", "verify", "fsdp-lab-nightly.timer"),
    ("sh", "-n", "-c", cron_line()[-1]),
])  # fmt: skip
def test_its_checker_is_content(tmp_path: Path, command: tuple[str, ...]):
    """In a folder in which the started Python is, as seen from home."""
    shutil.copytree(DEPLOY, tmp_path, dirs_exist_ok=True)
    for unit in tmp_path.glob("fsdp-lab-nightly.*"):
        unit.write_text(unit.read_text().replace("%h", str(tmp_path)))
    (tmp_path / "fsdp_lab/.venv/bin").mkdir(parents=True)
    (tmp_path / "fsdp_lab/.venv/bin/python").touch(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if shutil.which(command[0], path=path) is None:
        pytest.skip(f"no {command[0]}")
    environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "fsdp-lab" not in done.stderr, done.stdout + done.stderr


def test_each_night_starts_the_study_once_at_its_time():
    service = read_unit("fsdp-lab-nightly.service")
    night_of(shlex.split(service["ExecStart"]))
    assert service["Type"] == "oneshot" and not {"SuccessExitStatus", "Restart"} & {*service}
    assert service["ExecStart"].startswith(service["WorkingDirectory"] + "/.venv/bin/python")
    assert read_unit("fsdp-lab-nightly.timer")["Persistent"] == "true"
    *schedule, command = cron_line()
    assert "%" not in command  # cron takes it for the end of the line
    night_of(shlex.split(next(part for part in re.split(r"&&|\|\||>>", command) if "fsdp_lab.nightly" in part)))
    (slurm,) = (block for block in BLOCKS if "scrontab" in block)
    assert "--signal=B:TERM@120" in slurm  # without B: it goes to steps, of which there are none
    (command,) = re.findall(r"exec (\S+ -m fsdp_lab.nightly --once)", slurm)  # else Slurm's signal ends at the shell
    night_of(shlex.split(command))
    assert next_night(" ".join(schedule)) == next_night(kubernetes_night()["schedule"]) == "2026-11-21T02:00:00+00:00"


def test_the_sweep_for_kubernetes_is_what_the_operator_takes():
    """tests/cluster/test_jobs.py runs its command."""
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    Draft202012Validator(json.loads((ROOT / "tests" / "rayjob.schema.json").read_text())).validate(job)
    spec = job["spec"]["rayClusterSpec"]
    assert spec["rayVersion"] == importlib.metadata.version("ray"), "that of constraints.txt, as in the image"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        limits, given = container["resources"]["limits"], group["rayStartParams"]
        assert (given["num-cpus"], given["num-gpus"]) == (limits["cpu"], limits["nvidia.com/gpu"])


def test_the_night_for_kubernetes_is_a_job_that_ray_takes():
    from ray.dashboard.modules.job.cli import submit  # its own options, by its own reader

    spec = kubernetes_night()
    template = spec["jobTemplate"]["spec"]
    pod = template["template"]["spec"]
    assert (spec["concurrencyPolicy"], pod["restartPolicy"], template["backoffLimit"]) == ("Forbid", "Never", 0)
    (container,) = pod["containers"]
    command, words = container["command"], container["args"]
    study = night_of(words)
    assert study.settings["workers"] == 8 and study.config.tracking.uri == "http://mlflow:5000"
    assert command[:3] == ["ray", "job", "submit"] and command[-1] == "--"
    context = submit.make_context("submit", [*command[3:5], "--", *words], resilient_parsing=False)
    assert list(context.params["entrypoint"]) == words
