"""Imports without the garbage collector, and with it again afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PLAIN = """
import gc, time
from fsdp_lab import quick_imports

quick_imports.end()
print(gc.isenabled(), gc.get_freeze_count())
quick_imports._LIMIT_S = 0.1
quick_imports.begin()
print(gc.isenabled())
end = time.monotonic() + 30
while not gc.isenabled() and time.monotonic() < end:
    time.sleep(0.01)
print(gc.isenabled())
quick_imports._LIMIT_S = 60
quick_imports.begin()
quick_imports.end()
print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""

_IN_RAY = """
import gc
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray

start_ray(ClusterConfig())
import ray

@ray.remote(num_cpus=0)
def look():
    from fsdp_lab import quick_imports
    before = gc.isenabled()
    quick_imports.end()
    return before, gc.isenabled()

try:
    print(*ray.get(look.remote(), timeout=60))
finally:
    stop_ray()
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [(_PLAIN, ["True 0", "False", "True", "True True"]), (_IN_RAY, ["False True"])],
    ids=["plain", "a process of Ray's"],
)
@pytest.mark.timeout(120)
def test_no_garbage_is_collected_until_the_imports_end(code: str, printed: list[str]):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.stdout.splitlines() == printed, done.stderr


@pytest.mark.timeout(60)
def test_a_command_ends_without_waiting_for_the_limit():
    command = [sys.executable, "-m", "fsdp_lab", "--keys"]
    assert subprocess.run(command, capture_output=True, timeout=50).returncode == 0


_AS_COMMAND = """
import atexit, gc, runpy, sys
module, *sys.argv[1:] = sys.argv[1:]
atexit.register(lambda: print(gc.isenabled(), file=sys.stderr))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "words", [("fsdp_lab", "--keys"), ("fsdp_lab.nightly", "--help"), ("fsdp_lab.forecast", "--help")]
)
@pytest.mark.timeout(60)
def test_a_command_collects_garbage_once_it_has_begun(words: tuple[str, ...]):
    done = subprocess.run([sys.executable, "-c", _AS_COMMAND, *words], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and done.stderr.splitlines() == ["True"]
