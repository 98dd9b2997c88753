"""Files that are whole or not there, and locks between processes. What is on the disk when: sweep/test_kills.py."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.storage.files import read_lines, read_object, whole_folder, write_json, write_text
from fsdp_lab.storage.locks import InUse, exclusive, holder, locked, share_until_exit
from tests.processes import ordinary_user

_HOLDS = """
import sys, pathlib
from fsdp_lab.storage.locks import exclusive
with exclusive(pathlib.Path(sys.argv[1])):
    print("has it", flush=True)
    sys.stdin.read()
"""


def test_who_has_a_lock_is_known_until_it_is_killed(tmp_path: Path):
    path = tmp_path / "made" / ".lock"
    assert holder(path) == ""
    command = [sys.executable, "-c", _HOLDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "has it\n"
        assert holder(path).startswith(f"process {other.pid}, since 20")
        with pytest.raises(InUse, match=f"{path} is locked by process {other.pid}, since .*; wait"), exclusive(path):
            pass
        other.kill()
        other.wait()
        assert holder(path) == ""
    with exclusive(path):
        assert holder(path).startswith(f"process {os.getpid()}, since 20")
    assert holder(path) == ""


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    """Stands for a mount that cannot be had here: flock(2) has these errors for it."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    message = rf"^{tmp_path} is on a file system without locks \({os.strerror(number)}\).*use another file system"
    with pytest.raises(UserError, match=message), locked(tmp_path, "hydra.run.dir"):
        pass
    with pytest.raises(UserError, match=message):
        share_until_exit(tmp_path / ".alive")


def test_a_link_in_the_place_of_a_lock_is_not_written_through(tmp_path: Path):
    """An archive may hold one that points at any file."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"sweep cannot be written"), locked(tmp_path / "sweep", "resume"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_file_that_its_owner_alone_may_read_is_reported():
    with ordinary_user() as folder:
        for name, read in (
            ("a/trial.json", read_object),
            ("trials.jsonl", lambda path, remedy: [*read_lines(path, remedy)]),
        ):
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.touch(0o200)
            with pytest.raises(UserError, match=rf"may not read {path}; ask its owner"):
                read(path, "restore it")
        (folder / "a").chmod(0)
        with pytest.raises(UserError, match="ask its owner"):
            read_object(folder / "a/trial.json")
        (folder / "a").chmod(0o700)


def test_two_threads_may_write_one_file(tmp_path: Path):
    """As progress.json: Ray Train's thread of reports, and the watch over the trial."""
    path = tmp_path / "progress.json"
    contents = [{"step": number, "text": "x" * 5000 * number} for number in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(write_json, path, contents[n % 2], parents=False) for n in range(600)]:
            done.result()
            assert read_object(path) in contents
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "file", "new \ud800")  # half of a pair, which UTF-8 has not
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_a_folder_takes_the_place_of_one_only_when_it_is_whole(tmp_path: Path):
    for name in ("one", "two"):
        with whole_folder(tmp_path / "model") as making:
            (making / name).touch()
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "model") as making:
        (making / "no such folder" / "three").touch()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["model", "model/two"]
