"""The arguments in a sweep's folder that Hydra may get. Pure.

Hydra runs what a configuration tells it to, and a folder may come from anybody. An argument is an override. It may set
a
key of the configuration, choose an option of a group by its name, or set one of the few keys of Hydra's that a sweep
needs. It holds no interpolation except those listed below. Anything else must be typed again to resume the sweep.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.conf import groups
from fsdp_lab.config.key import keys_of
from fsdp_lab.config.options import CODE_KEYS
from fsdp_lab.deploy.job import is_managers

_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_NODES = "cluster.job.nodes"  # how many a sweep waits for
_AXIS = "hydra.sweeper.params."  # a default axis: a word of its own follows
_RESOLVERS = ("per_worker", "now", "hydra")
_OWN_RESOLVERS = (*_RESOLVERS, "oc.env")  # a variable may be a secret: only whose word it is may read it
_OPTIONS = re.compile(r"[\w\s,'\"()\[\]*=-]*")  # names and choices of them; no path, which would be a file anywhere
_INTERPOLATION = re.compile(r"\$\{\s*(?:[\w.\[\]]+\s*\}|(?P<resolver>\w+(?:\.\w+)*)\s*:)")
_LOCAL_STORE = re.compile(r"['\"]?sqlite:///[\w./ =-]*['\"]?")


@dataclass(frozen=True)
class Known:
    """What an argument may name.

    Attributes:
        keys: of the configuration, dotted.
        groups: which take the name of an option.
        free: prefixes below which any key may be set, such as `model.`.
        code: keys whose value names code that will run, in addition to every `_target_`.
    """

    keys: frozenset[str]
    groups: frozenset[str]
    free: tuple[str, ...] = ()
    code: frozenset[str] = frozenset()


@cache
def known_words() -> Known:
    """Return the keys and groups of this version."""
    keys = frozenset(keys_of(SweepConfig))
    return Known(keys, frozenset(groups()), free=("model.", "data."), code=frozenset(CODE_KEYS))


def key_of(word: str) -> str:
    """Return the key of an override, without the sign before it."""
    return word.partition("=")[0].lstrip("+~")


def with_overrides(overrides: Sequence[str], on_top: Sequence[str]) -> list[str]:
    """Return overrides, with those in `on_top` replacing the ones for the same keys."""
    keys = {key_of(override) for override in on_top}
    return [*(override for override in overrides if key_of(override) not in keys), *on_top]


def refusal(word: object, known: Known, own: bool) -> str | None:
    """Return the rule that an argument of a folder breaks; None if Hydra may get it.

    Args:
        word: the argument.
        known: keys and groups.
        own: whether the folder is this user's.
    """
    if not isinstance(word, str):
        return "it is not a text"
    if word.startswith("-"):
        return "a file may not hold command-line options"
    word = word.replace("\\", "")  # as Hydra will read it: an escape must hide nothing
    key, value = key_of(word), word.partition("=")[2]
    if key.startswith(_AXIS):
        return refusal(f"{key.removeprefix(_AXIS)}={value}", known, own)
    if key in known.groups:
        return None if _OPTIONS.fullmatch(value) else f"a file may only name options of {key}"
    if not (key in known.keys or key in _HYDRA_KEYS or _is_free(key, known)):
        return f"a file may set only keys of the configuration, {', '.join(_HYDRA_KEYS)} and {_AXIS}*"
    if is_managers(key) and key != _NODES:
        return "a file may not set what a cluster manager is asked for"
    if names_code(word, known) and not own:
        return "only a folder of your own may name code to run"
    return _interpolated(word, own)


def names_code(word: str, known: Known) -> bool:
    """Whether the value of a word names code that will run."""
    return "_target_" in word or key_of(word) in known.code


def leads_away(word: str) -> bool:
    """Return whether an argument makes this process connect to another machine or address, with its credentials."""
    key, value = key_of(word), word.partition("=")[2].replace("\\", "")
    if key == "cluster.address":
        return value not in ("null", "")
    if key == "cluster.storage_path":
        return "://" in value
    return key == "tracking.uri" and not is_local_store(value)


def is_local_store(uri: str) -> bool:
    """Return whether a store is a plain file: not an address, a database or an interpolation."""
    return _LOCAL_STORE.fullmatch(uri) is not None


def _is_free(key: str, known: Known) -> bool:
    return key.startswith(known.free) and re.fullmatch(r"[\w.]+", key) is not None


def _interpolated(word: str, own: bool) -> str | None:
    allowed = _OWN_RESOLVERS if own else _RESOLVERS
    for begin in (match.start() for match in re.finditer(r"\$\{", word)):
        match = _INTERPOLATION.match(word, begin)
        if match is None or match["resolver"] not in (None, *allowed):
            return f"a file may interpolate only keys and {', '.join(allowed)}"
    return None
