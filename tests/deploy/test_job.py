"""What is written for a cluster manager, without one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from fsdp_lab.config.job import JobConfig
from fsdp_lab.deploy import slurm
from fsdp_lab.deploy.job import Job
from tests import forked
from tests.conftest import run_cli
from tests.deploy.schemas import schema
from tests.sweep.conftest import PLAIN, TINY, wait_for

pytestmark = pytest.mark.ci

SWEEP = ("-m", *PLAIN, *TINY, "optimizer.lr=1e-3,2e-3")
POD = ("cluster=kuberay", "cluster.job.image=registry.example.com/lab:1", "cluster.job.cpus_per_node=4",
       "cluster.job.memory_gib_per_node=8", "cluster.job.nodes=3", "cluster.job.gpus_per_node=1")  # fmt: skip
VOLUME = "cluster.job.volume=shared-claim:/shared"


def words_in(script: Path, name: str) -> list[str]:
    """A list of words of a batch script, as bash reads it."""
    (line,) = re.findall(rf"^{name}=\((.*)\)$", script.read_text(), re.MULTILINE)
    return shlex.split(line)


def test_the_script_types_what_was_typed_without_what_slurm_was_asked_for(tmp_path: Path):
    asked = ("cluster.job.nodes=2", "cluster.job.gpus_per_node=8", "cluster.job.memory_gib_per_node=1.5",
             "cluster.job.sbatch=[partition:gpu,time:08:00:00,comment:a b,exclusive]")  # fmt: skip
    done = run_cli(tmp_path, *SWEEP, "cluster=slurm", "cluster.job.submit=false", *asked)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "out" / "job" / "job.sbatch"
    assert f"to submit it: sbatch {script}" in done.stdout
    assert stat.S_IMODE(script.stat().st_mode) == 0o700 and stat.S_IMODE(script.parent.stat().st_mode) == 0o700
    directives = [shlex.split(line)[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert directives[-8:] == ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--mem=1536M",
                               "--partition=gpu", "--time=08:00:00", "--comment=a b", "--exclusive"]  # fmt: skip
    typed = words_in(script, "command")
    assert not [word for word in typed if word.startswith(("cluster=", "cluster.job."))]
    assert typed[-2:] == [f"hydra.sweep.dir={tmp_path}/out", f"cluster.storage_path={tmp_path}/out/storage"]
    assert typed[:3] == ["-m", "fsdp_lab", "-m"] and "optimizer.lr=1e-3,2e-3" in typed
    assert words_in(script, "again") == ["-m", "fsdp_lab", f"resume={tmp_path}/out"]
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True, timeout=60)
    done = run_cli(tmp_path, *SWEEP, "cluster=slurm", "cluster.job.submit=false")
    assert done.returncode == 2 and "hydra.sweep.dir=out is a job's folder" in done.stderr


def test_a_resume_of_a_job_that_has_not_run_says_how_to_submit_it(tmp_path: Path):
    words = ("sharding=per_block", "cluster=slurm", "cluster.job.submit=false", "cluster.num_workers=2")
    assert forked.run(tmp_path, "fsdp_lab", *words, "hydra.run.dir=out").returncode == 0
    done = forked.run(tmp_path, "fsdp_lab", "resume=out")
    assert done.returncode == 2
    assert "its job has not started a sweep yet; submit it with sbatch" in done.stderr and "job.sbatch" in done.stderr


def test_an_option_of_ones_own_says_where_and_how(tmp_path: Path):
    option = tmp_path / "mine" / "cluster" / "site.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("storage_path: s3://bucket/prefix\nmax_failures: 3\njob:\n  manager: slurm\n  submit: false\n")
    done = run_cli(tmp_path, "--config-dir=mine", "cluster=site", "cluster.max_failures=2", *PLAIN, *TINY)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "out" / "job" / "job.sbatch"
    typed = words_in(script, "command")
    assert "--config-dir=mine" in typed and "cluster.storage_path='s3://bucket/prefix'" in typed
    assert [word for word in typed if word.startswith("cluster.max_failures=")] == ["cluster.max_failures=2"]
    assert words_in(script, "again")[-1] == "--config-dir=mine"


def test_a_sweep_on_kubernetes_is_what_the_operator_takes(tmp_path: Path):
    done = run_cli(tmp_path, *SWEEP, *POD, VOLUME)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "out" / "job" / "rayjob.yaml"
    assert f"kubectl apply -f {file}" in done.stdout
    job = yaml.safe_load(file.read_text())
    Draft202012Validator(schema("RayJob")).validate(job)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?", job["metadata"]["name"]), "the operator's limit"
    before, again, first = job["spec"]["entrypoint"].split("exec ")
    assert before == "cd /shared || exit; export FSDP_LAB_JOB=out/job/rayjob.yaml; if [ -e out/sweep.json ]; then "
    assert shlex.split(again)[:4] == ["python", "-m", "fsdp_lab", "resume='out'"]
    typed = shlex.split(first)
    assert typed[:4] == ["python", "-m", "fsdp_lab", "-m"]
    assert typed[-3:] == ["cluster.address=auto", "cluster.job.nodes=3", "cluster.storage_path=/shared/storage"]
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 2
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "8192Mi", "nvidia.com/gpu": "1"}


def test_every_night_on_kubernetes_has_the_schedule_of_the_nights(tmp_path: Path):
    words = ("nightly.cron='30 3 * * *'", "nightly.timezone=Europe/Berlin", "nightly.folder=nights")
    done = forked.run(tmp_path, "fsdp_lab.nightly", *words, *POD, VOLUME)
    assert done.returncode == 0, done.stderr
    cron = yaml.safe_load((tmp_path / "nights" / "nightly" / "job" / "raycronjob.yaml").read_text())
    Draft202012Validator(schema("RayCronJob")).validate(cron)
    assert (cron["spec"]["schedule"], cron["spec"]["timeZone"]) == ("30 3 * * *", "Europe/Berlin")
    assert "-m fsdp_lab.nightly --once" in cron["spec"]["jobTemplate"]["entrypoint"]


def test_slurm_has_no_schedule_of_nights(tmp_path: Path):
    done = forked.run(tmp_path, "fsdp_lab.nightly", "cluster=slurm")
    assert done.returncode == 2 and "add --once" in done.stderr


def test_a_job_of_one_node_keeps_the_folder_of_its_sweep(tmp_path: Path):
    script = slurm.batch_script(Job(["-m", "fsdp_lab"], [], "", tmp_path, JobConfig()))
    assert "storage_path" not in script.partition("# ---")[0]


def fake(folder: Path, name: str, script: str) -> None:
    """Write a command that answers as one of Slurm does; tests/cluster/test_slurm.py has the real ones."""
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("echo 'sbatch: error: Invalid --time specification' >&2; exit 1", 2, "It requested --requeue --nodes=1 "),
        ("echo 'site: account lab'; echo '123;cluster'", 0, "job 123 was submitted"),
        ("echo 'Submitted batch job 123'", 0, "job 123 was submitted"),
        ("echo 'site: account lab'", 2, "sbatch printed no job number, but: site: account lab"),
    ],
)
def test_what_sbatch_answers(tmp_path: Path, script: str, code: int, message: str):
    fake(tmp_path, "sbatch", script)
    own = ("sharding=per_block", "cluster.num_workers=2", "hydra.run.dir=out", "cluster=slurm")
    words = (*own, "cluster.job.sbatch=[time:8h]")
    done = forked.run(tmp_path, "fsdp_lab", *words, environment={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.returncode == code, done.stderr
    assert message in done.stdout + done.stderr
    # a job that may be in the queue keeps its script
    assert (tmp_path / "out" / "job" / "job.sbatch").exists() == ("Invalid" not in script)
    if "Invalid" in script:
        assert (
            "refused the job: Invalid --time specification. It" in done.stderr and "--time=8h. cluster" in done.stderr
        )


@pytest.fixture(scope="module")
def script_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """`script_with(options, folder)`: the batch script that a trial writes with options of sbatch, in a folder."""

    @cache
    def made_in(options: str) -> Path:
        folder = tmp_path_factory.mktemp("script")
        words = ("sharding=per_block", "cluster.num_workers=2", "cluster=slurm", "cluster.job.submit=false")
        words = (*words, f"cluster.job.sbatch=[{options}]", f"hydra.run.dir={folder}/out")
        assert forked.run(folder, "fsdp_lab", *words).returncode == 0
        return folder

    def script_with(options: str, folder: Path) -> Path:
        made = made_in(options)
        shutil.copytree(made / "out", folder / "out")
        script = folder / "out" / "job" / "job.sbatch"
        script.write_text(script.read_text().replace(str(made), str(folder)))
        return script

    return script_with


@pytest.mark.parametrize(
    ("options", "epoch", "queue", "message"),
    [
        ("", True, "exit 0", "the job is back in the queue, and will resume"),
        ("", True, "exit 1", "the job could not be requeued; to resume: sbatch"),
        ("", False, "exit 0", "no epoch was finished since the start: another start would not get further"),
        ("no-requeue", True, "exit 0", "the time limit is near; to resume: sbatch"),
    ],
)
def test_before_its_time_limit_a_job_is_requeued_if_it_gets_further(
    script_with: Callable[[str, Path], Path], tmp_path: Path, options: str, epoch: bool, queue: str, message: str
):
    script = script_with(options, tmp_path)
    text = script.read_text()
    assert ("#SBATCH --requeue" in text) == (not options)
    fake(tmp_path, "scontrol", f"echo asked >> {tmp_path}/asked; {queue}")
    fake(tmp_path, "sleep", "exit 0")  # the minute in which Slurm ends this start
    (script.with_name("progress")).touch()  # of the start before
    finish = f"touch {script.with_name('progress')};" if epoch else ""
    # the driver, as it ends when it is told to
    fake(
        tmp_path, "driver", f"trap 'exit 130' TERM; {finish} touch {tmp_path}/trains; while :; do /bin/sleep 0.1; done"
    )
    script.write_text(re.sub("(?m)^python=.*$", f"python={tmp_path}/driver", text))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "SLURM_RESTART_COUNT": "1"}
    command, environment = ["bash", str(script)], {**os.environ, **slurm, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        wait_for(lambda: (tmp_path / "trains").exists(), job, 60)
        job.send_signal(signal.SIGUSR1)
        out, _ = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "starts on here (start 2)" in out and message in out
    assert (tmp_path / "asked").exists() == (epoch and not options)
