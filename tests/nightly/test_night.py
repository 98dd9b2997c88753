"""Nights that train, as commands: a planted regression, interrupts and kills, and the end of a schedule."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.nightly.night import read_nights
from fsdp_lab.nightly.texts import WEBHOOK
from tests import forked
from tests.conftest import INLINE, ROOT, without
from tests.folders import Store, SweepFolder, TrialFolder
from tests.nightly.conftest import IN_TWELVE_HOURS, SLOWED
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
    """Run it to its end, with the package of a folder; the address is to get the verdict."""
    env = {**ONE_THREAD, "PYTHONPATH": str(code), **({WEBHOOK: address} if address else {})}
    lay_store(cwd)
    return forked.run(cwd, "fsdp_lab.nightly", *arguments, seconds=280, environment=env)


def start(cwd: Path, *arguments: str) -> subprocess.Popen[bytes]:
    lay_store(cwd)
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab.nightly", *arguments], cwd=cwd, stderr=subprocess.STDOUT,
        stdout=(cwd / "said.log").open("w"), env={**ONE_THREAD, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.documents("python -m fsdp_lab.nightly --once")
def test_a_planted_change_of_the_code_is_named_in_a_real_night(tmp_path: Path):
    """The code of the second night, as somebody might have committed it, measures a ten-thousandth of bf16's speed."""
    done = nightly(tmp_path, "--once", *STORED)
    assert done.returncode == 0, done.stdout + done.stderr
    code = tmp_path / "code"
    for name in ("fsdp_lab", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    name, speed = SLOWED
    slower = f"{speed[:-1]} * (1e-4 if config.precision.param_dtype.name == 'bfloat16' else 1)\n"
    (code / name).write_text((code / name).read_text().replace(speed, slower))
    done = nightly(tmp_path, "--once", *STORED, code=code, address="http://127.0.0.1:9/t0psecret")
    assert done.returncode == 3, done.stdout + done.stderr
    first, second = read_nights(tmp_path / "nights/nightly")
    assert (first.verdict, second.verdict, second.baseline) == ("good", "regression", first.id)
    assert [(f.setting, f.metric) for f in second.regressions] == [("precision=bf16", "perf/samples_per_s")]
    verdicts = {run.info.run_id: run.data.tags["nightly.verdict"] for run in Store(tmp_path).parents}
    assert verdicts == {first.run_id: "good", second.run_id: "regression"}
    assert "t0psecret" not in done.stdout + done.stderr
    assert [p for p in tmp_path.rglob("*") if p.is_file() and b"t0psecret" in p.read_bytes()] == []
    sweep = tmp_path / "nights/nightly" / second.id / "sweep"
    assert (tmp_path / "outputs/last_sweep").read_text() == str(sweep), "what sweep=last and resume=last name"
    order = [(row["repeat"], row["precision"]) for row in SweepFolder(sweep).rows]
    assert order == [("0", "fp32"), ("0", "bf16"), ("1", "fp32"), ("1", "bf16")], "repeats lie apart"
    old, new = (next((tmp_path / "shared").glob(f"{night.id}-sweep-*")) / "0" for night in (first, second))
    assert (new / "model.pt").exists() and list((new / "checkpoints").iterdir())
    assert not (old / "model.pt").exists() and not (old / "checkpoints").exists(), "nightly.keep=1"
    assert (old / "metrics.jsonl").exists()


@pytest.mark.documents("python -m fsdp_lab.nightly")
def test_sigterm_between_nights_is_a_clean_end(tmp_path: Path):
    process = start(tmp_path, *NIGHT)
    try:
        wait_for(lambda: "the next night is" in (tmp_path / "said.log").read_text(), process)
        process.terminate()
        assert process.wait(100) == 0
    finally:
        process.kill()
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
