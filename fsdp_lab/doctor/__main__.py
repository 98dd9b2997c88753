"""Whether this machine can run sweeps: what is wrong, and how to repair it.

python -m fsdp_lab.doctor
python -m fsdp_lab.doctor tracking.uri=http://127.0.0.1:5000 cluster.address=head:6379

Looks at Python, the libraries, PyTorch and the GPUs, cores, memory, shared memory, disk, limits, and MLflow's
store; changes nothing. Keys:
  tracking.uri      the store of your sweeps (sqlite:///outputs/mlflow.db)
  cluster.address   a running Ray cluster
  folder            where sweeps write (outputs)

`wrong`: sweeps fail until it is repaired. `note`: they run, but slower or smaller. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fsdp_lab.config import UserError, read_words
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.doctor.finding import Finding, lines
from fsdp_lab.doctor.libraries import check_gpus, check_libraries, check_python, check_torch
from fsdp_lab.doctor.machine import (
    check_cores,
    check_folder,
    check_memory,
    check_open_files,
    check_processes,
    check_shared_memory,
    check_temporary,
)
from fsdp_lab.doctor.services import check_cluster, check_store
from fsdp_lab.limits import read_limits
from fsdp_lab.redact import redact
from fsdp_lab.status import ExitCode

KEYS = ("tracking.uri", "cluster.address", "folder")
_PIPE_WIDTH = 200  # of a file or a pipe; COLUMNS sets another


def findings(options: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of each check, the slow ones last. A check that fails itself becomes a finding."""
    limits = read_limits()
    folder, store = Path(options.get("folder", "outputs")), options.get("tracking.uri", TrackingConfig.uri)
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("Python", check_python),
        ("libraries", check_libraries),
        ("GPUs", check_gpus),
        ("cores", lambda: check_cores(limits)),
        ("memory", lambda: check_memory(limits)),
        ("shared memory", check_shared_memory),
        ("disk", lambda: check_folder(folder)),
        ("temporary files", check_temporary),
        ("open files", check_open_files),
        ("processes", lambda: check_processes(limits)),
        ("MLflow store", lambda: check_store(store)),
    ]
    if address := options.get("cluster.address"):
        checks.append(("Ray cluster", lambda: check_cluster(address)))
    for subject, check in [*checks, ("PyTorch", check_torch)]:
        try:
            yield check()
        except (OSError, ValueError, OverflowError) as error:
            observation = f"cannot be examined ({type(error).__name__}: {redact(str(error))})"
            yield Finding(
                subject, observation, "check that this user may read and run the file named there", fails=True
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each finding as it is made, and return the exit status.

    Args:
        arguments: `key=value`; None: those of the command line.

    Returns:
        0: sweeps can run; 1: something has to be repaired; 2: bad input.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        options = read_words(words, KEYS, __doc__ or "") if words else {}
    except UserError as error:
        print(f"fsdp_lab.doctor: {error}", file=sys.stderr)
        return ExitCode.refused
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = max(40, shutil.get_terminal_size().columns if known else _PIPE_WIDTH)
    wrong = 0
    for finding in findings(options):
        print("\n".join(lines([finding], width)), flush=True)
        wrong += finding.fails
    print(f"{wrong} to repair" if wrong else "sweeps can run here")
    return ExitCode.failed if wrong else ExitCode.finished


if __name__ == "__main__":
    sys.exit(main())
