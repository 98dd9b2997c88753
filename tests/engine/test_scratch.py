"""The folders of ranks among the temporary files of their node."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fsdp_lab.engine.files_of_ranks import scratch_folder


def test_what_a_killed_rank_has_left_goes_when_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begin = "from fsdp_lab.engine.files_of_ranks import scratch_folder; (scratch_folder() / 'model.pt').touch(); "
    killed = [sys.executable, "-c", f"{begin} import os; os.kill(os.getpid(), 9)"]
    subprocess.run(killed, check=False, env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = tmp_path.iterdir()
    assert (left / "model.pt").exists()
    (tmp_path / "fsdp_lab_of_another").mkdir()
    own = [scratch_folder(), scratch_folder()]
    assert sorted(tmp_path.iterdir()) == sorted([*own, tmp_path / "fsdp_lab_of_another"])
    assert own[0].stat().st_mode & 0o777 == 0o700
