"""The verdict of a night to a webhook. Nothing fails when it is not there."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fsdp_lab.config.nightly import NotifyConfig

_AFTER = "; it is not sent again; gate.md and MLflow have it"


def notify(to: NotifyConfig, verdict: Mapping[str, Any]) -> str | None:
    """POST the verdict as JSON.

    Returns:
        the problem, for people, without the address, whose path or query may be the secret. None if there was none, or
        without an address.
    """
    if to.url is None:
        return None
    body = json.dumps(verdict).encode()
    request = urllib.request.Request(to.url, body, {"Content-Type": "application/json"}, method="POST")
    host = urlsplit(to.url).netloc.rpartition("@")[2]
    try:
        with urllib.request.urlopen(request, timeout=to.timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"nightly.notify.url: {host} refused the verdict ({error.code} {error.reason}){_AFTER}"
    except Exception as error:  # noqa: BLE001 - a night is not lost over a webhook, whatever it does
        reason = getattr(error, "reason", None) or type(error).__name__
        return f"nightly.notify.url: {host} did not take the verdict ({reason}){_AFTER}"
