"""The process of a rank: forked by a server, or a new Python; and its end, whoever ends first."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_lab.config import TrialConfig, to_dict
from fsdp_lab.engine import attempts, rank_process, rank_server
from fsdp_lab.engine.job import Job
from fsdp_lab.engine.rank import FolderReporter, Work, train_and_record
from fsdp_lab.engine.rank_process import SERVER, RankProcess, how_it_ended
from fsdp_lab.engine.rendezvous import gpu_index
from tests.processes import still_running
from tests.ranks import config

pytestmark = pytest.mark.timeout(300)


def work(folder: Path, epochs: int = 2, **model: Any) -> dict[str, Any]:
    """Of the only rank of a trial."""
    folder.mkdir(exist_ok=True)
    config = to_dict(TrialConfig())
    config["data"] |= {"num_train": 64, "num_val": 32}
    config["training"] |= {"epochs": epochs, "global_batch_size": 32, "timing_warmup_steps": 0}
    config["model"] |= model
    job = Job(config, str(folder), 1, 1.0, False, str(folder), None, 600.0, 1, True)
    meeting = {"path": str(folder / "meet"), "backend": "gloo", "rank": 0, "world_size": 1, "timeout_s": 60.0}
    return asdict(Work(job.as_dict(), 0, str(folder), meeting, None))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Process]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("OMP_NUM_THREADS", raising=False)
        rank_server.start_server(str(tmp_path_factory.mktemp("server")), threads=1)
        try:
            yield psutil.Process(rank_server._server[0].pid)
        finally:
            rank_server.stop_server()


@pytest.fixture(params=["fork", "new"])
def how(request: pytest.FixtureRequest, server: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "new":
        monkeypatch.delenv(SERVER)
    return str(request.param)


_SCORE = "7"


def score_of(pid: int) -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text().strip()


def number_of(process: RankProcess, server: psutil.Process) -> psutil.Process:
    """The process that trains."""
    if process._python is not None:
        return psutil.Process(process._python.pid)
    (fork,) = server.children()
    return fork


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"nothing within {seconds} s"
        time.sleep(0.02)


def test_a_rank_trains_in_a_process_of_its_own(how: str, server: psutil.Process, tmp_path: Path):
    """With the environment and the folder of the worker, and one report after another."""
    epochs = []
    Path("/proc/self/oom_score_adj").write_text(_SCORE)  # Ray sets 1000; what a process inherits is there before
    with rank_process.rank_process(work(tmp_path)) as process:
        trains = number_of(process, server)
        for epoch in process.epochs():
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            epochs.append((epoch, [json.loads(line)["epoch"] for line in lines], trains.name(), trains.cwd()))
            assert os.getsid(trains.pid) == trains.pid != os.getsid(0), "Linux divides the cores among sessions"
            assert trains.ppid() == (server.pid if how == "fork" else os.getpid())
            assert score_of(trains.pid) == _SCORE
        assert process.wait() == 0 and process.done
    assert epochs == [(1, [1], "rank0", str(tmp_path)), (2, [1, 2], "rank0", str(tmp_path))]
    assert (tmp_path / "model.pt").exists()


def test_a_rank_that_fails_says_so(how: str, server: psutil.Process, tmp_path: Path):
    words = work(tmp_path)
    words["job"]["config"]["model"] = {"_target_": "tests.engine.failing.FailsOnRank0"}
    with rank_process.rank_process(words) as process:
        assert list(process.epochs()) == [] and process.wait() == 1
    assert "the first step fails" in json.loads((tmp_path / "failures" / "rank0.json").read_text())["message"]
    assert "the first step fails" in (tmp_path / "logs" / "rank0.log").read_text()


def test_a_rank_that_is_killed_is_told_from_one_that_fails(how: str, server: psutil.Process, tmp_path: Path):
    with rank_process.rank_process(work(tmp_path, epochs=1000)) as process:
        epochs = process.epochs()
        next(epochs)
        number_of(process, server).kill()
        list(epochs)
        assert process.wait() == -9


def test_a_rank_ends_with_its_worker(how: str, server: psutil.Process, tmp_path: Path):
    """The worker is a process, as Ray's is, and is killed."""
    script = (
        "import json, sys\nfrom fsdp_lab.engine.rank_process import rank_process\n"
        "with rank_process(json.loads(sys.argv[1])) as process:\n    list(process.epochs())\n"
    )
    command = [sys.executable, "-c", script, json.dumps(work(tmp_path, epochs=1000))]
    with subprocess.Popen(command) as worker:
        wait_until(lambda: (tmp_path / "metrics.jsonl").exists())
        (trains,) = (server if how == "fork" else psutil.Process(worker.pid)).children()
        worker.kill()
    assert still_running([trains], 5.0) == []


def test_a_block_that_is_left_ends_the_rank(how: str, server: psutil.Process, tmp_path: Path):
    with rank_process.rank_process(work(tmp_path, epochs=1000)) as process:
        next(process.epochs())
        trains = number_of(process, server)
    assert still_running([trains], 5.0) == []


