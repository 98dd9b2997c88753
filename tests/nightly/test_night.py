"""Nights that train, as commands: a planted regression, interrupts and kills, and the end of a schedule."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.nightly.gate import Night
from fsdp_lab.nightly.night import read_nights
from fsdp_lab.nightly.texts import WEBHOOK
from tests import forked
from tests.conftest import INLINE, ROOT, without
from tests.folders import Store, SweepFolder, TrialFolder
from tests.nightly.conftest import IN_TWELVE_HOURS
from tests.processes import descendants, still_running
from tests.servers import held_in, lay_store
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


Two = tuple[Path, list[Night], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    """A good night, and one with code whose bf16 measures a ten-thousandth of its speed, as somebody might have
    committed it: their folder, both, and what the second one printed."""
    folder, code = tmp_path_factory.mktemp("nights"), tmp_path_factory.mktemp("code")
    done = nightly(folder, "--once", *STORED)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("fsdp_lab", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    file, speed = code / "fsdp_lab/training/speed.py", "global_batch_size / run.seconds"
    assert file.read_text().count(f"{speed}\n") == 1, "it has changed: plant it anew"
    slower = f"{speed} * (1e-4 if config.precision.param_dtype.name == 'bfloat16' else 1)"
    file.write_text(file.read_text().replace(f"{speed}\n", f"{slower}\n"))
    second = nightly(folder, "--once", *STORED, code=code, address="http://127.0.0.1:9/t0psecret")
    return folder, read_nights(folder / "nights/nightly"), second


@pytest.mark.documents("python -m fsdp_lab.nightly --once")
def test_a_slower_setting_is_named_and_its_address_is_secret(two: Two):
    folder, (first, second), done = two
    assert (first.verdict, first.baseline) == ("good", None)
    assert done.returncode == 3, done.stdout + done.stderr
    assert [(f.setting, f.metric) for f in second.regressions] == [("precision=bf16", "perf/samples_per_s")]
    assert (second.verdict, second.baseline) == ("regression", first.id)
    verdicts = {run.info.run_id: run.data.tags["nightly.verdict"] for run in Store(folder).parents}
    assert verdicts == {first.run_id: "good", second.run_id: "regression"}
    last = (folder / "outputs/last_sweep").read_text()
    assert last == str(folder / "nights/nightly" / second.id / "sweep"), "what sweep=last and resume=last name"
    assert "t0psecret" not in done.stdout + done.stderr and held_in(folder, "t0psecret") == []


def test_repeats_lie_apart_and_old_nights_lose_their_checkpoints(two: Two):
    folder, nights, _ = two
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
