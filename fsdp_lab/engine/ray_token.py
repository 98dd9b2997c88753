"""Ray's token authentication: a token for a Ray that is started here, and the error of one that refuses ours."""

from __future__ import annotations

import os
import secrets
import sys

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


def is_refusal(text: str) -> bool:
    """Return whether Ray's message says that a token is missing or wrong."""
    return any(sign in text for sign in _REFUSED)


def wrong_token(address: str) -> UserError:
    """Return the error of a cluster that refused this process."""
    return UserError(
        f"cluster.address={address}: this Ray cluster asks for an authentication token, and none was given, or the one "
        f"that was given does not match; {_HOW}"
    )
