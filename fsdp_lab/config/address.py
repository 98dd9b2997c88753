"""Addresses of object storage, and credentials in any address. Opens no connection."""

from __future__ import annotations

import re
from urllib.parse import unquote

from fsdp_lab.config.errors import ConfigError

_USER = re.compile(
    r"\w://(?!\[[\w:.%]+\](?::\d+)?(?:[/?#,]|$))(?:"  # an IPv6 host in brackets has colons
    r"[^\s/?#]*@"  # user@, user:password@
    r"|[^\s/?#]*:(?!\d*(?:[/?#,'\")\]}]|$))\S*@"  # a password with a slash; a number would be a port
    r"|[^\s/?#]*:\d+/[^\s?#]*@[\w.-]+[:/])"  # a password that starts like a port, before a host
)
# The names of a query's parameters that hold a user or a secret, as letters and digits in lower case.
_SECRET = re.compile(
    r"user(name)?|login|pass(word|wd|phrase)?|pwd?|sslpassword|odbcconnect|auth(orization)?|credentials?|sig(nature)?"
    r"|access|(access|api|auth|id|private|refresh)?token|(aws)?(secret)?accesskey(id)?|(api|private|secret)?key"
    r"|(client)?secret|x(amz|goog)\w+"
)
# fsspec's module for each scheme, and the extra that installs it.
SCHEMES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs")}
_ADDRESS = re.compile(r"\w+://[\w.-]+(/[\w.=+-]+)*")  # a bucket and folders; no user, no query, no `//`


def is_address(place: str | None) -> bool:
    """Return whether a storage location is an address such as `s3://bucket/prefix`, not a folder. False for None."""
    return place is not None and "://" in place


def check_credentials(key: str, text: str) -> None:
    """Check that no address in a text has a user, a password or a token: files, logs and MLflow show addresses.

    Args:
        key: the configuration key of the text, for the message.
        text: a value, or a word of a command line.

    Raises:
        ConfigError: with the key, not the value.
    """
    text = re.sub(r"\\(.)", r"\1", text)  # Hydra writes `\:` and `\=`
    parameters = re.findall(r"[?&#;]([^\s?&#;=]+)=", " ".join(re.findall(r"\w://\S*", text)))
    names = (re.sub(r"[\W_]", "", unquote(name)).lower() for name in parameters)
    found = _USER.search(text) or any(map(_SECRET.fullmatch, names))
    if found and key != "cluster.storage_path":  # `check_address` has a rule for that one
        remedy = "let the class read it from the environment"
        if key.partition(".")[0] not in ("model", "data", "optimizer", "task"):
            remedy = (
                "set it in the environment: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD or "
                "MLFLOW_TRACKING_TOKEN, PGUSER and PGPASSWORD for PostgreSQL, RAY_AUTH_TOKEN"
            )
        raise ConfigError(
            f"{key}: its address has a user, a password or a token in it, which files and MLflow would show; leave "
            f"that out, and {remedy}. Write an @ in a path as %40."
        )


def scheme_of(address: str) -> str:
    """Return the scheme of an address: the part before `://`."""
    return address.partition("://")[0]


def check_address(address: str) -> None:
    """Check that `cluster.storage_path=<address>` names a known object storage, with a bucket and folders only.

    Raises:
        ConfigError: the scheme is unknown, or the address holds more than a bucket and folders.
    """
    key, scheme = "cluster.storage_path", scheme_of(address)
    known = ", ".join(f"{name}://bucket/prefix" for name in SCHEMES)
    if "@" in address or "?" in address:  # not repeated: it may hold a password
        raise ConfigError(
            f"{key}: its {scheme}:// address has more than a bucket and a prefix; give credentials in the environment, "
            "~/.aws or the machine's role, and options in variables such as AWS_ENDPOINT_URL."
        )
    if scheme not in SCHEMES:
        raise ConfigError(f"{key}={address}: {scheme}:// is not a known storage; give a mounted folder, or {known}.")
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(
            f"{key}={address} is not a bucket and a prefix; write {scheme}://bucket/prefix with letters, digits and "
            "._=+- only, without a slash at the end."
        )
