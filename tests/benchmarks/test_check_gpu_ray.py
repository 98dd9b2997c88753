"""Wheels in parts, the verdicts on what a sweep left, and the command's way from a sweep to its exit status."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.check_gpu_ray import children, command, install, parts, sweeps, wheels
from benchmarks.check_gpu_ray.lines import Line, Verdict
from benchmarks.check_gpu_ray.machine import Machine
from tests.conftest import ROOT

pytestmark = pytest.mark.ci

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PASSED, FAILED, NOT_MEASURED = Verdict.passed, Verdict.failed, Verdict.not_measured
CPU = Machine((), "", {"torch": "2.15.0"}, "abc1234", "d1g3st", 16 * 2**30, 2)
MIB = 2**20


# The wheels, in parts


def small_wheels(folder: Path) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{name}-1.0-py3-none-any.whl" for name in ("beta", "alpha", "gamma")]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (700 + number))
    return paths


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, parts.Manifest]:
    """A folder with the parts of a set, of at most 1,000 bytes each."""
    out = tmp_path / "packed"
    out.mkdir()
    return out, parts.pack(small_wheels(tmp_path / "wheels"), out, 1000, {"python": HERE})


def test_parts_are_small_and_join_to_the_same_wheels(tmp_path: Path, packed: tuple[Path, parts.Manifest]) -> None:
    folder, manifest = packed
    assert len(manifest.parts) > 5
    assert max(part.bytes for part in manifest.parts) <= 1000
    assert parts.Manifest.read(folder / parts.MANIFEST) == manifest
    joined = parts.unpack(manifest, folder, tmp_path / "unpacked")
    for path in joined:
        assert path.read_bytes() == (tmp_path / "wheels" / path.name).read_bytes()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_part_is_named_and_carried_again(
    tmp_path: Path, packed: tuple[Path, parts.Manifest], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, manifest = packed
    name = manifest.parts[2].name
    whole = (folder / name).read_bytes()
    damage(folder / name)
    with pytest.raises(parts.DamagedError, match=name):
        parts.unpack(manifest, folder, tmp_path / "unpacked")
    assert not (folder / name).exists()
    (folder / name).write_bytes(whole)
    damage(folder / name)
    words = [str(folder), "--target", str(tmp_path / "site"), "--staging", str(tmp_path / "staging")]
    assert install.main(words) == 1
    assert f"damaged, carry again: {name}" in capsys.readouterr().err
    (folder / name).unlink()
    assert install.main(words) == 3
    assert f"missing: {name}\n" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["--target", "--venv"])
def test_installs_with_pip(tmp_path: Path, place: str) -> None:
    """A real wheel, by the command that the other machine runs; an environment may have no pip of its own."""
    wheel = tmp_path / "hello_there-1.0-py3-none-any.whl"
    info = "hello_there-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("hello_there.py", "said = 'hello'\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hello-there\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"hello_there.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    parts.pack([wheel], tmp_path, 500, {})
    site = tmp_path / "site"
    if place == "--venv":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(site)], check=True, timeout=300)
    words = ["-m", "benchmarks.check_gpu_ray.install", str(tmp_path), place, str(site)]
    words += ["--staging", str(tmp_path / "staging")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert list(site.rglob("hello_there.py"))
    assert list(site.rglob("__pycache__/hello_there.*.pyc")) or place == "--venv"


def test_what_pytorch_brings_stays_at_home() -> None:
    everything = {"ray": "2", "torch": "2", "numpy": "2", "nvidia-nccl-cu13": "2", "triton": "3", "plotly": "7"}
    assert wheels.needed(everything, {"torch": "2", "numpy": "2"}, ["Plotly"]) == {"ray": "2"}
    with pytest.raises(ValueError, match="plottly"):
        wheels.needed(everything, {}, ["plottly"])


# The verdicts


def trial(status: str = "finished", **more: Any) -> dict[str, Any]:
    """A trial as its sweep leaves it; `more` overrides its figures."""
    content = {
        "status": status,
        "train/loss": 1.8017,
        "val/loss": 1.5933,
        "forecast/error": 0.0,
        "peaks": {"memory/peak_bytes": 9.0 * MIB, "memory/rank0/peak_bytes": 9.0 * MIB},
        "device": "cpu",
        "world_size": 2,
        "error": "",
        "log": "",
    }
    return content | more


def leave(folder: Path, trials: list[dict[str, Any]], status: int = 0, **more: Any) -> sweeps.Left:
    """The folder of a sweep with these trials."""
    keys = ["status", "train/loss", "val/loss", "forecast/error", "error"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["trial", *keys])
        rows.writerows([number, *(one[key] for key in keys)] for number, one in enumerate(trials))
    for number, one in enumerate(trials):
        mine = folder / str(number)
        (mine / "logs").mkdir(parents=True)
        (mine / "logs" / "rank0.log").write_text(one["log"])
        (mine / "facts.json").write_text(json.dumps({"device": one["device"], "world_size": one["world_size"]}))
        if one["peaks"]:
            (mine / "metrics.jsonl").write_text(json.dumps({"epoch": 1, **one["peaks"]}) + "\n")
    return sweeps.Left(status, folder, **more)


def verdicts(sweep: sweeps.PlannedSweep, left: sweeps.Left, where: Machine = CPU) -> dict[str, Verdict]:
    lines = sweep.judge(left, where, 12.0)
    assert [line.name for line in lines] == sweep.names
    return {line.name.partition(": ")[2]: line.verdict for line in lines}


def failed(sweep: sweeps.PlannedSweep, left: sweeps.Left, where: Machine = CPU) -> set[str]:
    return {name for name, verdict in verdicts(sweep, left, where).items() if verdict is FAILED}


def test_good_readme_sweep_passes(tmp_path: Path) -> None:
    result = verdicts(sweeps.readme(CPU), leave(tmp_path, [trial()] * 4))
    assert set(result) == {"outcomes", "device", "losses", "forecast error"}
    assert set(result.values()) == {PASSED}


@pytest.mark.parametrize(
    ("trials", "status", "names"),
    [
        ([trial()] * 3, 0, {"outcomes"}),
        ([trial()] * 4, 1, {"outcomes"}),
        ([trial()] * 3 + [trial("failed", error="boom")], 1, {"outcomes"}),
        ([trial()] * 3 + [trial(device="NVIDIA H200")], 0, {"device"}),
        ([trial()] * 3 + [trial(world_size=1)], 0, {"device"}),
        ([trial()] * 3 + [trial(**{"val/loss": 1.5945})], 0, {"losses"}),
        ([trial()] * 3 + [trial(**{"train/loss": ""})], 0, {"losses"}),
        ([trial()] * 3 + [trial(**{"forecast/error": 0.01})], 0, {"forecast error"}),
        ([trial()] * 3 + [trial(**{"forecast/error": ""})], 0, {"forecast error"}),
        ([], 1, {"outcomes", "device", "losses", "forecast error"}),
    ],
)
def test_readme_sweep_fails(tmp_path: Path, trials: list[dict[str, Any]], status: int, names: set[str]) -> None:
    assert failed(sweeps.readme(CPU), leave(tmp_path, trials, status)) == names


def test_repeats(tmp_path: Path) -> None:
    eight = [trial()] * 8
    assert failed(sweeps.repeats(CPU), leave(tmp_path / "good", eight)) == set()
    grown = trial(peaks={"memory/peak_bytes": 9.0 * MIB, "memory/rank0/peak_bytes": 9.0 * MIB + 512})
    assert failed(sweeps.repeats(CPU), leave(tmp_path / "grown", [*eight[:7], grown])) == {"peak memory"}
    assert failed(sweeps.repeats(CPU), leave(tmp_path / "none", [*eight[:7], trial(peaks={})])) == {"peak memory"}
    assert failed(sweeps.repeats(CPU), leave(tmp_path / "seven", eight[:7])) == {"outcomes", "peak memory"}
    assert failed(sweeps.repeats(CPU), leave(tmp_path / "left", eight, processes=("raylet",))) == {"processes"}


@pytest.mark.parametrize(
    ("outcomes", "status", "verdict"),
    [
        (["finished", "oom", "finished"], 0, PASSED),
        (["finished", "failed", "finished"], 1, FAILED),
        (["finished", "failed", "finished"], 0, FAILED),
        (["finished", "oom", "oom"], 0, FAILED),
        (["finished", "finished", "finished"], 0, FAILED),
        (["finished", "oom", "finished"], 1, FAILED),
        (["finished", "oom"], 0, FAILED),
    ],
)
def test_out_of_memory(tmp_path: Path, outcomes: list[str], status: int, verdict: Verdict) -> None:
    left = leave(tmp_path, [trial(outcome) for outcome in outcomes], status)
    assert verdicts(sweeps.out_of_memory(CPU), left) == {"outcomes": verdict}


@pytest.mark.parametrize(
    ("gpus", "capacity"),
    [((), 16 * 2**30), ((), 4096 * 2**30), (("A",), 80 * 2**30), (("A",) * 8, 300 * 2**30)],
)
def test_too_wide_exceeds_the_memory_with_small_weights(gpus: tuple[str, ...], capacity: int) -> None:
    sweep = sweeps.out_of_memory(Machine(gpus, "", {}, "", "", capacity, 16))
    width = int(sweep.words[0].partition("=")[2].split(",")[1])
    assert width * 1024 * 17 * 4 > (sweep.memory_limit or capacity)
    assert width * 8 * 2 * 4 < 1e9
    assert (sweep.memory_limit is None) == bool(gpus)


# State, table, exit status, command


def run_command(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str, expected: Machine = CPU) -> int:
    monkeypatch.setattr(command, "look", lambda device, environment: expected)
    return command.main(["--out", str(out), *words])


def test_command_goes_on_where_the_limit_cut_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 120 s only the first sweep and the last are begun; the next call runs the one between."""
    ran = []

    def run_sweep(sweep: sweeps.PlannedSweep, *_: Any) -> list[Line]:
        ran.append(sweep.name)
        return [line.judged("as expected", True) for line, _ in sweep.lines]

    monkeypatch.setattr(command, "run_sweep", run_sweep)
    assert run_command(monkeypatch, tmp_path, "--device", "cpu", "--limit", "120") == 3
    assert ran == ["readme", "oom"]
    assert "| repeats: processes | none left |  | not measured |  |" in (tmp_path / "check_gpu_ray.md").read_text()
    assert run_command(monkeypatch, tmp_path, "--device", "cpu") == 0
    assert ran == ["readme", "oom", "repeats"]
    assert "not measured" not in (tmp_path / "check_gpu_ray.md").read_text()
    assert run_command(monkeypatch, tmp_path, "--device", "cpu", "--only", "oom", "--again") == 0
    assert ran == ["readme", "oom", "repeats", "oom"]


