"""Files that are whole or not there. Which are on the disk, and when: tests/sweep/test_kills.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.storage.files import read_object, whole_folder, write_json


def test_a_folder_that_was_removed_is_not_made_again(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "gone" / "a.json", {}, parents=False)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    for content in (b"", b'{"a": ', b"\xff\xfe"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(UserError, match=f"{tmp_path}/a.json cannot be read .*; remove it"):
            read_object(tmp_path / "a.json")


def test_two_threads_may_write_one_file(tmp_path: Path):
    """As progress.json: Ray Train's thread of reports, and the watch over the trial."""
    path = tmp_path / "progress.json"
    contents = [{"step": number, "text": "x" * 5000 * number} for number in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(write_json, path, contents[n % 2], parents=False) for n in range(600)]:
            done.result()
            assert read_object(path) in contents
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_the_place_of_one_only_when_it_is_whole(tmp_path: Path):
    folder = tmp_path / "model"

    def write(name: str, content: str, error: OSError | None = None) -> None:
        with whole_folder(folder) as making:
            (making / name).write_text(content)
            if error:
                raise error

    write("one", "old")
    with pytest.raises(OSError, match="disk"):
        write("one", "half", OSError("the disk is full"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (folder / "one").read_text() == "old"
    write("two", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in folder.iterdir()] == ["two"]
