"""Which words of a sweep's folder Hydra may get. Pure: Hydra runs what a configuration tells it to, and a folder may
come from anybody.

A word is an override. It may set a key of the configuration, choose an option of a group by its name, or set one of the
few keys of Hydra's that a sweep needs; it holds no interpolation but those that follow. Whatever else was typed when
the sweep was started is typed again to resume it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from fsdp_lab.compose import groups
from fsdp_lab.config import SweepConfig
from fsdp_lab.config.key import keys_of
from fsdp_lab.config.options import CODE_KEYS

_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_AXIS = "hydra.sweeper.params."  # a default axis: a word of its own follows
_RESOLVERS = ("per_worker", "now", "hydra")
_OWN_RESOLVERS = (*_RESOLVERS, "oc.env")  # a variable may be a secret: only whose word it is may read it
_OPTIONS = re.compile(r"[\w\s,'\"()\[\]*=-]*")  # names and choices of them; no path, which would be a file anywhere
_INTERPOLATION = re.compile(r"\$\{\s*(?:[\w.\[\]]+\s*\}|(?P<resolver>\w+(?:\.\w+)*)\s*:)")
_LOCAL_STORE = re.compile(r"['\"]?sqlite:///[\w./ =-]*['\"]?")


@dataclass(frozen=True)
class Known:
    """What a word may name.

    Attributes:
        keys: of the configuration, dotted.
        groups: which take the name of an option.
        free: prefixes below which any key may stand, such as `model.`.
        code: keys whose value names code that will run, beside every `_target_`.
    """

    keys: frozenset[str]
    groups: frozenset[str]
    free: tuple[str, ...] = ()
    code: frozenset[str] = frozenset()


@cache
def known_words() -> Known:
    """Return what this version knows."""
    keys = frozenset(keys_of(SweepConfig))
    return Known(keys, frozenset(groups()), free=("model.", "data."), code=frozenset(CODE_KEYS))


def key_of(word: str) -> str:
    """Return the key of an override, without the sign before it."""
    return word.partition("=")[0].lstrip("+~")


def refusal(word: object, known: Known, own: bool) -> str | None:
    """Return the rule that a word of a folder breaks; None where Hydra may get it.

    Args:
        own: whether the folder is this user's.
    """
    if not isinstance(word, str):
        return "it is no word"
    if word.startswith("-"):
        return "no option of the command line is taken from a file"
    word = word.replace("\\", "")  # as Hydra will read it: an escape must hide nothing
    key, value = key_of(word), word.partition("=")[2]
    if key.startswith(_AXIS):
        return refusal(f"{key.removeprefix(_AXIS)}={value}", known, own)
    if key in known.groups:
        return None if _OPTIONS.fullmatch(value) else f"of {key} a file may name the options only"
    if not (key in known.keys or key in _HYDRA_KEYS or _is_free(key, known)):
        return f"a file may set only keys of the configuration, {', '.join(_HYDRA_KEYS)} and {_AXIS}*"
    if names_code(word, known) and not own:
        return "it names code to run, which is taken from your own folders only"
    return _interpolated(word, own)


def names_code(word: str, known: Known) -> bool:
    """Whether the value of a word names code that will run."""
    return "_target_" in word or key_of(word) in known.code


def leads_away(word: str) -> bool:
    """Whether a word has this process talk to another machine, or to whoever listens at an address: with the
    credentials of its environment."""
    key, value = key_of(word), word.partition("=")[2].replace("\\", "")
    if key == "cluster.address":
        return value not in ("null", "")
    if key == "cluster.storage_path":
        return "://" in value
    return key == "tracking.uri" and not is_local_store(value)


def is_local_store(uri: str) -> bool:
    """Whether a store is a plain file: an address, a database or what is only known when it is resolved is not."""
    return _LOCAL_STORE.fullmatch(uri) is not None


def _is_free(key: str, known: Known) -> bool:
    return key.startswith(known.free) and re.fullmatch(r"[\w.]+", key) is not None


def _interpolated(word: str, own: bool) -> str | None:
    allowed = _OWN_RESOLVERS if own else _RESOLVERS
    for begin in (found.start() for found in re.finditer(r"\$\{", word)):
        found = _INTERPOLATION.match(word, begin)
        if found is None or found["resolver"] not in (None, *allowed):
            return f"of interpolations a file may hold only keys and {', '.join(allowed)}"
    return None