def test_command_names_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], environment: Any, log: Path, *_: Any) -> children.Ran:
        leave(log.parent / "oom", [trial(), trial("failed"), trial()])
        return children.Ran(1, 20.0, [])

    monkeypatch.setattr(command.children, "run", run)
    assert run_command(monkeypatch, tmp_path, "--device", "cpu", "--only", "oom") == 1
    assert "FAIL: oom: outcomes" in capsys.readouterr().err


# Child processes


_STRAY = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"


def run_child(tmp_path: Path, source: str, limit_s: float, **more: Any) -> str:
    """`children.run` in a process of its own, which becomes the parent of orphans: what it says."""
    text = f"""
import os, sys
from pathlib import Path
from benchmarks.check_gpu_ray import children
children._GRACE_S = 1.0
ran = children.run([sys.executable, "-c", {source!r}], dict(os.environ), Path("log"), {limit_s}, **{more!r})
print(ran.status, ran.left, [process.name() for process in children.descendants()])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


def test_left_process_is_named_and_ended(tmp_path: Path) -> None:
    assert run_child(tmp_path, _STRAY, 600) == "0 ['sleep'] []"


def test_limit_ends_everything(tmp_path: Path) -> None:
    assert run_child(tmp_path, f"{_STRAY}; import time; time.sleep(600)", 1) == "None [] []"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_out_of_memory_for_real(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--only", "oom", "--limit", "540", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.check_gpu_ray", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| oom: outcomes | exit 0: finished, oom, finished | exit 0: finished, oom, finished;" in done.stdout


def test_what_is_not_installed_is_named_without_a_traceback(tmp_path: Path):
    """A Python with nothing but its own library."""
    for name, words in (("check_gpu", "has no PyTorch"), ("check_gpu_ray", "has no torch, torchvision, ray")):
        command = [sys.executable, "-S", "-E", "-m", f"benchmarks.{name}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
