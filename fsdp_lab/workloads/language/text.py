"""A folder of text, as bytes or by a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.language.tokens import PackedTokens, SplitName, byte_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SUFFIXES = (".txt", ".md", ".parquet")
_SEPARATOR = "\n\n"


class TextTokens(PackedTokens):
    """The documents of a folder, packed into rows. Every rank holds them in memory.

    A `.txt` or `.md` file is a document, and so is a row of a `.parquet` file's column `text`. Files are taken in the
    order of their names, from all folders below `root`. The last tenth of the characters is the validation split.

    Args:
        seq_len: tokens of a row, without the last label.
        tokenizer: a `tokenizer.json`, which needs the package `tokenizers`; special tokens of its post-processor are
            kept. None: tokens are bytes, and an empty line separates documents.

    Raises:
        UserError: `root` has no text or less than a row, or the tokenizer cannot be read.
    """

    def __init__(
        self,
        split: SplitName,
        *,
        root: str,
        seq_len: int = 1024,
        tokenizer: str | None = None,
    ) -> None:
        documents = part_of(list(read_documents(Path(root))), split)
        num_bytes = sum(len(text.encode()) for text in documents)
        tokens, vocab_size = (
            (byte_tokens(_SEPARATOR.join(documents).encode()), 256)
            if tokenizer is None
            else encode(documents, tokenizer)
        )
        if len(tokens) <= seq_len:
            raise UserError(
                f"data.root={root}: its {split} split has {len(tokens)} tokens, and a row needs data.seq_len={seq_len} "
                "plus 1; add text or use a smaller data.seq_len."
            )
        per_token = 1.0 if tokenizer is None else num_bytes / len(tokens)
        super().__init__(tokens, seq_len, vocab_size, per_token)

    @staticmethod
    def check_files(root: str, tokenizer: str | None = None, **_: Any) -> None:
        """Check the folder and the tokenizer, reading only the first text.

        Raises:
            UserError: as the constructor.
        """
        next(read_documents(Path(root)))
        if tokenizer is not None:
            read_tokenizer(tokenizer)

    @staticmethod
    def least_vocab_size(tokenizer: str | None = None, **_: Any) -> int:
        """Return the number of tokens that a model must know: 256 for bytes, else the tokenizer's."""
        return 256 if tokenizer is None else vocab_size_of(read_tokenizer(tokenizer))


def read_documents(root: Path) -> Iterator[str]:
    """Yield the documents of a folder that are not empty.

    Raises:
        UserError: the folder has no text, or a Parquet file has no column `text`.
    """
    has_text = False
    for file in sorted(root.rglob("*")) if root.is_dir() else ():
        if file.suffix in SUFFIXES and file.is_file():
            for text in _texts(file):
                if text:
                    has_text = True
                    yield text
    if not has_text:
        why = "has no text" if root.is_dir() else "is not a folder"
        raise UserError(f"data.root={root} {why}; point it at a folder with {', '.join(SUFFIXES)} files.")


def _texts(file: Path) -> Iterator[str]:
    if file.suffix != ".parquet":
        yield file.read_text(encoding="utf-8", errors="replace")
        return
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file)
    except ArrowInvalid as error:
        raise UserError(f"{file} is not a Parquet file: {error}") from error
    if "text" not in table.schema_arrow.names:
        raise UserError(
            f"{file} has no column text, only {', '.join(table.schema_arrow.names)}; rename its text column to text."
        )
    for batch in table.iter_batches(columns=["text"]):
        yield from (text for text in batch.column("text").to_pylist() if text)


def part_of(documents: list[str], split: SplitName) -> list[str]:
    """Return a split's documents: the first nine tenths of all characters, or the rest. One document is cut."""
    left = sum(map(len, documents)) * 9 // 10
    parts = []
    for text in documents:
        parts.append(text[:left] if split == "train" else text[left:])
        left = max(0, left - len(text))
    return [part for part in parts if part]


def encode(documents: list[str], tokenizer: str) -> tuple[Tensor, int]:
    """Return the tokens of all documents as int32 `(N,)`, and the size of the vocabulary."""
    made = read_tokenizer(tokenizer)
    made.no_truncation()  # many files have the limits of a model: documents would be cut, or filled up with padding
    made.no_padding()
    rows = [torch.tensor(encoding.ids, dtype=torch.int32) for encoding in made.encode_batch(documents)]
    return torch.cat(rows), vocab_size_of(made)


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Return the largest token plus one; some vocabularies have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def read_tokenizer(tokenizer: str) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, which is shared by all callers.

    Raises:
        UserError: the package or the file is missing, or the file is no tokenizer's.
    """
    try:
        import tokenizers  # noqa: F401 (whether it is there)
    except ImportError as error:
        raise UserError(
            f"data.tokenizer={tokenizer} needs the package tokenizers: pip install tokenizers, or leave "
            "data.tokenizer=null for bytes."
        ) from error
    if not Path(tokenizer).is_file():
        raise UserError(f"data.tokenizer={tokenizer} is not a file; give the path of a tokenizer.json.")
    try:
        return _tokenizer(tokenizer, Path(tokenizer).stat().st_mtime)
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"data.tokenizer={tokenizer} is not a tokenizer.json: {error}") from error


@cache
def _tokenizer(file: str, changed: float) -> Tokenizer:
    """Return the tokenizer of a file, once for each state of it: each trial of a sweep needs it."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(file)
