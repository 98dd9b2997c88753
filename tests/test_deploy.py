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

import pytest
import yaml
from jsonschema import Draft202012Validator

from fsdp_lab.commands.nightly import night_times, read_study, read_words
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def arguments_of(words: Sequence[str]) -> list[str]:
    """What follows `-m fsdp_lab.nightly`."""
    place = list(words).index("fsdp_lab.nightly")
    assert words[place - 1] == "-m"
    return list(words[place + 1 :])


def check_command(words: Sequence[str]) -> None:
    """Our own command takes these words, and runs one night."""
    option, _, overrides = read_words(arguments_of(words))
    assert option == "--once"
    assert read_study(overrides).name == "nightly"


def check_schedule(cron: str) -> None:
    assert night_times(cron, "UTC", NOW)(NOW) == datetime(2026, 11, 21, 2, tzinfo=UTC)


def unit(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / name).read_text())
    return parser


def test_the_systemd_units(tmp_path: Path):
    service, timer = unit("fsdp-lab-nightly.service"), unit("fsdp-lab-nightly.timer")
    check_command(shlex.split(service["Service"]["ExecStart"]))
    assert service["Service"]["Type"] == "oneshot" and "SuccessExitStatus" not in service["Service"]
    assert "Restart" not in service["Service"]
    # what is started is in the folder that it is started in
    assert service["Service"]["ExecStart"].startswith(service["Service"]["WorkingDirectory"] + "/.venv/bin/python")
    assert timer["Timer"]["Persistent"] == "true"
    assert re.fullmatch(r"\*-\*-\* \d\d:\d\d:\d\d", timer["Timer"]["OnCalendar"])
    if shutil.which("systemd-analyze"):
        for name in ("fsdp-lab-nightly.service", "fsdp-lab-nightly.timer"):
            home = tmp_path / "fsdp_lab/.venv/bin"
            home.mkdir(parents=True, exist_ok=True)
            (home / "python").touch(0o755)
            text = (DEPLOY / name).read_text().replace("%h", str(tmp_path))
            (tmp_path / name).write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(tmp_path / "fsdp-lab-nightly.timer")],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "fsdp-lab" not in done.stderr, done.stderr


def test_the_lines_for_cron():
    lines = [line for line in (DEPLOY / "crontab").read_text().splitlines() if not line.startswith("#")]
    options = []
    for line in lines:
        cron, command = " ".join(line.split()[:5]), line.split(None, 5)[5]
        assert "%" not in command  # cron takes it for the end of the line
        python = next(part for part in re.split(r"&&|\|\||>>", command) if "fsdp_lab.nightly" in part)
        options.append((cron, read_words(arguments_of(shlex.split(python)))[0]))
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=10)
    assert [option for _, option in options] == ["--once"]
    check_schedule(options[0][0])


def test_the_sweep_for_slurm():
    """What a shell makes of it; tests/cluster/test_slurm.py runs it."""
    script = DEPLOY / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True, timeout=60)


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
    (job,) = yaml.safe_load_all((DEPLOY / "kuberay-cronjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    spec = job["spec"]
    check_schedule(spec["schedule"])
    assert spec["concurrencyPolicy"] == "Forbid"
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and spec["jobTemplate"]["spec"]["backoffLimit"] == 0
    (container,) = pod["containers"]
    assert container["command"][:3] == ["ray", "job", "submit"] and container["command"][-1] == "--"
    words = container["args"]
    option, _, overrides = read_words(arguments_of(words))
    assert option == "--once"
    study = read_study(overrides)
    assert study.settings["workers"] == 8 and study.config.tracking.uri == "http://mlflow:5000"
    from ray.dashboard.modules.job.cli import submit  # its own options, by its own reader

    address = container["command"][3:5]
    context = submit.make_context("submit", [*address, "--", *words], resilient_parsing=False)
    assert list(context.params["entrypoint"]) == words


def test_the_night_for_slurm():
    """The line for scrontab, whose entries are jobs."""
    (nightly,) = (block for block in blocks() if "scrontab" in block)
    assert "--signal=B:TERM@120" in nightly  # without B: it goes to steps, of which there are none
    (command,) = re.findall(r"exec (\S+ -m fsdp_lab.nightly --once)", nightly)  # else Slurm's signal ends at the shell
    check_command(shlex.split(command))


def test_the_image():
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied and all((ROOT / name).exists() for name in copied)
    assert "--constraint constraints.txt" in text
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint to lint the Dockerfile")
    command = [hadolint, str(DEPLOY / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def blocks() -> list[str]:
    return re.findall(r"```\n(.*?)```", (DEPLOY / "README.md").read_text(), flags=re.DOTALL)


def test_each_is_installed_by_two_lines():
    assert len(blocks()) == 4 and all(len(block.splitlines()) <= 2 for block in blocks())
    sweeps = (ROOT / "docs" / "clusters.md").read_text()
    named = set(re.findall(r"deploy/([\w.-]+)", sweeps + "".join(blocks()).replace("nightly.*", "nightly.service")))
    assert all((DEPLOY / name).exists() for name in named)
    assert {f.name for f in DEPLOY.iterdir()} == {*named, "fsdp-lab-nightly.timer", "README.md"}
