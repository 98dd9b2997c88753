"""Forecasts against memory that others have published; no GPU is needed.

python -m benchmarks.published_memory [csv]

Llama 3.1 8B on 8 GPUs, whose allocator's peak torchtitan published; and each row of a CSV of training runs of models in
the shape of GPT-2, every one of which ran on its GPU and so has to be forecast to fit. Writes
`experiments/published_memory/results/` and exits with 1 where a forecast is off by more than a tenth, or a row does not
fit.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_lab.config import SweepConfig
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.run import Request, forecast_all
from fsdp_lab.training.__main__ import read_config

GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "published_memory" / "results"
ROWS = ROOT.parent / "shared" / "data" / "published_fsdp_speed.csv"
MOST_ERROR = 0.10
# What CUDA has of a card of this name, in GiB, as its out-of-memory messages tell.
CAPACITY_GIB = {"a100_40gb": 39.5, "a100_80gb": 79.25, "h100_80gb": 79.1}
VOCABULARY = 50368
_CHUNK_TOKENS = 2048  # of which logits are held at a time

LLAMA = [
    "model=llama3_8b", "task=language", "data=synthetic_tokens", "data.vocab_size=128256", "data.seq_len=8192",
    "training.global_batch_size=16", "sharding=per_block", "reshard_after_forward=default", "precision=bf16_mixed",
    "optimizer=adamw", "activation_checkpointing=selective",
]  # fmt: skip
# What torchtitan published of it, the allocator's reserved peak in GiB: benchmarks/llama3_h100_202412_torchtitan.md,
# table 1. A forecast takes compiled blocks for eager ones.
PUBLISHED = {"compile=false": 82.4, "compile=true": 77.0}


def request(words: Sequence[str], num_workers: int, capacity_gib: float | None) -> Request:
    config: SweepConfig = read_config(None, [*words, "forecast.device=cuda"])
    capacity = None if capacity_gib is None else int(capacity_gib * GIB)
    return Request(config, num_workers, True, capacity)


def words_of(row: Mapping[str, str]) -> list[str]:
    """The overrides of a published row."""
    microbatch, ranks, length = int(row["microbatch_size"]), int(row["num_gpus"]), int(row["seq_len"])
    chunks = max(1, microbatch * length // _CHUNK_TOKENS)
    parts = min(2, int(row["grad_accum_steps"]))  # a third microbatch holds what the second does
    return [
        "model=custom", "model._target_=benchmarks.gpt.Gpt", f"model.vocab_size={VOCABULARY}",
        f"model.dim={row['hidden_dim']}", f"model.num_layers={row['num_layers']}",
        f"model.num_heads={row['num_heads']}", f"model.max_seq_len={length}",
        "task=language", f"task.loss_chunks={min(chunks, length)}",
        "data=synthetic_tokens", f"data.vocab_size={VOCABULARY}", f"data.seq_len={length}",
        f"training.global_batch_size={microbatch * ranks * parts}", f"training.grad_accum_steps={parts}",
        "training.sync_each_microbatch=true", "optimizer=adamw", "sharding=per_block",
        "reshard_after_forward=always", f"precision={row['precision']}",
        f"activation_checkpointing={row['activation_checkpointing']}",
    ]  # fmt: skip


def print_progress(done: int, total: int) -> None:
    if done % 10 == 0 or done == total:
        print(f"{done} of {total} forecasts", flush=True)


def against_torchtitan() -> bool:
    requests = [request([*LLAMA, word], 8, 96.0) for word in PUBLISHED]
    good = True
    for (word, published), forecast in zip(PUBLISHED.items(), forecast_all(requests, print_progress), strict=True):
        assert forecast.reserved_bytes is not None, forecast.error
        reserved, peak = forecast.reserved_bytes / GIB, forecast.peak_bytes / GIB
        error = reserved / published - 1
        good &= abs(error) <= MOST_ERROR
        ours = f"{reserved:.1f} GiB reserved, {peak:.1f} of them tensors"
        print(f"Llama 3.1 8B, {word}: {ours}; published {published}: {error:+.1%}")
    return good


def against_rows(path: Path) -> bool:
    rows = list(csv.DictReader(path.read_text().splitlines()))
    forecasts = forecast_all(
        [request(words_of(r), int(r["num_gpus"]), CAPACITY_GIB[r["gpu"]]) for r in rows], print_progress
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    failing = [(row, f) for row, f in zip(rows, forecasts, strict=True) if f.error or not f.fits]
    with (RESULTS / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "num_gpus", "model", "seq_len", "microbatch_size", "precision",
                         "activation_checkpointing", "needed_gib", "capacity_gib", "fits"])  # fmt: skip
        for row, one in zip(rows, forecasts, strict=True):
            writer.writerow(line_of(row, one))
    print(f"{len(rows) - len(failing)} of {len(rows)} published rows are forecast to fit")
    for row, one in failing:
        print("does not fit:", *line_of(row, one), one.error or "")
    return not failing


def line_of(row: Mapping[str, str], forecast: Forecast) -> list[str]:
    needed = "" if forecast.error else f"{forecast.needed_bytes / GIB:.1f}"
    keys = ("gpu", "num_gpus", "model", "seq_len", "microbatch_size", "precision", "activation_checkpointing")
    return [*(row[key] for key in keys), needed, str(CAPACITY_GIB[row["gpu"]]), "yes" if forecast.fits else "no"]


def main() -> int:
    rows = Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    good = against_torchtitan()
    if rows.is_file():
        good &= against_rows(rows)
    else:
        print(f"skipped: {rows} is not here")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
