"""Codecs from texts to at most so many token ids: bytes, or by a tokenizer's file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.config.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD = 0  # as in T5 and ByT5; attention masks it, so 0 may mean something else in another tokenizer


class Bytes:
    """ByT5's tokens (arXiv 2105.13626; `google/byt5-small`).

    0 pads, 1 ends a text, 2 is unknown, and byte b of UTF-8 is b + 3. With 125 sentinels of its pre-training that is
    384.
    """

    OFFSET = 3
    vocab_size = 384

    def encode(self, text: str, most: int) -> list[int]:
        """Return at most so many ids, including the end of the text. The text is cut after so many bytes."""
        # a character has at least one byte, so the rest of a long text is not read
        return [byte + self.OFFSET for byte in text[:most].encode()[: most - 1]] + [1]


class FromFile:
    """A `tokenizer.json`. The special tokens of its post-processor are kept, and counted, when a text is cut."""

    def __init__(self, made: Tokenizer) -> None:
        self.vocab_size = max(made.get_vocab().values(), default=-1) + 1  # some vocabularies have gaps
        self._made = made
        self._made.no_padding()

    def encode(self, text: str, most: int) -> list[int]:
        self._made.enable_truncation(most)
        return self._made.encode(text).ids  # type: ignore[no-any-return]


Codec = Bytes | FromFile


@cache  # each trial of a sweep needs its vocabulary
def build_codec(tokenizer: str | None) -> Codec:
    """Return ByT5's codec, or that of a `tokenizer.json`.

    Args:
        tokenizer: the path of the file; None: bytes.

    Raises:
        UserError: the package or the file is missing, or the file is no tokenizer's.
    """
    if tokenizer is None:
        return Bytes()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError(
            f"data.tokenizer={tokenizer} needs the package tokenizers: pip install tokenizers, or leave "
            "data.tokenizer=null for bytes."
        ) from error
    if not Path(tokenizer).is_file():
        raise UserError(f"data.tokenizer={tokenizer} is not a file; give the path of a tokenizer.json.")
    try:
        return FromFile(Tokenizer.from_file(tokenizer))
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"data.tokenizer={tokenizer} is not a tokenizer.json: {error}") from error
