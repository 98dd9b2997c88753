"""The GPU check's own flow, on a CPU: what it runs, keeps, skips, and how it ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.check_gpu import launch, memory, oom, parity, table
from benchmarks.check_gpu.launch import Launcher
from benchmarks.check_gpu.lines import FAIL, NOT_MEASURED, PASS, Bench, Line, Machine, Result
from benchmarks.check_gpu.settings import OPTIONS, trial
from benchmarks.check_gpu.state import State, key_of
from benchmarks.check_gpu.subjects import all_lines
from tests.conftest import ROOT

pytestmark = pytest.mark.ci

CPU = Machine("cpu", "a CPU", 0, 2, "-", "-", "2.15", "-", "-", "-", "3.11")
GPU = Machine("cuda", "NVIDIA H200", 1, 16, "580.1", "9.0", "2.11", "13.0", "2.28", "91500", "3.12", 140 * 2**30)


def bench(machine: Machine = CPU, workers: int = 2, thorough: bool = False, folder: Path = Path("out")) -> Bench:
    return Bench(machine, workers, thorough, str(folder), "abc")


BENCHES = [bench(), bench(CPU, 4), bench(GPU, 1), bench(GPU, 1, True), bench(replace(GPU, devices=8), 8)]


def test_the_options_are_those_of_conf():
    there = {
        (file.parent.name, file.stem): yaml.safe_load(file.read_text())
        for group in OPTIONS
        for file in (ROOT / "conf" / group).glob("*.yaml")
    }
    ours = {(group, name): values for group, options in OPTIONS.items() for name, values in options.items()}
    assert {key: there.get(key) for key in ours} == ours
    whole = ("precision", "sharding", "offload", "reshard_after_forward")
    assert {key for key in there if key[0] in whole} <= ours.keys(), "an option of conf/ that is not checked"


def test_every_line_has_a_name_of_its_own_and_a_valid_trial():
    setting_of = {
        "parity": lambda line, on: parity.full(line.case, line.workers),
        "takehome": lambda line, on: line.case,
        "memory": memory.setting_of,
    }
    for on in BENCHES:
        lines = [line for group in all_lines(on).values() for line in group]
        assert len({line.id for line in lines}) == len(lines)
        for line in lines:
            if line.subject in setting_of:
                trial(setting_of[line.subject](line, on)).check(line.workers)


def test_the_chosen_forecasts_have_every_two_values_that_can_meet():
    def pairs(cases: list[dict[str, Any]]) -> set[Any]:
        return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), 2)}

    apart = ("narrow", "llama")
    chosen = [line.case for line in memory.lines(bench(GPU, 1)) if not line.setting.startswith(apart)]
    every = [line.case for line in memory.lines(bench(GPU, 1, True)) if not line.setting.startswith(apart)]
    assert len(every) == 108
    missing = pairs([case for case in every if case["model"] == "vit_b_16"]) - pairs(chosen)
    assert all(("sharding", "ddp") in pair for pair in missing), missing
    assert len(chosen) < 20


def test_a_peak_must_be_exact_on_a_cpu_and_close_on_a_gpu():
    def passed(measured: int, forecast: int, cuda: bool, reserved: int | None = None) -> bool:
        metrics = {"memory/peak_bytes": measured, "memory/reserved_bytes": 2000}
        return memory.judge(metrics, {"peak_bytes": forecast, "reserved_bytes": reserved}, cuda).passed

    assert passed(1000, 1000, False) and not passed(1000, 1001, False)
    assert passed(1000, 1099, True) and not passed(1000, 1101, True)
    assert passed(1000, 1000, True, 2100) and not passed(1000, 1000, True, 2400)


@pytest.mark.parametrize(("fits", "passed"), [(True, False), (False, True), (None, False)])
def test_out_of_memory_passes_only_where_it_was_forecast(tmp_path: Path, fits: bool | None, passed: bool):
    on = bench(GPU, 1, folder=tmp_path)
    line = memory.lines(on)[0]
    file = on.prepared / "forecasts_x1.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({line.id: {"error": None, "peak_bytes": 5, "fits": fits}}))
    measured = memory.on_error(line, on, type("OutOfMemoryError", (RuntimeError,), {})("no"))
    assert measured is not None and measured.passed is passed
    assert memory.on_error(line, on, ValueError("another")) is None


def test_the_outcome_of_the_check_is_the_platforms():
    from fsdp_lab.record.reasons import Code, Reason

    assert Reason.of(Code.out_of_memory, rank=0).status == "oom"
    assert oom.lines(bench())[0].workers == 1


class TestState:
    def test_results_are_kept_by_machine_and_sources(self, tmp_path: Path):
        State(tmp_path, key_of(bench())).append(Result("a", PASS, "1"))
        assert State(tmp_path, key_of(bench())).results()["a"].verdict == PASS
        other = replace(bench(), source="def")
        assert State(tmp_path, key_of(other)).results() == {}
        assert State(tmp_path, key_of(bench(GPU, 1))).results() == {}

    def test_the_first_result_counts_and_a_cut_line_is_no_result(self, tmp_path: Path):
        state = State(tmp_path, "key")
        state.append(Result("a", FAIL, "the cause"))
        state.append(Result("a", FAIL, "a peer"))
        with state.path.open("a") as lines:
            lines.write('{"key": "key", "id": "b", "verd')
        assert {line: r.measured for line, r in state.results().items()} == {"a": "the cause"}


class TestTable:
    LINES = (Line("parity", "x|y", 1, "close"), Line("speed", "z", 1, "fast"))

    @pytest.mark.parametrize(
        ("verdicts", "status"),
        [((PASS, PASS), 0), ((PASS, FAIL), 1), ((PASS, NOT_MEASURED), 3), ((FAIL, NOT_MEASURED), 1)],
    )
    def test_exit_status(self, verdicts: tuple[str, str], status: int):
        rows = [(line, Result(line.id, v, "")) for line, v in zip(self.LINES, verdicts, strict=True)]
        assert table.exit_status(rows) == status

    def test_it_names_the_machine_and_what_failed(self, tmp_path: Path):
        rows = table.rows(self.LINES, {self.LINES[0].id: Result(self.LINES[0].id, FAIL, "far | off", 1.5)})
        text = table.write(rows, bench(GPU, 1), tmp_path)
        machine = ("1 x NVIDIA H200", "580.1", "9.0", "2.28", "91500", "sources: abc", "commit: ")
        for part in (*machine, "FAIL parity: x|y x1"):
            assert part in text
        assert "| parity | x\\|y | 1 | close | far \\| off | FAIL | 1.5 |" in text
        assert (tmp_path / "check_gpu.md").read_text() == text
        assert len((tmp_path / "check_gpu.csv").read_text().splitlines()) == 3


# A process that stands for a batch: it appends a result for each line, and ends or hangs at those named so.
STAND_IN = """
import json, os, sys, time
from pathlib import Path
from benchmarks.check_gpu.lines import Bench, Result
from benchmarks.check_gpu.state import State
from fsdp_lab.files import write_json
job = json.loads(Path(sys.argv[1]).read_text())
folder = Path(job["bench"]["folder"])
for line in job["ids"]:
    write_json(folder / "begun.json", {"id": line})
    if "crash" in line:
        sys.exit("SomeError: broken")
    if "hang" in line:
        time.sleep(600)
    State(folder, job["key"]).append(Result(line, "FAIL" if "wrong" in line else "pass", "measured"))
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`start(settings)` runs lines of these settings through stand-ins, as the command does."""
    monkeypatch.setattr(launch, "command", lambda workers: [sys.executable, "-c", STAND_IN])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(settings: list[str], seconds: float = 600.0) -> tuple[int, dict[str, Result], list[str]]:
        on = bench(folder=tmp_path)
        lines = [Line("rates", setting, 2, "", limit_s=1.0 if "hang" in setting else 60.0) for setting in settings]
        state, begun = State(tmp_path, key_of(on)), []
        known = state.results()
        launcher = Launcher(on, state, time.monotonic() + seconds, lambda result: begun.append(result.id))
        if left := [line for line in lines if line.id not in known]:
            launcher.run("stand-in", left)
        rows = table.rows(lines, state.results())
        return table.exit_status(rows), {line.setting: result for line, result in rows}, begun

    return run


def test_a_failed_line_gives_status_1_and_leaves_the_others(start: Any):
    status, results, _ = start(["good", "wrong", "fine"])
    assert status == 1 and [r.verdict for r in results.values()] == [PASS, FAIL, PASS]


def test_a_crash_and_a_hang_fail_their_own_lines_only(start: Any):
    status, results, _ = start(["good", "crash", "hang", "fine"])
    assert status == 1 and [r.verdict for r in results.values()] == [PASS, FAIL, FAIL, PASS]
    assert "SomeError: broken" in results["crash"].measured and "hung" in results["hang"].measured


def test_what_the_limit_cuts_is_not_measured(start: Any):
    status, results, _ = start(["good"], seconds=-1)
    assert status == 3 and results["good"].verdict == NOT_MEASURED


def test_a_second_start_measures_only_what_has_no_result(start: Any):
    start(["good", "wrong"])
    status, _, begun = start(["good", "wrong", "fine"])
    assert status == 1 and begun == ["rates: fine x2"]


def check(*words: str, cwd: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "benchmarks.check_gpu", "--device", "cpu", "--out", str(cwd), *words]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
def test_the_command_checks_a_cpu_and_goes_on_where_it_was_interrupted(tmp_path: Path):
    words = ("--only", "parity: control", "parity: sharding=ddp*fp16", "oom")
    with check(*words, cwd=tmp_path) as first:
        assert first.stderr is not None
        assert "pass parity" in first.stderr.readline()
        first.send_signal(signal.SIGINT)
        out, errors = first.communicate(timeout=300)
    assert first.returncode == 3, errors
    assert "not measured" in out
    with check(*words, cwd=tmp_path) as second:
        out, errors = second.communicate(timeout=500)
    assert second.returncode == 0, errors
    assert "checks already have a result" in errors and errors.count("] pass") < out.count("| pass |") == 6
    assert not processes_of(tmp_path)


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that were started for the folder."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and int(path.parent.name) != os.getpid():
            processes.append(text)
    return processes
