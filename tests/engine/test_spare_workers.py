"""Workers that have imported PyTorch before their trial begins, where cores are free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fsdp_lab.config import ConfigError
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine import spare_workers
from fsdp_lab.engine.spare_workers import SpareWorkers, has_imported_early, restore_environment, set_environment


@pytest.mark.parametrize("typed", [None, "json"])
def test_the_environment_is_as_before_after_a_sweep(monkeypatch: pytest.MonkeyPatch, typed: str | None):
    monkeypatch.delenv("RAY_preload_python_modules", raising=False)
    if typed is not None:
        monkeypatch.setenv("RAY_preload_python_modules", typed)
        monkeypatch.setenv("RAY_num_workers_soft_limit", "50")
    before = dict(os.environ)
    for _ in range(2):  # a sweep that was refused left its variables
        set_environment(4)
    assert has_imported_early() and SpareWorkers().wanted
    restore_environment()
    assert dict(os.environ) == before and not has_imported_early() and not SpareWorkers().wanted


def test_they_take_a_ray_that_is_started_here():
    with pytest.raises(ConfigError, match=r"cluster\.early_imports=true needs a Ray that fsdp_lab starts"):
        ClusterConfig(address="auto", early_imports=True).check()


_NO_CUDA = """
import importlib, sys, torch

def asked(*args, **settings):
    raise AssertionError("an import asks CUDA for its devices: Ray chooses them later")

for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, asked)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_spare_workers_ask_cuda_for_nothing():
    """Else a worker would train on another's GPU: CUDA reads `CUDA_VISIBLE_DEVICES` once."""
    command = [sys.executable, "-c", _NO_CUDA, *spare_workers.MODULES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


_THREADS = """
import torch, os
from fsdp_lab.training.distributed import keep_threads
torch.set_num_threads(2)
keep_threads()
assert torch.get_num_threads() == 2
os.environ["OMP_NUM_THREADS"] = "1"
keep_threads()
assert torch.get_num_threads() == 1
"""


def test_a_spare_worker_computes_with_the_threads_that_ray_gives_it():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", _THREADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


# Two actors side by side, as a trial's workers, then two more, as long after as their processes take.
_ONE_AFTER_ANOTHER = """
import sys, time
from fsdp_lab import hardware
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine import cluster
from fsdp_lab.engine.spare_workers import SpareWorkers, idle_processes

hardware.num_cpus = lambda: 3
cluster.start_ray(ClusterConfig(num_workers=2, cpus_per_worker=1.5, early_imports=True))
import ray

@ray.remote(num_cpus=1.5)
class Worker:
    def has_imported(self):
        import os
        return "torch" in sys.modules and "fsdp_lab.training" in sys.modules, os.getpid()

spares, ready = SpareWorkers(), set()
for number in range(3):
    workers = [Worker.remote() for _ in range(2)]
    found = ray.get([worker.has_imported.remote() for worker in workers], timeout=100)
    print(number, *(f"{imported} {pid in ready}" for imported, pid in found), flush=True)
    spares.begin()
    spares.prepare(2)
    end = time.monotonic() + 100
    while time.monotonic() < end and len(idle_processes()) < 2:
        time.sleep(0.1)
    time.sleep(5)  # Ray would end a process that is idle for a second
    ready = idle_processes()
    for worker in workers:
        ray.kill(worker)
cluster.stop_ray()
"""


@pytest.mark.timeout(400)
def test_the_next_worker_has_imported_pytorch_before_it_is_asked_for():
    """Two workers at a time, in a Ray that was told of three cores."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_p")}
    command = [sys.executable, "-c", _ONE_AFTER_ANOTHER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["1 True True True True", "2 True True True True"]
