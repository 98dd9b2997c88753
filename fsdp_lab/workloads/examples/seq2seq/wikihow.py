"""WikiHow in its published CSV file: articles, and the first sentences of their steps as summaries."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.examples.language.tokens import SplitName
from fsdp_lab.workloads.examples.seq2seq.pairs import Pair, Pairs
from fsdp_lab.workloads.examples.seq2seq.pydoc import one_line

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED, COLUMNS = "wikihowAll.csv", ["headline", "title", "text"]
_VAL_SHARE = 20  # of the titles
_SHORTENS = 0.75  # a summary is shorter than so much of its article


class WikiHow(Pairs):
    """The articles (`text`) of the published file and their summaries (`headline`). Every rank has them in memory.

    A twentieth of the titles is the validation split, so parts of one article stay together. As its publishers do,
    it leaves out rows without a text or a shorter summary, and the commas between sentences ("WikiHow: A Large
    Scale Text Summarization Dataset", arXiv 1810.09305, and its `process.py`).

    Args:
        root: the folder of `wikihowAll.csv`.
        source_len: the most tokens of an article.
        target_len: the most tokens of a summary.
        tokenizer: a `tokenizer.json`; None: bytes, as in ByT5.

    Raises:
        UserError: the file cannot be read, or lacks the columns.
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
        rows = _read(root)
        pairs = [
            Pair(one_line(re.sub(r"\.+\n+,", ".\n", text)), one_line(headline.replace(".,", ".")))
            for headline, title, text in zip(*(rows[name].str.strip() for name in COLUMNS), strict=True)
            if headline and len(headline) < _SHORTENS * len(text) and _is_val(title) == (split == "val")
        ]
        super().__init__(pairs, source_len, target_len, tokenizer)

    @staticmethod
    def check_files(source_len: int = 512, target_len: int = 150, *, root: str = "", **_: Any) -> None:
        Pairs.check_files(source_len, target_len)
        _read(root, limit=1)


def _read(root: str, limit: int | None = None) -> pd.DataFrame:
    import pandas as pd

    file = Path(root, PUBLISHED)
    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False, encoding_errors="replace", nrows=limit)
        if missing := [name for name in COLUMNS if name not in table]:
            raise ValueError(f"it has no column {' and no column '.join(missing)}")
        return table
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"data.root={root}: {file} cannot be read ({reason}); point it at the folder of the published {PUBLISHED}, "
            f"with the columns {', '.join(COLUMNS)}."
        ) from error


def _is_val(title: str) -> bool:
    """Return whether an article is in the validation split, by its title without the number of the part."""
    return zlib.crc32(title.rstrip("0123456789").encode()) % _VAL_SHARE == 0
