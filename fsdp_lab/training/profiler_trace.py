"""A few steps of rank 0 as a Chrome trace, with `profile_trace=true`: operators, kernels and communication."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.storage.files import whole
from fsdp_lab.training.distributed import DistributedContext

TRACED_STEPS = 3
_STEPS = 1 + TRACED_STEPS  # the first one starts the profiler's libraries, and is dropped
FILE = "trace_rank0.json.gz"  # for chrome://tracing and Perfetto


class ProfilerTrace:
    """Records the first steps after those that are followed for memory. They are slow, so no rank times them.

    Args:
        ranks: this process; rank 0 records.
    """

    def __init__(self, config: TrialConfig, ranks: DistributedContext, folder: Path) -> None:
        self._left = _STEPS if config.profile_trace else 0
        self._file = folder / FILE
        self._profile: profile | None = None
        if config.profile_trace and ranks.is_first:
            cuda = [ProfilerActivity.CUDA] if ranks.device.type == "cuda" else []
            steps = schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1)
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *cuda], schedule=steps, on_trace_ready=self._write
            )

    def records(self) -> bool:
        return self._left > 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one step, and write the trace after the last one."""
        if self._profile is not None and self._left == _STEPS:
            self._profile.start()
        yield
        self._left -= 1
        if self._profile is not None:
            self._profile.step()
            if not self._left:
                self.finish()

    def finish(self) -> None:
        """Write the steps recorded so far, if any; for a run of few steps."""
        if self._profile is not None and self._left < _STEPS:
            self._profile.stop()
        self._profile = None

    def _write(self, recorded: profile) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder, whole(self._file, parents=False) as making:
                packed = Path(folder, FILE)  # PyTorch packs files with this suffix
                recorded.export_chrome_trace(str(packed))
                shutil.copyfile(packed, making)
        except (OSError, RuntimeError) as error:  # a full disk ends a trial where it loses results, not here
            print(f"the profiler's trace could not be written: {error}", flush=True)
