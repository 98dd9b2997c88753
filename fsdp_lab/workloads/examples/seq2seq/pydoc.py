"""Passages of the documentation that comes with Python, and their sections' titles: pairs without a download."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from itertools import pairwise

from fsdp_lab.workloads.examples.language.tokens import SplitName
from fsdp_lab.workloads.examples.seq2seq.pairs import Pair, Pairs

_VAL_SHARE = 10  # a tenth of the titles
_UNDERLINE = re.compile(r"([*=~^\"-])\1{2,}")
_SHORTEST = 120  # characters of a passage; shorter paragraphs are joined with the next


class PydocSummaries(Pairs):
    """Passages of `help("topics")`, and the title of the section that each is from: 1,100 pairs.

    A section's title decides its split, and no passage appears twice. The text differs a little between versions of
    Python.
    """

    def __init__(
        self, split: SplitName, *, source_len: int = 512, target_len: int = 150, tokenizer: str | None = None
    ) -> None:
        super().__init__(read(split), source_len, target_len, tokenizer)


def read(split: SplitName) -> list[Pair]:
    """Return the pairs of a split, each passage and its section's title on one line."""
    from pydoc_data.topics import topics

    pairs: dict[str, str] = {}
    for name in sorted(topics):
        for title, text in sections(topics[name]):
            for passage in passages(text):
                pairs.setdefault(passage, title)
    return [
        Pair(passage, title)
        for passage, title in pairs.items()
        if (zlib.crc32(title.encode()) % _VAL_SHARE == 0) == (split == "val")
    ]


def sections(topic: str) -> Iterator[tuple[str, str]]:
    """Yield the title of each section of a topic, and its text up to the next title. A title is underlined."""
    lines = topic.split("\n")
    titles = [
        i
        for i, (line, below) in enumerate(pairwise(lines))
        if line.strip() and not line.startswith(" ") and _UNDERLINE.fullmatch(below) and len(below) >= len(line)
    ]
    for start, end in zip(titles, [*titles[1:], len(lines)], strict=True):
        yield one_line(lines[start]), "\n".join(lines[start + 2 : end])


def passages(text: str) -> Iterator[str]:
    """Yield a section's paragraphs, each short one joined with the next. A short rest at the end is dropped."""
    joined = ""
    for paragraph in text.split("\n\n"):
        joined = one_line(f"{joined} {paragraph}")
        if len(joined) >= _SHORTEST:
            yield joined
            joined = ""


def one_line(text: str) -> str:
    """Return a text with every run of white space replaced by one space."""
    return " ".join(text.split())