def test_a_rank_without_a_server_that_answers_starts_a_new_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(SERVER, str(tmp_path / "nobody"))
    with rank_process.rank_process(work(tmp_path / "trial")) as process:
        assert list(process.epochs()) == [1, 2] and process.wait() == 0
    assert "forks no rank" in capsys.readouterr().err


def test_what_a_rank_has_started_ends_with_it(how: str, server: psutil.Process, tmp_path: Path):
    """Processes that load data, for example. They inherit the connection to the worker, which is to see the end."""
    words = work(tmp_path, epochs=1000)
    words["job"]["config"]["model"] = {"_target_": "tests.engine.failing.StartsAProcess"}
    with rank_process.rank_process(words) as process:
        epochs = process.epochs()
        next(epochs)
        trains = number_of(process, server)
        (child,) = trains.children()
        trains.kill()
        list(epochs)
        assert process.wait() == -9
    assert still_running([child], 5.0) == []


@pytest.mark.parametrize("model", ["StartsAProcess", "StartsAProcessElsewhere"])
def test_a_worker_sees_the_end_of_its_rank_whoever_lives_on(model: str, how: str, tmp_path: Path):
    """Also a process that left the rank's group, and one whose server was killed with it."""
    words = work(tmp_path, epochs=1000)
    words["job"]["config"]["model"] = {"_target_": f"tests.engine.failing.{model}"}
    with pytest.MonkeyPatch.context() as environment:
        (tmp_path / "server").mkdir()
        environment.setattr(rank_server, "_server", [])
        if how == "fork":
            environment.setenv(SERVER, "")
            rank_server.start_server(str(tmp_path / "server"), threads=1)
        with rank_process.rank_process(words) as process:
            epochs = process.epochs()
            next(epochs)
            mine = psutil.Process(rank_server._server[0].pid) if how == "fork" else psutil.Process()
            (trains,) = (child for child in mine.children() if child.name() == "rank0")
            (child,) = trains.children()
            (mine if how == "fork" else trains).kill()
            begun = time.monotonic()
            list(epochs)
            assert process.wait() == -9 and time.monotonic() - begun < 10.0
        with suppress(psutil.NoSuchProcess):
            child.kill()
        rank_server.stop_server()


def test_code_that_ends_the_process_does_not_end_the_trial_well(how: str, server: psutil.Process, tmp_path: Path):
    words = work(tmp_path)
    words["job"]["config"]["model"] = {"_target_": "tests.engine.failing.EndsTheProcess"}
    with rank_process.rank_process(words) as process:
        assert list(process.epochs()) == [] and process.wait() == 0 and not process.done


def test_a_crash_in_native_code_is_in_the_log(how: str, server: psutil.Process, tmp_path: Path):
    words = work(tmp_path)
    words["job"]["config"]["model"] = {"_target_": "tests.engine.failing.Crashes"}
    with rank_process.rank_process(words) as process:
        assert list(process.epochs()) == []
        assert how_it_ended(process.wait()) == "its process was ended by signal 11 (SIGSEGV)"
    assert "Fatal Python error: Segmentation fault" in (tmp_path / "logs" / "rank0.log").read_text()


def test_an_error_before_there_is_a_log_is_recorded(how: str, server: psutil.Process, tmp_path: Path):
    words = work(tmp_path)
    (tmp_path / "logs").write_text("")
    with rank_process.rank_process(words) as process:
        assert list(process.epochs()) == [] and process.wait() == 1
    assert "logs" in json.loads((tmp_path / "failures" / "rank0.json").read_text())["message"]


def test_a_rank_does_not_make_a_removed_folder_again(how: str, server: psutil.Process, tmp_path: Path):
    """Until it trains: the folder of its trial may be removed while it starts."""
    words = work(tmp_path / "trial")
    words["meeting"]["path"] = str(tmp_path / "meet")
    shutil.rmtree(tmp_path / "trial")
    with rank_process.rank_process(words) as process:
        assert list(process.epochs()) == [] and process.wait() == 1
    assert not (tmp_path / "trial").exists()


def test_a_folder_that_is_removed_before_the_training_is_not_made_again(tmp_path: Path):
    """While the ranks meet: until then PyTorch is imported, for a second or more."""
    folder = tmp_path / "trial"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="trial is gone: it was removed or moved before the training began"):
        train_and_record(config(), folder, 0, FolderReporter(folder, 0, "digits"), join=folder.rmdir)
    assert not folder.exists()


