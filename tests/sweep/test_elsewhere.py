"""In which folder a resume works."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.__main__ import resume_first
from fsdp_lab.config import UserError
from fsdp_lab.sweep.elsewhere import why_here

_KEPT = "cluster.storage_path=s3://bucket/lab"


def test_a_sweep_in_object_storage_goes_back_only_to_a_store_that_is_there(tmp_path: Path):
    (tmp_path / "there.db").touch()
    for words, own, stays in (
        ([_KEPT], False, True),  # outputs/mlflow.db, the default
        ([_KEPT, "tracking.uri=sqlite:///gone.db?timeout=9"], False, True),
        ([_KEPT, "tracking.uri='sqlite:///there.db'"], False, False),
        ([_KEPT, "tracking.uri=sqlite:////srv/gone.db"], False, False),  # the same from anywhere
        ([_KEPT, "tracking.uri=http://host:5000"], False, False),
        ([_KEPT], True, False),  # the folder itself, which nobody copied
        (["cluster.storage_path=kept"], False, False),  # relative: it is there alone
        ([], False, False),
    ):
        reason = why_here(str(tmp_path), words, own)
        assert (reason is not None) is stays, (words, own)
        assert reason is None or f"MLflow store, {tmp_path}/" in reason


def test_nothing_goes_on_in_a_copy_that_ray_deletes():
    copy = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1"
    assert "which Ray deletes" in str(why_here(copy, ["tracking.uri=sqlite:////srv/mlflow.db"], own=True))


def test_a_store_that_may_take_a_minute_to_answer_is_named_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    pytest.importorskip("s3fs", reason="s3fs is not installed: make test installs it")
    monkeypatch.chdir(tmp_path)
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:1"), ("MAX_ATTEMPTS", "1"), ("ACCESS_KEY_ID", "a"),
                        ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(UserError):
        resume_first(["resume=s3://bucket/gone", "trust=true"])
    assert capsys.readouterr().out == "reaching s3://bucket/gone\n"
    with pytest.raises(UserError, match="add trust=true"):
        resume_first(["resume=s3://bucket/gone"])
    assert capsys.readouterr().out == "", "nothing is asked of it"
