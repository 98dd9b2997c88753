"""Files that are whole or not there, and on the disk where that counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_lab.engine.trial_files import Outcome, append_line, write_outcome
from fsdp_lab.files import read_json, whole_folder, write_json
from fsdp_lab.status import TrialStatus


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed from now on, in order."""
    happened: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        happened.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        happened.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    return happened


def test_a_durable_file_is_synced_before_its_name_and_its_name_after(tmp_path: Path, done: list[str]):
    write_json(tmp_path / "a.json", {"a": 1}, durable=True)
    assert done == [f"sync .a.json.{os.getpid()}.making", "rename to a.json", f"sync {tmp_path.name}"]
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_a_file_that_may_be_lost_costs_no_sync(tmp_path: Path, done: list[str]):
    write_json(tmp_path / "progress.json", {"step": 1})
    assert done == ["rename to progress.json"]


def test_the_epochs_of_a_trial_are_on_the_disk_before_its_outcome(tmp_path: Path, done: list[str]):
    append_line(tmp_path / "metrics.jsonl", '{"epoch": 1}')
    write_outcome(tmp_path, Outcome(TrialStatus.finished))
    assert done[0] == "sync metrics.jsonl" and done[-1] == f"sync {tmp_path.name}"
    assert "rename to outcome.json" in done


def test_a_folder_that_was_removed_is_not_made_again(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "gone" / "a.json", {}, parents=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe"])
def test_a_file_that_is_damaged_is_named_once_and_counts_as_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert read_json(path) is None and read_json(path) is None
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and f"{path} is damaged" in output


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