def test_an_attempt_waits_for_the_ranks_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank ends a moment after its worker was killed, and would write beside the new ones. No Ray takes part."""
    monkeypatch.setattr(attempts, "release_placement_group", lambda folder: None)
    script = "import sys, time, pathlib; from fsdp_lab.engine.trial_files import hold_alive\n"
    script += "hold_alive(pathlib.Path(sys.argv[1])); print('lives', flush=True); time.sleep(3)"
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "lives\n"
        begins: list[int | None] = []
        attempts.Attempts(tmp_path, lambda: begins.append(rank.poll())).begin()
        assert begins == [0]


def test_a_users_error_on_one_rank_ends_its_worker(
    how: str, server: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The others wait for the rank, until Ray knows."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = work(tmp_path)
    words["gpu"] = 0
    with rank_process.rank_process(words) as process:
        assert list(process.epochs()) == [] and process.wait() == 1
    assert json.loads((tmp_path / "failures" / "rank0.json").read_text())["kind"] == "user"


def test_a_request_that_comes_too_late_trains_nothing(
    server: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rank_process, "_FORK_S", 1.0)
    server.suspend()
    with rank_process.rank_process(work(tmp_path / "trial")) as process:
        assert list(process.epochs()) == [1, 2], "by a new Python"
        before = (tmp_path / "trial" / "progress.json").read_text()
        server.resume()
        with socket.socket(socket.AF_UNIX) as nonsense:  # the server lives on
            nonsense.connect(os.environ[SERVER])
            nonsense.sendall(b"no JSON\n")
        with rank_process.rank_process(work(tmp_path / "other")) as other:
            assert list(other.epochs()) == [1, 2] and other._python is None
        assert (tmp_path / "trial" / "progress.json").read_text() == before
    assert server.is_running() and server.children() == []


def test_programs_that_a_fork_starts_have_a_standard_input(server: psutil.Process, tmp_path: Path):
    words = work(tmp_path, epochs=1)
    words["job"]["config"]["model"] = {"_target_": "tests.engine.failing.WritesItsThreads", "file": "found"}
    with rank_process.rank_process(words) as process:
        list(process.epochs())
    assert json.loads((tmp_path / "found").read_text())["input"] == "/dev/null"


_DRIVER = """
import sys, time
from fsdp_lab.engine.rank_server import start_server
start_server(sys.argv[1], 1)
print("started", flush=True)
time.sleep(200)
"""


@pytest.mark.parametrize("killed", ["driver", "server"])
def test_the_server_and_its_ranks_end_with_the_driver(killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with subprocess.Popen([sys.executable, "-c", _DRIVER, str(tmp_path)], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == b"started\n"
        (server,) = psutil.Process(driver.pid).children()
        monkeypatch.setenv(SERVER, str(tmp_path / "ranks"))
        with rank_process.rank_process(work(tmp_path / "trial", epochs=1000)) as process:
            epochs = process.epochs()
            next(epochs)
            ranks = server.children()
            (psutil.Process(driver.pid) if killed == "driver" else server).kill()
            list(epochs)
            assert process.wait() == -9 and len(ranks) == 1
        assert still_running([server, *ranks], 5.0) == []
        with suppress(ProcessLookupError):
            driver.kill()


_NO_CUDA = """
import importlib, sys, torch

def asked(*args, **settings):
    raise AssertionError("an import asks CUDA for its devices: Ray chooses them later")

for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, asked)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_the_server_has_no_thread_when_it_forks(server: psutil.Process, tmp_path: Path):
    with rank_process.rank_process(work(tmp_path)) as process:
        next(process.epochs())
        assert server.num_threads() == 1


def test_the_server_asks_cuda_for_nothing():
    """CUDA reads `CUDA_VISIBLE_DEVICES` once, and does not work in a fork."""
    command = [sys.executable, "-c", _NO_CUDA, *rank_server.MODULES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("2", 2)])
def test_a_fork_computes_with_the_threads_of_its_worker(
    given: str | None, threads: int, server: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Libraries read `OMP_NUM_THREADS` as they are imported; the server was started with 1."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    words = work(tmp_path, epochs=1)
    words["job"]["config"]["model"] = {"_target_": "tests.engine.failing.WritesItsThreads", "file": "found"}
    with rank_process.rank_process(words) as process:
        assert list(process.epochs()) == [1]
    assert json.loads((tmp_path / "found").read_text())["threads"] == threads


@pytest.mark.usefixtures("server")
def test_forks_draw_different_numbers(tmp_path: Path):
    drawn = []
    for number in range(2):
        words = work(tmp_path / str(number), epochs=1)
        words["job"]["config"]["model"] = {"_target_": "tests.engine.failing.WritesItsThreads", "file": "found"}
        with rank_process.rank_process(words) as process:
            list(process.epochs())
        drawn.append(json.loads((tmp_path / str(number) / "found").read_text())["drawn"])
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("own", "visible", "index"),
    [(3, "2,3", 1), ("GPU-b", "GPU-a,GPU-b", 1), (0, "0", 0), (2, None, 2), (5, "2,3", None)],
)
def test_the_index_of_a_workers_gpu(
    own: int | str, visible: str | None, index: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Ray's answer stands in: there is no GPU here."""
    monkeypatch.setattr("ray.get_gpu_ids", lambda: [own])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if index is None:
        with pytest.raises(RuntimeError, match=r"GPU 5 .* not in CUDA_VISIBLE_DEVICES=2,3"):
            gpu_index()
    else:
        assert gpu_index() == index
