"""The deadline of an interrupt, in a process of its own, which it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.ci

# A store whose client hangs, and a main thread that hangs, whatever signal comes, as one in native code does.
_HANGS = """
import os, signal, threading, time
from contextlib import suppress
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.sweep import shutdown
from fsdp_lab.tracking import Projection, WantedRun

class Client:
    def create_run(self, *args, **kwargs):
        print("create_run by", threading.current_thread().name, flush=True)
        time.sleep(1000)

class Sweep:
    closed = False
    def log(self, text):
        print(text, flush=True)
    def close(self, interrupted):
        if self.closed:
            return
        self.closed = True
        print("to resume: resume", flush=True)
        projection.changed(0)
        print("unsent", projection.settle(60.0, 0.2), flush=True)

shutdown._LIMIT_S = 3.0
projection = Projection(TrackingConfig(), "night", lambda number: WantedRun("a"), print)
projection._client = Client()
projection._thread.start()
projection.changed(0)
sweep = Sweep()
with shutdown.interruptible(sweep):
    try:
        while True:
            with suppress(KeyboardInterrupt):
                if not sweep.closed:  # Python may miss a signal that comes as it begins to wait
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
    except KeyboardInterrupt:  # it came between two turns
        time.sleep(1000)
"""


def test_a_deadline_in_the_middle_of_a_store_write_ends_in_time_and_sends_nothing_twice(tmp_path: Path) -> None:
    done = forked.run(tmp_path, "-c", _HANGS)  # without the deadline it would never end
    assert done.returncode == 130, done.stderr
    assert done.stdout.count("create_run by") == 1, done.stdout
    assert "to resume: resume" in done.stdout and "unsent 2" in done.stdout, "its start, and its end"
