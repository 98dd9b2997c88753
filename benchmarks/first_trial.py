"""What the first trial on a host changes: forecasts of other settings before and after it, on a host made up.

python -m benchmarks.first_trial [overrides]

Each step of the host takes 15 % longer than forecast. One trial is recorded as if it had run there. Writes nothing that
stays, and exits with 1 if the host's step is outside the range of a later forecast.
"""

from __future__ import annotations

import sys
import time
from contextlib import chdir
from tempfile import TemporaryDirectory

from benchmarks.published.summary import table
from fsdp_lab.api import forecast
from fsdp_lab.forecast.devices import torch_version
from fsdp_lab.forecast.observations import record_observation
from fsdp_lab.forecast.speed.device import digest
from fsdp_lab.forecast.speed.refine import Observation
from fsdp_lab.forecast.table import Row

SLOWER = 1.15
WORDS = [
    "model=llama3_8b", "data.seq_len=4096", "training.global_batch_size='${per_worker:2}'", "cluster.num_workers=8",
    "forecast.device=h200", "sharding=per_block", "precision=bf16_mixed", "offload=none",
    "activation_checkpointing=selective,full", "reshard_after_forward=always,never",
]  # fmt: skip


def main() -> int:
    """Print the step of each setting before, on the host, and after."""
    words = [*WORDS, *sys.argv[1:]]
    with TemporaryDirectory() as folder, chdir(folder):  # trials are recorded below the working directory
        before = forecast(words, quiet=True)
        plant(before.rows[0])
        after = forecast(words, quiet=True)
    axes, columns = list(before.axes), ["step_s", "step_low_s", "step_high_s"]
    earlier, later = (result.frame().set_index(axes)[columns] for result in (before, after))
    lines, inside = [], []
    for name, (step_s, low_s, high_s) in zip(earlier.index, earlier.to_numpy(), strict=True):
        host_s, (new_s, new_low_s, new_high_s) = SLOWER * step_s, later.loc[name]
        inside.append(new_low_s <= host_s <= new_high_s)
        ran = " (ran)" if tuple(before.rows[0].settings) == name else ""
        spans = [
            f"{s:.2f} ({low:.2f} to {high:.2f})"
            for s, low, high in ((step_s, low_s, high_s), (new_s, new_low_s, new_high_s))
        ]
        lines.append([f"{', '.join(name)}{ran}", spans[0], f"{host_s:.2f}", spans[1]])
    print(table([", ".join(axes), "forecast, s", "host, s", "after the trial, s"], lines))
    print(after.recommendation.notes[0])
    return 0 if all(inside) else 1


def plant(row: Row) -> None:
    """Record a trial of a setting on the host."""
    speed, request = row.forecast.speed, row.request
    assert speed is not None and speed.parts is not None and request is not None and request.sheet is not None
    seconds, figures = SLOWER * speed.step_s, digest(request.sheet)
    one = Observation("planted", speed.parts, seconds, torch_version(), figures, speed.group, time.time())
    record_observation(speed.device, "planted", one)


if __name__ == "__main__":
    sys.exit(main())
