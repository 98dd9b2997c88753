"""WikiHow in its published CSV files: articles, and the first sentences of their steps as summaries."""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.wording import count
from fsdp_lab.workloads.language.tokens import SplitName
from fsdp_lab.workloads.seq2seq.pairs import Pair, Pairs, check_lengths
from fsdp_lab.workloads.seq2seq.pydoc import one_line

COLUMNS = ("headline", "text")
PUBLISHED = "wikihowAll.csv"
_VAL_SHARE = 20  # of the titles, where one file has both splits
_LARGEST_CELL = 2**31 - 1  # csv's own limit is 131,072 characters, and articles are longer
_SHORTENS = 0.75  # a summary is shorter than so much of its article


class WikiHow(Pairs):
    """The articles of a folder (`text`) and their summaries (`headline`). Every rank holds the texts in memory.

    Reads a file with `train` and one with `val` in its name, else `wikihowAll.csv`, else the only CSV file. In a single
    file a twentieth of the titles is the validation split, so parts of one article stay together. As the publishers do,
    rows without a text or a shorter summary are left out, and so are the commas between sentences ("WikiHow: A Large
    Scale Text Summarization Dataset", arXiv 1810.09305, and its `process.py`).

    Args:
        source_len: the most tokens of an article.
        target_len: the most tokens of a summary.
        tokenizer: a `tokenizer.json`; None: bytes, as in ByT5.

    Raises:
        UserError: the folder lacks the files, a file lacks the columns, or no row is left.
    """

    def __init__(
        self,
        split: SplitName,
        *,
        root: str,
        source_len: int = 512,
        target_len: int = 150,
        tokenizer: str | None = None,
    ) -> None:
        file, whole = file_of(Path(root), split)
        pairs = [pair for title, pair in read(file) if whole or _is_val(title) == (split == "val")]
        if not pairs:
            raise UserError(_without_articles(root, file, whole, split))
        super().__init__(pairs, source_len, target_len, tokenizer)

    @staticmethod
    def check_files(root: str, source_len: int = 512, target_len: int = 150, **_: Any) -> None:
        """Check the lengths, and that each split has an article. Reads a file until it has found one.

        Raises:
            UserError: as the constructor.
        """
        check_lengths(source_len, target_len)
        splits: tuple[SplitName, SplitName] = ("train", "val")
        for split in splits:
            file, whole = file_of(Path(root), split)
            if not any(whole or _is_val(title) == (split == "val") for title, _ in read(file)):
                raise UserError(_without_articles(root, file, whole, split))


def _without_articles(root: str, file: Path, whole: bool, split: SplitName) -> str:
    titles = 0 if whole else len({_article(title) for title, _ in read(file)})
    if not titles:
        return (
            f"data.root={root}: {file.name} has no article with a shorter summary for the {split} split; use the "
            f"published {PUBLISHED}."
        )
    share = "validation split, which is a" if split == "val" else "training split, which is all but a"
    return (
        f"data.root={root}: none of the {count(titles, 'article')} of {file.name} is in the {share} twentieth of the "
        "titles; use two files with train and val in their names."
    )


def file_of(root: Path, split: SplitName) -> tuple[Path, bool]:
    """Return the file of a split, and whether the whole file belongs to it.

    Raises:
        UserError: the folder has no such file.
    """
    files = sorted(root.glob("*.csv")) if root.is_dir() else []
    named = {name: [f for f in files if name in f.stem.lower()] for name in ("train", "val")}
    if all(len(candidates) == 1 for candidates in named.values()):
        return named[split][0], True
    for file in files:
        if file.name == PUBLISHED or len(files) == 1:
            return file, False
    holds = f"has {', '.join(f.name for f in files) or 'no CSV file'}" if root.is_dir() else "is not a folder"
    raise UserError(
        f"data.root={root} {holds}; point it at the folder of the published {PUBLISHED}, or of two files with train "
        "and val in their names."
    )


def rows(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file by their columns; a cell may hold commas, line breaks and doubled quotes.

    Raises:
        UserError: columns are missing, or the file is no CSV.
    """
    csv.field_size_limit(_LARGEST_CELL)
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        reader = csv.DictReader(lines, restval="")
        try:
            columns = [(name or "").strip() for name in reader.fieldnames or ()]
            missing = [name for name in COLUMNS if name not in columns]
            if missing:
                raise UserError(
                    f"{file} has no column {' and no column '.join(missing)}: found {', '.join(columns) or 'none'}, "
                    f"expected {' and '.join(COLUMNS)}; use the published {PUBLISHED}, or rename its columns."
                )
            reader.fieldnames = columns
            yield from reader
        except csv.Error as error:
            raise UserError(f"{file}, line {reader.line_num}, is not CSV: {error}.") from error


def read(file: Path) -> Iterator[tuple[str, Pair]]:
    """Yield the title and the pair of each row with both texts; without a column `title` the text is the title."""
    for row in rows(file):
        headline, text = row["headline"].strip(), row["text"].strip()
        if headline and len(headline) < _SHORTENS * len(text):
            pair = Pair(one_line(re.sub(r"\.+\n+,", ".\n", text)), one_line(headline.replace(".,", ".")))
            yield row.get("title") or text, pair


def _article(title: str) -> str:
    """Return the title without the number that the parts of an article end with."""
    return title.strip().rstrip("0123456789")


def _is_val(title: str) -> bool:
    return zlib.crc32(_article(title).encode()) % _VAL_SHARE == 0
