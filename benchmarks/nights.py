"""How often unchanged nights raise an alarm here: N nights of the same code, one after the other.

python -m benchmarks.nights [nights] [overrides of fsdp_lab.nightly]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from fsdp_lab.metrics import SPEED
from fsdp_lab.nightly.nights import Nights

# two settings, three repeats each, in the sweep's own process: some fifteen seconds a night
TINY = (
    "engine=inline", "model=mlp", "forecast.enabled=false", "data.num_train=512", "data.num_val=32", "offload=none",
    "training.global_batch_size=32", "sharding=per_block", "precision=fp32,bf16", "reshard_after_forward=always",
)  # fmt: skip


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    given = sys.argv[2:] or list(TINY)
    alarms = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            command = [sys.executable, "-m", "fsdp_lab.nightly", "--once", "nightly.folder=nights", *given]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
            if done.returncode not in (0, 3):
                print(done.stdout[-2000:], done.stderr, file=sys.stderr)
                return 1
            night = Nights(str(Path(folder, "nights/nightly"))).read()[-1]
            alarms += night.verdict == "regression"
            speeds = "   ".join(
                f"{setting} {'/'.join(f'{v:.0f}' for v in rows[SPEED])}"
                for setting, rows in night.frame.groupby("setting", sort=False)
            )
            excluded = int(night.frame["timing_excluded"].sum())
            print(f"night {number}: {night.verdict} ({excluded} timings excluded)  samples/s {speeds}", flush=True)
    print(f"{alarms} of {count} unchanged nights raised an alarm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
