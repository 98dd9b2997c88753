"""What the keys of accelerate, transformers' Trainer and torchtitan mean here: `their_keys.txt`, in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fsdp_lab.config.options import groups, option_values
from fsdp_lab.config.serialize import value_text
from fsdp_lab.config.words import with_overrides

KINDS = ("ddp", "fsdp1", "fsdp2")
_NO = "no: "


@dataclass(frozen=True)
class Row:
    """A key of another trainer.

    Attributes:
        key: dotted, as in the file.
        kinds: the ways to train in which it counts; in others it has no effect.
        default: the value of an absent key; None: it has none.
        ours: value -> overrides, or why there are none; see the table.
        reads: whether its own overrides are used when a file is read.
        writes: whether it is in a file that is written.
        remark: the comment above it.
    """

    key: str
    kinds: tuple[str, ...]
    default: Any
    ours: Mapping[str, str]
    reads: bool
    writes: bool
    remark: str

    def words(self, value: Any, known: Mapping[str, Any]) -> str:
        """Return the overrides of a value, or why there are none."""
        text = (",".join(value) if isinstance(value, list) else value_text(value)).lower()
        options = {option.lower(): words for option, words in self.ours.items()}
        if text == "false" and text not in options and "no" in options:  # a bare no in YAML
            text = "no"
        elif text.isdecimal() and text not in options and "*" not in options and 0 < int(text) <= len(options):
            text = [*options][int(text) - 1]
        names = ", ".join(option for option in self.ours if option not in "*?")
        words = options.get(text, options.get("*", f"{_NO}it is none of {names}"))
        try:
            if words.count("{") and text.split() != [text]:
                return f"{_NO}it has spaces"  # which would split it into several overrides
            return words if words.startswith(_NO) else words.format(**{**known, "value": value_text(value)})
        except KeyError:
            return options.get("?", f"{_NO}it depends on another value")

    def value(self, settings: Mapping[str, Any]) -> Any:
        """Return the value with overrides that are closest to a trial's settings; None: nothing to write."""
        options = {each: words for each, words in self.ours.items() if not words.startswith(_NO)}
        if not any(options.values()):
            return None
        fits = {each: "".join(_fits(words, settings)) for each, words in options.items()}
        chosen = max(options, key=lambda each: ("0" not in fits[each], fits[each].rstrip("0")))  # in a tie the first
        value = settings.get(options["*"].partition("=")[0]) if chosen == "*" else _typed(chosen)
        return None if value == self.default and (chosen == "*" or not options[chosen]) else value


def _typed(text: str) -> Any:
    """Return a value of the table: a number, true, false, a text, or None for an empty one."""
    return yaml.safe_load(text) if not text or text in ("true", "false") or text[-1].isdecimal() else text


def _fits(words: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield 1 for each setting of some overrides that is the trial's, else 0."""
    for key, _, value in (word.partition("=") for word in words.split()):
        if key in groups():
            values = option_values(key, value).items()
            yield from (str(int(settings[f"{key}.{name}"] == each)) for name, each in values if each is not None)
        else:
            ours = settings[key]
            yield str(int(ours is not None if "{" in value else value_text(ours) == value))


@dataclass
class Trainer:
    """A trainer whose files are read.

    Attributes:
        rows: in the order of the table.
        ignored: patterns of keys that change nothing of a step.
        joint: keys that only the overrides of others use.
    """

    rows: list[Row] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    joint: list[str] = field(default_factory=list)


@cache
def trainers() -> Mapping[str, Trainer]:
    """Return the trainers of the table by their names."""
    made, remark = dict[str, Trainer](), ""
    for line in Path(__file__).with_name("their_keys.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            trainer, remark = made.setdefault(line.strip("[]"), Trainer()), ""
        elif line.startswith(("- ", "+ ")):
            (trainer.ignored if line[0] == "-" else trainer.joint).extend(line[2:].split())
        elif line.startswith("#"):
            remark = line[2:]
        elif line:
            keys, when, default, ours = (part.strip() for part in line.split("|"))
            options: dict[str, str] = {}
            for values, _, words in (option.partition("->") for option in ours.split("; ")):
                options |= dict.fromkeys(values.strip().split(", "), words.strip())
            kinds = tuple(when.split()) or KINDS
            for key in keys.strip("<> ").split(", "):
                row = Row(key, kinds, _typed(default), options, keys[0] != ">", keys[0] != "<", remark)
                trainer.rows.append(row)
            remark = ""
    return made


@dataclass
class Reading:
    """What a file means here.

    Attributes:
        overrides: in the order of the table.
        without: `key=value` of theirs -> why it has no counterpart.
        ignored: keys that change nothing of a step.
        unknown: keys that are not in the table.
    """

    overrides: list[str] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The way to train, by the overrides so far."""
        kinds = {"sharding=ddp": "ddp", "sharding.api=fsdp1": "fsdp1"}
        return next((kind for word, kind in kinds.items() if word in self.overrides), "fsdp2")


def read(name: str, values: Mapping[str, Any], derived: Mapping[str, Any]) -> Reading:
    """Return what a file means.

    Args:
        name: of its trainer.
        values: by dotted keys; what is empty counts as absent.
        derived: names in overrides -> what is computed from several values.
    """
    trainer, reading = trainers()[name], Reading()
    given = {key: value for key, value in values.items() if value not in (None, "", [], {})}
    every = {row.key: row.default for row in trainer.rows if row.default is not None} | given
    parts = {key.rpartition(".")[2]: value for key, value in every.items()}
    known = {name: value for name, value in parts.items() if len(value_text(value).split()) == 1} | dict(derived)
    done = {*trainer.joint, *(row.key for row in trainer.rows if not row.reads)}
    for row in (row for row in trainer.rows if row.reads and row.key in every):
        if reading.kind in row.kinds:
            done.add(row.key)
            words = row.words(every[row.key], known)
            if words.startswith(_NO):
                reading.without[f"{row.key}={value_text(every[row.key])}"] = words.removeprefix(_NO)
            else:
                reading.overrides = with_overrides(reading.overrides, words.split())
    patterns = (*trainer.ignored, *(row.key for row in trainer.rows))
    for key in (key for key in given if key not in done):
        known_key = any(fnmatchcase(key, pattern) for pattern in patterns)
        (reading.ignored if known_key else reading.unknown).append(key)
    return reading


def write(name: str, settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the values of a trainer's file that are closest to a trial's effective settings, by dotted keys.

    Args:
        name: of the trainer.
        kind: the trial's way to train, one of `KINDS`.
    """
    rows = [row for row in trainers()[name].rows if row.writes and kind in row.kinds]
    return {row.key: value for row in rows if (value := row.value(settings)) is not None}
