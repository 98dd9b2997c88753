"""Nights that train, as commands: a planted regression, interrupts and kills, and the end of a schedule."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.nightly.gate import Night
from fsdp_lab.nightly.night import read_nights
from fsdp_lab.nightly.texts import WEBHOOK
from tests import forked
from tests.conftest import INLINE, ROOT, STORE, without
from tests.folders import Store, SweepFolder, TrialFolder
from tests.nightly.conftest import IN_TWELVE_HOURS, webhook
from tests.processes import descendants, still_running
from tests.servers import lay_store
from tests.sweep.conftest import wait_for

pytestmark = pytest.mark.ci

# Two settings with two repeats. Of a real speed nothing is judged: it would have to fall by a factor of a hundred.
NIGHT = (
    *without(INLINE, "precision=", "hydra."), "training.epochs=2",
    "precision=fp32,bf16", "nightly.folder=nights", "nightly.repeats=2", "nightly.tolerance.samples_per_s=0.99",
    "nightly.tolerance.data_wait_share=1", *IN_TWELVE_HOURS,
)  # fmt: skip
STORED = (*NIGHT, "nightly.keep=1", "cluster.storage_path=shared")
# Two threads that wait for each other lose a factor of ten when something else takes a core for a moment.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def nightly(cwd: Path, *arguments: str, code: Path = ROOT, address: str = "") -> subprocess.CompletedProcess[str]:
    """Run it to its end, with the package of a folder; the address gets the verdict."""
    env = {**ONE_THREAD, "PYTHONPATH": str(code), **({WEBHOOK: address} if address else {})}
    lay_store(cwd)
    return forked.run(cwd, "fsdp_lab.nightly", *arguments, seconds=280, environment=env)


def start(cwd: Path, *arguments: str) -> subprocess.Popen[bytes]:
    lay_store(cwd)
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab.nightly", *arguments], cwd=cwd, stderr=subprocess.STDOUT,
        stdout=(cwd / "said.log").open("w"), env={**ONE_THREAD, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def changed_code(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the project's code with a change in it, as somebody might have committed it."""
    for name in ("fsdp_lab", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / file).read_text()
    assert text.count(old) == 1, f"{file} has changed: plant it anew"
    (folder / file).write_text(text.replace(old, new))
    return folder


def regressions(night: Night) -> list[tuple[str, str]]:
    return [(f.setting, f.metric) for f in night.regressions]


