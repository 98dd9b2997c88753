"""Ray's token authentication: a token for a Ray that is started here, and problems with the token of another."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from fsdp_lab.config import UserError

_REFUSED = ("InvalidAuthToken", "Unauthenticated", "authentication token")  # in Ray's log, or in its error
_HOW = (
    "set RAY_AUTH_MODE=token, and put the cluster's token into RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH or "
    "~/.ray/auth_token: `ray get-auth-token` on its head node prints it."
)

_own_token = secrets.token_hex(32)


def set_own_token() -> None:
    """Let a Ray that is started here answer only to processes with this process's token.

    The token is in the environment of its processes and nowhere else, while Ray's own is in the home folder. A user who
    turned authentication off (RAY_AUTH_MODE=disabled) has it off; a Ray without authentication ignores the token.
    """
    if "ray" not in sys.modules:  # else it has read the mode, and from 2.59 on asks for tokens by itself
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ["RAY_AUTH_TOKEN"] = _own_token  # it comes before a path


def check_token(address: str) -> None:
    """Look for a token where the environment names one, before Ray does.

    Raises:
        UserError: there is none.
    """
    if sends_token() and _token_place() is None:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH")
        where = f"the file of RAY_AUTH_TOKEN_PATH={path} is empty or cannot be read" if path else "no token is there"
        raise UserError(f"cluster.address={address}: RAY_AUTH_MODE=token, and {where}; {_HOW}")


def is_refusal(text: str) -> bool:
    """Return whether Ray's message says that a token is missing or wrong."""
    return any(sign in text for sign in _REFUSED)


def wrong_token(address: str) -> UserError:
    """Return the error of a cluster that refused this process, which names the place of its token."""
    place = _token_place()
    if place is None:
        given = "none was given"
    elif sends_token():
        given = f"the one in {place} does not match"
    else:
        given = f"the one in {place} is not sent without RAY_AUTH_MODE=token"
    return UserError(
        f"cluster.address={address}: this Ray cluster asks for an authentication token, and {given}; {_HOW}"
    )


def sends_token() -> bool:
    """Return whether this process sends a token to the cluster that it reaches, which it does only on request."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _token_place() -> str | None:
    """Return where Ray reads its token from, in its own order; None without one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return f"RAY_AUTH_TOKEN_PATH={path}" if _is_filled(Path(path)) else None
    return "~/.ray/auth_token" if _is_filled(Path.home() / ".ray" / "auth_token") else None


def _is_filled(file: Path) -> bool:
    try:
        return bool(file.read_text().strip())
    except (OSError, ValueError):
        return False
