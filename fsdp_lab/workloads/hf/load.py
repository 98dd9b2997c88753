"""Models that were exported, as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.workloads.hf.library import transformers


def load_seq2seq(folder: Path) -> Any:
    """Return the model of a folder, in eval mode and float32. No code of the folder's is run, and no pickle is read.

    Raises:
        UserError: it is not one.
    """
    import torch

    try:
        return (
            transformers()
            .AutoModelForSeq2SeqLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
            .eval()
        )
    except UserError:
        raise
    except Exception as error:  # each file that is read raises what it likes
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder} is no exported sequence-to-sequence model: {reason}") from error
