"""Where a token for a cluster comes from; clusters that ask for one are in tests/cluster/test_tokens.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.engine.ray_token import check_token


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a token, and an environment that says there is one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_token_that_is_nowhere_is_reported_before_ray_is_asked(home: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="host:6379: RAY_AUTH_MODE=token, and no token is there; set RAY_AUTH_MODE"):
        check_token("host:6379")
    (home / "empty").touch()
    for path in (home / "none", home / "empty"):
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        with pytest.raises(UserError, match=f"RAY_AUTH_TOKEN_PATH={path} is empty or cannot be read"):
            check_token("host:6379")


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", None])
def test_each_of_rays_places_is_looked_into(home: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None):
    file = home / ".ray" / "auth_token" if variable is None else home / "token"
    file.parent.mkdir(exist_ok=True)
    file.write_text("1" * 64)
    if variable is not None:
        monkeypatch.setenv(variable, "1" * 64 if variable == "RAY_AUTH_TOKEN" else str(file))
    check_token("host:6379")


def test_without_authentication_no_token_is_wanted(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    check_token("host:6379")
    monkeypatch.delenv("RAY_AUTH_MODE")
    check_token("host:6379")
