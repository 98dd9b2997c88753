"""Speed forecasts against steps that others have published; no GPU is needed.

python -m benchmarks.published_speed [csv]

Traces each row of a CSV of training runs at two depths, fits a device's efficiencies to every second row of each type
of GPU, and predicts the others. Then Llama 3.1 8B, to which nothing is fitted. Writes
`experiments/published_speed/results/` and exits with 1 where the rows that were not fitted are off by more than the
study says. Traces are kept in `outputs/published_speed` until the code that makes them changes: the first run takes
half an hour on two cores, later ones five minutes.
"""

from __future__ import annotations

import csv
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks import published_memory
from benchmarks.published_memory import CAPACITY_GIB, GIB, LLAMA, ROOT, ROWS, VOCABULARY
from benchmarks.speed_fit import Row, Step, constant, fit, refit, roofline
from fsdp_lab.forecast.forecast import forecast_step
from fsdp_lab.forecast.run import forecast_all
from fsdp_lab.speed.device import Efficiency, Reached, load_device
from fsdp_lab.speed.pairs import pair_error
from fsdp_lab.speed.program import Operator
from fsdp_lab.training.__main__ import read_config
from fsdp_lab.wording import count

RESULTS = ROOT / "experiments" / "published_speed" / "results"
KEPT = ROOT / "outputs" / "published_speed" / "programs.pkl"
DEVICES = ROOT / "conf" / "device"
# What a trace hangs on; of `speed` all else prices it, as do data sheets.
TRACED_BY = (
    "fsdp_lab/config/*.py", "fsdp_lab/forecast/*.py", "fsdp_lab/training/*.py", "fsdp_lab/workloads/**/*.py",
    "fsdp_lab/speed/program.py", "fsdp_lab/speed/fuse.py", "benchmarks/mpt.py", "conf/**/*.yaml",
)  # fmt: skip
DEPTHS = (3, 5)  # a step is linear in its equal blocks from here on
_MOST_LAUNCHES = 8
WHOLE = (1, 35, 105)  # rows that are traced with all their blocks, too: 30B, 7B, and 350M on 128 GPUs
MOST_MEDIAN, MOST_P90, LEAST_ORDER = 0.03, 0.08, 0.99
# Tokens a second and GPU: benchmarks/llama3_h100_202412_torchtitan.md, table 1.
LLAMA_TOKENS = {"compile=false": 5762, "compile=true": 6667}
_FILES = {"h100_80gb": "h100_sxm", "a100_80gb": "a100_80gb", "a100_40gb": "a100_40gb"}
_HEAD = "| | rows | median | p90 | max | Spearman | ratios: median | p90 |\n" + "| --- " * 8 + "|"

Program = list[Operator]