Two = tuple[Path, list[Night], subprocess.CompletedProcess[str], list[Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    """A good night, and one with code whose bf16 measures a ten-thousandth of its speed.

    Their folder, both, what the second one printed, and what was notified of it.
    """
    folder, copy = tmp_path_factory.mktemp("nights"), tmp_path_factory.mktemp("code") / "code"
    done = nightly(folder, "--once", *STORED)
    assert done.returncode == 0, done.stdout + done.stderr
    speed = "global_batch_size / run.seconds"
    slower = f"{speed} * (1e-4 if config.precision.param_dtype.name == 'bfloat16' else 1)"
    code = changed_code(copy, "fsdp_lab/training/speed.py", f"{speed}\n", f"{slower}\n")
    with webhook() as (address, got):
        second = nightly(folder, "--once", *STORED, code=code, address=address)
    return folder, read_nights(folder / "nights/nightly"), second, got


@pytest.mark.documents("python -m fsdp_lab.nightly --once")
def test_a_slower_setting_is_named_and_its_address_is_secret(two: Two):
    folder, (first, second), done, got = two
    assert (first.verdict, first.baseline) == ("good", None)
    assert done.returncode == 3, done.stdout + done.stderr
    assert regressions(second) == [("precision=bf16", "perf/samples_per_s")]
    assert (second.verdict, second.baseline) == ("regression", first.id)
    assert [trial["setting"] for trial in second.trials] == ["precision=fp32", "precision=bf16"] * 2
    (verdict,) = got
    assert (verdict["verdict"], verdict["night"], verdict["run_id"]) == ("regression", second.id, second.run_id)
    verdicts = {run.info.run_id: run.data.tags["nightly.verdict"] for run in Store(folder).parents}
    assert verdicts == {first.run_id: "good", second.run_id: "regression"}
    last = (folder / "outputs/last_sweep").read_text()
    assert last == str(folder / "nights/nightly" / second.id / "sweep"), "what sweep=last and resume=last name"
    assert "t0psecret" not in done.stdout + done.stderr
    assert [p for p in folder.rglob("*") if p.is_file() and b"t0psecret" in p.read_bytes()] == []


def test_repeats_lie_apart_and_old_nights_lose_their_checkpoints(two: Two):
    folder, nights, _, _ = two
    first, second = (folder / "nights/nightly" / night.id / "sweep" for night in nights)
    order = [(row["repeat"], row["precision"]) for row in SweepFolder(second).rows]
    assert order == [("0", "fp32"), ("0", "bf16"), ("1", "fp32"), ("1", "bf16")]
    old, new = (next((folder / "shared").glob(f"{night.id}-sweep-*")) / "0" for night in nights)
    assert (new / "model.pt").exists() and list((new / "checkpoints").iterdir())
    assert not (old / "model.pt").exists() and not (old / "checkpoints").exists()
    assert (old / "metrics.jsonl").exists() and (first / "report.html").exists()


@pytest.mark.documents("python -m fsdp_lab.nightly")
def test_sigterm_between_nights_is_a_clean_end(tmp_path: Path):
    process = start(tmp_path, *NIGHT)
    try:
        wait_for(lambda: "the next night is" in (tmp_path / "said.log").read_text(), process)
        process.terminate()
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in (tmp_path / "said.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_night_ends_with_its_sweep(tmp_path: Path, number: signal.Signals):
    """It is interrupted after its first result. Beside it no other night starts."""
    words, study = (*STORED, "training.epochs=20"), tmp_path / "nights/nightly"
    process = start(tmp_path, "--once", *words)
    wait_for(lambda: any(TrialFolder(f, f).outcome for f in tmp_path.glob("shared/*/*/")), process)
    second = nightly(tmp_path, "--once", *words)
    assert second.returncode == 2 and "is in use by another sweep or run (process" in second.stderr
    assert "now:      a night runs here (process" in nightly(tmp_path, "--check", *words).stdout
    children = descendants(process.pid)
    process.send_signal(number)
    assert process.wait(100) == (130 if number == signal.SIGTERM else -number)
    assert still_running(children, 100) == [], "the sweep ends with its night"
    assert [night.verdict for night in read_nights(study)] == ["incomplete"]
    assert "to resume" not in (tmp_path / "said.log").read_text()


@pytest.mark.full
def test_a_setting_that_keeps_every_parameter_unsharded_is_named(tmp_path: Path):
    """With two workers, as one has nothing to shard."""
    ray = (
        "data.num_train=64", "data.num_val=32", "training.global_batch_size=32", "training.timing_warmup_steps=0",
        "training.epochs=1", "cluster.num_workers=2", "sharding=root,per_block", "precision=fp32", "offload=none",
        "reshard_after_forward=always", STORE, "nightly.folder=nights",
        "nightly.repeats=1", "nightly.tolerance.samples_per_s=100", "export=false", "checkpoint.mode=off",
    )  # fmt: skip
    assert nightly(tmp_path, "--once", *ray).returncode == 0
    policy = "reshard_after_forward(config.reshard_after_forward)"
    unsharded = changed_code(
        tmp_path / "code", "fsdp_lab/training/parallelize.py", f'"reshard_after_forward": {policy},',
        f'"reshard_after_forward": False if config.sharding.granularity.name == "per_block" else {policy},',
    )  # fmt: skip
    done = nightly(tmp_path, "--once", *ray, code=unsharded)
    assert done.returncode == 3, done.stdout + done.stderr
    assert regressions(read_nights(tmp_path / "nights/nightly")[-1]) == [("sharding=per_block", "memory/peak_bytes")]
