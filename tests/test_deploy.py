"""The files of deploy/, read by what reads them: their own checkers where installed, and our own parsers always."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from fsdp_lab.commands.nightly import night_times, read_study, read_words
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
NOW, NEXT = datetime(2026, 11, 20, 12, tzinfo=UTC), datetime(2026, 11, 21, 2, tzinfo=UTC)
BLOCKS = re.findall(r"```\n(.*?)```", (DEPLOY / "README.md").read_text(), flags=re.DOTALL)


def night_of(words: Sequence[str]) -> Any:
    """The study of a command that runs one night: what follows `-m fsdp_lab.nightly`, read as we read it."""
    place = list(words).index("fsdp_lab.nightly")
    option, _, overrides = read_words(list(words[place + 1 :]))
    study = read_study(overrides)
    assert (words[place - 1], option, study.name) == ("-m", "--once", "nightly")
    return study


def checked(*command: str, folder: Path = ROOT) -> None:
    """A checker is content, where it is installed."""
    found = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"no {command[0]}")
    variables = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    done = subprocess.run([found, *command[1:]], env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "fsdp-lab" not in done.stderr, done.stdout + done.stderr


def test_the_systemd_units(tmp_path: Path):
    names, (service, timer) = ("fsdp-lab-nightly.service", "fsdp-lab-nightly.timer"), ({}, {})
    for name, sections in zip(names, (service, timer), strict=True):
        parser = configparser.RawConfigParser(strict=True)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string((DEPLOY / name).read_text())
        sections.update({section: dict(parser[section]) for section in parser})
        (tmp_path / name).write_text((DEPLOY / name).read_text().replace("%h", str(tmp_path)))
    night_of(shlex.split(service["Service"]["ExecStart"]))
    assert service["Service"]["Type"] == "oneshot" and not {"SuccessExitStatus", "Restart"} & {*service["Service"]}
    # what is started is in the folder that it is started in
    assert service["Service"]["ExecStart"].startswith(service["Service"]["WorkingDirectory"] + "/.venv/bin/python")
    assert timer["Timer"]["Persistent"] == "true"
    assert re.fullmatch(r"\*-\*-\* \d\d:\d\d:\d\d", timer["Timer"]["OnCalendar"])
    (home := tmp_path / "fsdp_lab/.venv/bin").mkdir(parents=True)
    (home / "python").touch(0o755)
    checked("systemd-analyze", "--user", "verify", str(tmp_path / names[1]), folder=tmp_path)


def test_the_line_for_cron():
    (line,) = [line for line in (DEPLOY / "crontab").read_text().splitlines() if not line.startswith("#")]
    *schedule, command = line.split(None, 5)
    assert "%" not in command  # cron takes it for the end of the line
    python = next(part for part in re.split(r"&&|\|\||>>", command) if "fsdp_lab.nightly" in part)
    night_of(shlex.split(python))
    subprocess.run(["sh", "-n", "-c", command], check=True, timeout=10)
    assert night_times(" ".join(schedule), "UTC", NOW)(NOW) == NEXT


def test_the_sweep_for_slurm():
    """What a shell makes of it; tests/cluster/test_jobs.py runs it."""
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sbatch")], check=True, timeout=10)
    checked("shellcheck", str(DEPLOY / "slurm.sbatch"))


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


def test_the_night_for_kubernetes():
    from ray.dashboard.modules.job.cli import submit  # its own options, by its own reader

    (job,) = yaml.safe_load_all((DEPLOY / "kuberay-cronjob.yaml").read_text())
    spec, template = job["spec"], job["spec"]["jobTemplate"]["spec"]
    assert (job["apiVersion"], job["kind"], spec["concurrencyPolicy"]) == ("batch/v1", "CronJob", "Forbid")
    assert night_times(spec["schedule"], "UTC", NOW)(NOW) == NEXT
    pod = template["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and template["backoffLimit"] == 0
    (container,) = pod["containers"]
    command, words = container["command"], container["args"]
    study = night_of(words)
    assert study.settings["workers"] == 8 and study.config.tracking.uri == "http://mlflow:5000"
    assert command[:3] == ["ray", "job", "submit"] and command[-1] == "--"
    context = submit.make_context("submit", [*command[3:5], "--", *words], resilient_parsing=False)
    assert list(context.params["entrypoint"]) == words


def test_the_night_for_slurm():
    """The line for scrontab, whose entries are jobs."""
    (nightly,) = (block for block in BLOCKS if "scrontab" in block)
    assert "--signal=B:TERM@120" in nightly  # without B: it goes to steps, of which there are none
    (command,) = re.findall(r"exec (\S+ -m fsdp_lab.nightly --once)", nightly)  # else Slurm's signal ends at the shell
    night_of(shlex.split(command))


def test_the_image():
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied and all((ROOT / name).exists() for name in copied)
    assert "--constraint constraints.txt" in text
    checked("hadolint", str(DEPLOY / "Dockerfile"))


def test_each_is_installed_by_two_lines():
    assert len(BLOCKS) == 4 and all(len(block.splitlines()) <= 2 for block in BLOCKS)
    sweeps = (ROOT / "docs" / "clusters.md").read_text()
    named = set(re.findall(r"deploy/([\w.-]+)", sweeps + "".join(BLOCKS).replace("nightly.*", "nightly.service")))
    assert {f.name for f in DEPLOY.iterdir()} == {*named, "fsdp-lab-nightly.timer", "README.md"}