def fingerprint(root: Path = ROOT) -> str:
    """Return what tells the code of traces, and PyTorch's version, from others. Prices of operators do not count."""
    digest = sha256(torch.__version__.encode())
    for pattern in TRACED_BY:
        for file in sorted(file for file in root.glob(pattern) if file.parent.name != DEVICES.name):
            digest.update(f"{file.relative_to(root)}:{sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


class Traces:
    """Programs of steps, kept in a file as long as the code is the same that traced them."""

    def __init__(self, path: Path, code: str | None = None) -> None:
        self._path, self._code = path, code or fingerprint()
        kept: dict[tuple[str, ...], Program] = pickle.loads(path.read_bytes()) if path.exists() else {}
        self._programs = {key: program for key, program in kept.items() if key[0] == self._code}
        if len(self._programs) < len(kept):
            print(f"{count(len(kept) - len(self._programs), 'trace')} of other code left out", flush=True)

    def of(self, words: Sequence[str], ranks: int) -> Program:
        key = (self._code, *words, f"ranks={ranks}")
        if key not in self._programs:
            self._programs[key] = forecast_step(read_config(None, list(words)), ranks, cuda=True, traced=True).program
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_bytes(pickle.dumps(self._programs))
            os.replace(new, self._path)
        return self._programs[key]


def words_of(row: Mapping[str, str], depth: int) -> list[str]:
    """The overrides of a published row: AdamW in single kernels over all parameters, clipped gradients, and
    accumulation that reduces the gradients of each microbatch, as Composer does with FSDP. Two microbatches stand for
    more: the third does what the second did."""
    microbatch, ranks, length = int(row["microbatch_size"]), int(row["num_gpus"]), int(row["seq_len"])
    parts = min(2, int(row["grad_accum_steps"]))
    return [
        "model=custom", "model._target_=benchmarks.mpt.Mpt", f"model.vocab_size={VOCABULARY}",
        f"model.dim={row['hidden_dim']}", f"model.num_layers={depth}", f"model.num_heads={row['num_heads']}",
        f"model.max_seq_len={length}", "task=language", "task.loss_chunks=2", "data=synthetic_tokens",
        f"data.vocab_size={VOCABULARY}", f"data.seq_len={length}",
        f"training.global_batch_size={microbatch * ranks * parts}", f"training.grad_accum_steps={parts}",
        "training.sync_each_microbatch=true", "training.max_grad_norm=1.0", "optimizer=adamw",
        "optimizer.implementation=foreach", "sharding=per_block", "reshard_after_forward=always",
        f"precision={row['precision']}", f"activation_checkpointing={row['activation_checkpointing']}",
    ]  # fmt: skip


def read_rows(path: Path, traces: Traces) -> list[Row]:
    rows = []
    for number, facts in enumerate(csv.DictReader(path.read_text().splitlines()), start=1):
        ranks, length = int(facts["num_gpus"]), int(facts["seq_len"])
        steps = {depth: Step.of(traces.of(words_of(facts, depth), ranks)) for depth in DEPTHS}
        tokens = float(facts["global_batch_size"]) * length / ranks
        device = load_device(DEVICES / f"{_FILES[facts['gpu']]}.yaml")
        rows.append(Row(facts, device, steps, tokens / float(facts["tokens_per_s_per_gpu"])))
        if number % 10 == 0:
            print(f"{number} rows traced", flush=True)
    return rows


def predicted(rows: Sequence[Row], efficiency: Efficiency) -> list[float]:
    return [row.seconds(efficiency) for row in rows]


def print_errors(
    what: str, rows: Sequence[Row], seconds: Sequence[float], splits: Sequence[int] | None = None
) -> tuple[float, float, float]:
    """Print a line of a table; return the median, the 90th percentile and the rank correlation. The line ends with the
    errors of ratios: of each two rows of one model that were predicted by one fit, which `splits` tells apart."""
    errors = np.abs([predicted_s / row.measured - 1 for row, predicted_s in zip(rows, seconds, strict=True)])
    median, p90 = float(np.median(errors)), float(np.quantile(errors, 0.9))
    order = float(spearmanr([row.measured for row in rows], seconds).statistic)
    models: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row, predicted_s, split in zip(rows, seconds, splits or [0] * len(rows), strict=True):
        models[row.facts["model"], split].append(predicted_s / row.measured)
    pairs = pair_error(models.values())
    ratios = [f"{pairs.median:.1%}", f"{pairs.p90:.1%}"] if pairs else ["", ""]
    cells = [what, str(len(rows)), f"{median:.1%}", f"{p90:.1%}", f"{errors.max():.1%}", f"{order:.4f}", *ratios]
    print("| " + " | ".join(cells) + " |", flush=True)
    return median, p90, order


def residuals(rows: Sequence[Row], seconds: Sequence[float]) -> None:
    """Print by what the errors differ: the median with its sign, and of absolute values, of each value of a column."""
    for column in ("model", "seq_len", "num_gpus", "activation_checkpointing"):
        groups: dict[str, list[float]] = defaultdict(list)
        for row, predicted_s in zip(rows, seconds, strict=True):
            groups[row.facts[column]].append(predicted_s / row.measured - 1)
        for value, errors in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
            signed, size = float(np.median(errors)), float(np.median(np.abs(errors)))
            print(f"| {column} | {value} | {len(errors)} | {signed:+.1%} | {size:.1%} |")


def launches(rows: Sequence[Row], seconds: Sequence[float], learned: Mapping[str, Efficiency]) -> None:
    """Print the rows of which launches bound the largest shares, by their predictions."""
    shares = [row.launch_share(learned[row.facts["gpu"]]) for row in rows]
    errors = [(share, row, second / row.measured - 1) for share, row, second in zip(shares, rows, seconds, strict=True)]
    print("\n| GPU | model | sequence | microbatch | bound by launches | error |\n" + "| --- " * 6 + "|")
    for share, row, error in sorted(errors, key=lambda one: -one[0])[:_MOST_LAUNCHES]:
        cells = [row.facts[key] for key in ("gpu", "model", "seq_len", "microbatch_size")]
        print("| " + " | ".join([*cells, f"{share:.4%}", f"{error:+.1%}"]) + " |", flush=True)


def against_rows(path: Path) -> bool:
    traces = Traces(KEPT)
    rows = read_rows(path, traces)
    good, lines = True, []
    halves = {gpu: [row for row in rows if row.facts["gpu"] == gpu] for gpu in _FILES}
    learned = {gpu: fit(mine[::2]) for gpu, mine in halves.items()}
    for gpu, mine in halves.items():
        fitted, unseen = mine[::2], mine[1::2]
        print(f"\n{gpu}: {learned[gpu]}\n{_HEAD}")
        print_errors("fitted", fitted, predicted(fitted, learned[gpu]))
        own = predicted(unseen, learned[gpu])
        median, p90, order = print_errors("not fitted", unseen, own)
        good &= median <= MOST_MEDIAN and p90 <= MOST_P90 and order >= LEAST_ORDER
        simple = print_baselines(fitted, unseen)
        lines += [
            (row, False, predicted_s, None, None)
            for row, predicted_s in zip(fitted, predicted(fitted, learned[gpu]), strict=True)
        ]
        lines += [(row, True, *predicted_s) for row, *predicted_s in zip(unseen, own, *simple, strict=True)]
        other_splits(mine, learned[gpu])
    everything = [row for mine in halves.values() for row in mine]
    print("\n| column | value | rows | median error | median of absolute errors |\n| --- | --- | --- | --- | --- |")
    predicted_s = [row.seconds(learned[row.facts["gpu"]]) for row in everything]
    residuals(everything, predicted_s)
    launches(everything, predicted_s, learned)
    transfer(halves["a100_80gb"], halves["h100_80gb"])
    write(lines)
    whole_depth(rows, learned, traces)
    memory_of_outliers(everything, predicted_s)
    return good


def print_baselines(fitted: Sequence[Row], unseen: Sequence[Row]) -> tuple[list[float], list[float]]:
    simple, five = constant(fitted, unseen), roofline(fitted, unseen)
    print_errors("not fitted, one utilisation", unseen, simple)
    print_errors("not fitted, roofline of five numbers", unseen, five)
    return simple, five


def other_splits(rows: Sequence[Row], fitted: Efficiency) -> None:
    """Leave out one size of model after the other; fit to a random half, five times."""
    of = refit(rows, fitted)
    everyone = range(len(rows))
    models = dict.fromkeys(row.facts["model"] for row in rows)
    sizes = [[i for i in everyone if rows[i].facts["model"] == model] for model in models]
    halves = [np.random.default_rng(seed).permutation(len(rows))[: len(rows) // 2].tolist() for seed in range(5)]
    for what, splits in (("sizes of models that were left out", sizes), ("random halves that were left out", halves)):
        left = [rows[i] for out in splits for i in out]
        by_split = [predicted([rows[i] for i in out], of([i for i in everyone if i not in out])) for out in splits]
        numbers = [number for number, out in enumerate(splits) for _ in out]
        print_errors(what, left, [seconds for one in by_split for seconds in one], numbers)
    print(f"fitted to all rows, for the device's file: {of(everyone)}")


def transfer(known: Sequence[Row], unknown: Sequence[Row]) -> None:
    """Learn on one type of GPU, predict another by its data sheet: without and with what microbenchmarks reach."""
    print(f"\nA100 80 GB to H100 80 GB\n{_HEAD}")
    learned = fit(known)
    reached = known[0].device.reached
    bare = replace(learned, matmul=learned.matmul * reached.matmul, attention=learned.attention * reached.attention)
    sheet = [replace(row, device=replace(row.device, reached=Reached())) for row in unknown]
    print_errors("by the data sheet alone", unknown, predicted(sheet, bare))
    predicted_s = predicted(unknown, learned)
    print_errors("and what microbenchmarks reach", unknown, predicted_s)
    print(f"median error {np.median([f / row.measured - 1 for row, f in zip(unknown, predicted_s, strict=True)]):+.1%}")


def whole_depth(rows: Sequence[Row], learned: Mapping[str, Efficiency], traces: Traces) -> None:
    """Print how far three steps with all their blocks are from those that two depths make of them."""
    for number in WHOLE:
        row = rows[number]
        depth = int(row.facts["num_layers"])
        step = Step.of(traces.of(words_of(row.facts, depth), int(row.facts["num_gpus"])))
        efficiency = learned[row.facts["gpu"]]
        error = row.seconds(efficiency) / replace(row, steps={depth: step, depth + 1: step}).seconds(efficiency) - 1
        print(f"{row.facts['model']}, {depth} blocks: {error:+.3%} by {DEPTHS[0]} and {DEPTHS[1]} blocks")


def memory_of_outliers(rows: Sequence[Row], seconds: Sequence[float]) -> None:
    """Print what the rows with large errors are forecast to need."""
    far = [(r, s / r.measured - 1) for r, s in zip(rows, seconds, strict=True) if abs(s / r.measured - 1) > MOST_P90]
    requests = [
        published_memory.request(
            published_memory.words_of(row.facts), int(row.facts["num_gpus"]), CAPACITY_GIB[row.facts["gpu"]]
        )
        for row, _ in far
    ]
    print("\n| GPU | GPUs | model | sequence | microbatch | error | memory, GiB | of |\n" + "| --- " * 8 + "|")
    for (row, error), forecast in zip(far, forecast_all(requests, lambda done, total: None), strict=True):
        keys = ("gpu", "num_gpus", "model", "seq_len", "microbatch_size")
        needed = forecast.error or f"{forecast.needed_bytes / GIB:.1f}"
        cells = [*(row.facts[key] for key in keys), f"{error:+.1%}", needed, str(CAPACITY_GIB[row.facts["gpu"]])]
        print("| " + " | ".join(cells) + " |", flush=True)


def write(lines: Sequence[Any]) -> None:
    keys = ["gpu", "num_gpus", "model", "seq_len", "microbatch_size", "grad_accum_steps", "precision",
            "activation_checkpointing"]  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*keys, "fitted", "measured_s", "predicted_s", "error", "one_utilisation_s", "roofline_s"])
        for row, unseen, predicted_s, *simple in lines:
            baselines = [f"{value:.4f}" if value is not None else "" for value in simple]
            facts = [row.facts[key] for key in keys]
            error = f"{predicted_s / row.measured - 1:+.4f}"
            writer.writerow(
                [*facts, "no" if unseen else "yes", f"{row.measured:.4f}", f"{predicted_s:.4f}", error, *baselines]
            )


def against_torchtitan() -> None:
    """Llama 3.1 8B on 8 H100s of 96 GB, to which nothing is fitted."""
    device, traces = load_device(DEVICES / "h100_96gb.yaml"), Traces(KEPT)
    facts = {"num_layers": "32", "grad_accum_steps": "1"}
    for word, published in LLAMA_TOKENS.items():
        words = [*LLAMA, word]
        steps = {depth: Step.of(traces.of([*words, f"model.num_layers={depth}"], 8)) for depth in DEPTHS}
        tokens = 2 * 8192 / Row(facts, device, steps, 2 * 8192 / published).seconds(device.efficiency)
        figures = f"{tokens:,.0f} tokens/s a GPU; published {published:,}: {tokens / published - 1:+.1%}"
        print(f"Llama 3.1 8B, {word}: {figures}")


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    against_torchtitan()
    if not path.is_file():
        print(f"skipped: {path} is not here")
        return 0
    return 0 if against_rows(path) else 1


if __name__ == "__main__":
    sys.exit(main())
