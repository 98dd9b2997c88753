"""Commands import without the garbage collector, and run with it."""

from __future__ import annotations

import subprocess
import sys

_AS_COMMAND = """
import atexit, gc, runpy, sys
atexit.register(lambda: print(gc.isenabled(), file=sys.stderr))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def test_a_command_collects_garbage_once_it_has_begun():
    command = [sys.executable, "-c", _AS_COMMAND, "fsdp_lab", "--keys"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and done.stderr.splitlines() == ["True"]
