"""Trials through Ray Tune, each a Ray Train job.

Ray reads its environment when it is imported, so nothing here imports it before `start` has set that.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections import Counter

from fsdp_lab.config.machine import ray_folder
from fsdp_lab.config.sweep import Engine
from fsdp_lab.engine import cluster as engine
from fsdp_lab.engine import shortcut
from fsdp_lab.sweep.runner import SweepPlan, SweepRun
from fsdp_lab.sweep.shutdown import sigterm_interrupts


def reach_cluster(plan: SweepPlan) -> None:
    """Reach the Ray at `cluster.address` before the sweep writes anything anywhere.

    Raises:
        UserError: no Ray answers there, or not to this process's token; or none can be started here.
    """
    config = plan.config
    if config.engine is not Engine.ray or not plan.has_more():
        return
    if config.cluster.address is None:
        ray_folder()  # which checks it
    else:
        print(f"connecting to Ray at {config.cluster.address}", flush=True)
        engine.start_ray(config.cluster, plan.code())


class RayTuneExecutor:
    """The executor of `engine=ray`."""

    def __init__(self) -> None:
        self.interrupted_by: str | None = None
        self._stopped = threading.Event()

    def start(self, sweep: SweepRun) -> None:
        cluster = sweep.config.cluster
        if cluster.address is None:
            sweep.log("Ray starts")
        engine.start_ray(cluster, sweep.plan.code())
        sigterm_interrupts()  # Ray has put a handler of its own
        if cluster.address is None:
            threading.Thread(target=self._watch_servers, args=(sweep,), name="ray", daemon=True).start()

    def _watch_servers(self, sweep: SweepRun) -> None:
        """Interrupt this process when a server of its Ray ends, because Ray answers nothing then."""
        while not self._stopped.wait(1.0) and not sweep.closed:
            if lost := engine.lost_server():
                self.interrupted_by = f"Ray's {lost}"
                os.kill(os.getpid(), signal.SIGINT)
                return

    def run(self, sweep: SweepRun) -> None:
        from ray.exceptions import OutOfMemoryError

        from fsdp_lab.sweep.executors.tuner import build_tuner, put_back_running

        # Of Tune's own state on disk, which nothing here reads, it need not tell that it could not be written.
        logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
        if why := shortcut.unusable():
            sweep.log(f"trials take seconds longer to start: {why}")
        elif sweep.config.cluster.address is None:
            shortcut.keep_ready_processes()
        deaths = Counter[tuple[int, int]]()
        try:
            while sweep.has_more():
                try:
                    build_tuner(sweep).fit()
                    return
                except Exception as error:
                    if not any(isinstance(each, OutOfMemoryError) for each in (error, error.__cause__)):
                        raise
                    put_back_running(sweep, deaths)  # Ray killed a trial's own process, of which Tune knows nothing
        except KeyboardInterrupt:
            gc.disable()  # Tune's destructors ask Ray, which may not answer any more; this process ends soon
            raise

    def stop(self) -> None:
        """Disconnect from Ray; a Ray that was started here ends."""
        self._stopped.set()
        engine.stop_ray()
