"""What a worker does before it trains."""

import subprocess
import sys

import pytest

_MOVES = """
import os
from fsdp_lab.engine.rank import own_session
for _ in range(2):
    own_session()
    print(os.getsid(0) == os.getpgid(0) == os.getpid())
"""


@pytest.mark.parametrize("process_group", [None, 0])
def test_a_worker_has_a_session_of_its_own_whether_it_leads_a_group_or_not(process_group: int | None):
    done = subprocess.run(
        [sys.executable, "-c", _MOVES], capture_output=True, text=True, timeout=100, check=False,
        process_group=process_group,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"], done.stderr


_WITH_A_CHILD = """
import os, subprocess
from fsdp_lab.engine.rank import own_session
child = subprocess.Popen(["sleep", "60"])
own_session()
print(os.getpgid(0) == os.getpid())
child.kill()
"""


def test_a_worker_that_cannot_begin_a_session_stays_in_its_group():
    done = subprocess.run(
        [sys.executable, "-c", _WITH_A_CHILD], capture_output=True, text=True, timeout=100, check=False,
        process_group=0,
    )  # fmt: skip
    assert done.stdout.split() == ["True"], done.stderr
