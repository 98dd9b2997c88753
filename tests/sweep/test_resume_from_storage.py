"""A resume from object storage, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.__main__ import resume_first
from fsdp_lab.config import UserError


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
