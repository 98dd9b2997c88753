"""Removes passwords from what is printed and from what goes to MLflow."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

# `scheme://user:password@`, up to the last @ of the word: a password may hold an @ of its own. A URI that
# goes on with a slash (sqlite:///…) has no user in it. Hydra writes `:` and `=` of a trial's override as `\:` and `\=`.
_CREDENTIALS = re.compile(r"(\w\\?://)[^\s/][^\s]*@")
# `?name=value`, also in a fragment, and `;name=value` as ODBC has it, where a value in braces may hold anything.
_QUERY = re.compile(r"([?&#]|;\s*)([\w.~%+-]+)(\\*=)(\{[^}]*\}|[^\s&;'\"]+)")
_VARIABLE = r"\$\{oc\.env:\w+\}"
# `://user:${oc.env:NAME}@`, and a whole value of a query: what is read from the environment.
_FROM_ENVIRONMENT = re.compile(rf"(?<=//)(?:(?:[\w.%+-]+|{_VARIABLE}):)?{_VARIABLE}@|(?<==){_VARIABLE}(?=[&;'\"\s]|$)")
_SECRET_NAME = re.compile(r"pass|pwd|token|secret|key|auth|sig|cred|connect$", re.IGNORECASE)
_IN_AUTHORITY = re.compile(r"\w\\?://[^\s/@:]*:[^\s/]*@")
_SMALL_VALUE = re.compile(r"\d{1,6}|true|false|null", re.IGNORECASE)
_HARMLESS = (
    "application_name", "charset", "check_same_thread", "connect_timeout", "database", "driver", "encrypt", "mode",
    "page", "sslmode", "timeout", "trustservercertificate", "workflowtype",
)  # fmt: skip


def redact(text: str) -> str:
    """Return text with the credentials of every URI in it as `***`.

    These are its user, and each value of a query that is not known to be harmless.
    """
    return _QUERY.sub(_redact_value, _CREDENTIALS.sub(r"\1***@", text))


def has_password(word: str) -> bool:
    """Return whether typed text has credentials in it that are not read from the environment."""
    rest = _FROM_ENVIRONMENT.sub("", word)
    return redact(rest) != rest


def redact_typed(text: str) -> str:
    """Return typed text with its credentials as `***`; what is read from the environment stays as typed."""
    return redact(text) if has_password(text) else text


def names_password(word: str) -> bool:
    """Return whether any typed value has credentials: `user:password@` before a path, or a secret's name in a query."""
    rest = _FROM_ENVIRONMENT.sub("", word)
    by_name = any(_SECRET_NAME.search(match[2]) for match in _QUERY.finditer(rest))
    return by_name or _IN_AUTHORITY.search(rest) is not None


def _redact_value(match: re.Match[str]) -> str:
    before, name, equals, value = match.groups()
    secret = _SECRET_NAME.search(name) is not None
    shown = name.lower() in _HARMLESS or _SMALL_VALUE.fullmatch(value) is not None or before.startswith(";")
    return f"{before}{name}{equals}***" if secret or not shown else match.group()


def redacted_file(path: Path) -> str:
    """Return the content of a text file, redacted; JSON stays JSON."""
    text = path.read_text(encoding="utf-8", errors="replace")
    with suppress(json.JSONDecodeError):
        if path.suffix == ".json":
            return json.dumps(redact_strings(json.loads(text)), indent=1)
    return redact(text)


def redact_strings(content: Any) -> Any:
    """Return plain values with every text in them redacted."""
    if isinstance(content, dict):
        return {key: redact_strings(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [redact_strings(value) for value in content]
    return redact(content) if isinstance(content, str) else content
