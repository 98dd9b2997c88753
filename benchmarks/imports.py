"""CPU seconds of what a rank imports, with and without Python's garbage collector (`fsdp_lab/quick_imports.py`).

python -m benchmarks.imports [rounds]

Each import is a process of its own; with and without in turn.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from fsdp_lab.engine.rank_server import MODULES

_LIMIT_S = 120
_CODE = """
import importlib, sys, time
if sys.argv[1] == "without":
    from fsdp_lab import quick_imports
    quick_imports.begin()
for name in sys.argv[2:]:
    importlib.import_module(name)
print(time.process_time())
"""


def main() -> int:
    rounds = int((*sys.argv[1:], "3")[0])
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    print("| round | with the collector, s | without, s |\n| --- | --- | --- |")
    for number in range(rounds):
        for how, times in seconds.items():
            command = [sys.executable, "-c", _CODE, how, *MODULES]
            done = subprocess.run(command, check=True, timeout=_LIMIT_S, stdout=subprocess.PIPE, text=True)
            times.append(float(done.stdout))
        print(f"| {number + 1} | {seconds['with'][-1]:.1f} | {seconds['without'][-1]:.1f} |", flush=True)
    before, after = (statistics.median(times) for times in seconds.values())
    print(f"| median | {before:.1f} | **{after:.1f}** |\n\nsaved: {1 - after / before:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
