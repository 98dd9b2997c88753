"""Trials through Ray Tune, each a Ray Train job.

Ray reads its environment when it is imported, so nothing here imports it before `start` has set that.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time

from fsdp_lab.engine import cluster as engine
from fsdp_lab.engine import shortcut
from fsdp_lab.sweep.shutdown import sigterm_interrupts
from fsdp_lab.sweep.sweep import Sweep


class RayTuneExecutor:
    """The executor of `engine=ray`."""

    interrupted_by: str | None = None

    def start(self, sweep: Sweep) -> None:
        cluster = sweep.config.cluster
        if cluster.address is None:
            sweep.log("Ray starts")
        engine.start_ray(cluster, sweep.code())
        sigterm_interrupts()  # Ray has put a handler of its own
        if cluster.address is None:
            threading.Thread(target=self._watch_servers, args=(sweep,), name="ray", daemon=True).start()

    def _watch_servers(self, sweep: Sweep) -> None:
        """Interrupt this process when a server of its Ray ends, because Ray answers nothing then."""
        while sweep.ending is None:
            time.sleep(1.0)
            if (lost := engine.lost_server()) and sweep.ending is None:
                self.interrupted_by = f"Ray's {lost}"
                os.kill(os.getpid(), signal.SIGINT)
                return

    def run(self, sweep: Sweep) -> None:
        from ray.exceptions import OutOfMemoryError

        from fsdp_lab.sweep.executors.tuner import Deaths, build_tuner

        # Of Tune's own state on disk, which nothing here reads, it need not tell that it could not be written.
        logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
        if why := shortcut.unusable():
            sweep.log(f"trials take seconds longer to start: {why}")
        elif sweep.config.cluster.address is None:
            shortcut.keep_ready_processes()
        deaths = Deaths()
        try:
            while sweep.has_more():
                try:
                    build_tuner(sweep, deaths).fit()
                    return
                except Exception as error:
                    if not any(isinstance(each, OutOfMemoryError) for each in (error, error.__cause__)):
                        raise
                    deaths.by_memory(sweep, str(error))
        except KeyboardInterrupt:
            gc.disable()  # Tune's destructors ask Ray, which may not answer any more; this process ends soon
            raise

    def stop(self) -> None:
        """Disconnect from Ray; a Ray that was started here ends."""
        engine.stop_ray()
