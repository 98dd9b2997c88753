"""The English text that comes with Python: its help on the language, `help("topics")`."""

from __future__ import annotations

import zlib

from fsdp_lab.workloads.examples.language.tokens import PackedTokens, SplitName, byte_tokens

_VAL_SHARE = 10  # a tenth of the topics


class PydocTokens(PackedTokens):
    """The bytes of Python's help topics, packed into rows: half a million in all, without a download.

    Topics repeat paragraphs of each other. Only the first of each is kept, so no paragraph is in both splits. A topic's
    name decides its split. The text differs a little between versions of Python.
    """

    def __init__(self, split: SplitName, *, seq_len: int = 256) -> None:
        super().__init__(byte_tokens(read(split).encode()), seq_len)


def read(split: SplitName) -> str:
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for name in sorted(topics):
        paragraphs = dict.fromkeys(topics[name].strip().split("\n\n"))
        fresh = [paragraph for paragraph in paragraphs if paragraph not in seen]
        seen.update(fresh)
        if fresh and (zlib.crc32(name.encode()) % _VAL_SHARE == 0) == (split == "val"):
            kept.append("\n\n".join(fresh))
    return "\n\n".join(kept)
