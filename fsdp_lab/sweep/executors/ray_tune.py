"""Trials through Ray Tune, each a Ray Train job.

Ray reads its environment when it is imported, so nothing here imports it before `start` has set that.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from contextlib import chdir

from fsdp_lab.engine import cluster as engine
from fsdp_lab.engine import ray_private
from fsdp_lab.sweep.runner import SweepRun
from fsdp_lab.sweep.shutdown import sigterm_interrupts
from fsdp_lab.sweep.store.record import TYPED_ELSEWHERE


class RayTuneExecutor:
    """`engine=ray`. `interrupted_by`: the server of Ray's that ended by itself, and with it the sweep."""

    def __init__(self) -> None:
        self.interrupted_by: str | None = None
        self._stopped = threading.Event()

    def start(self, sweep: SweepRun) -> None:
        """Start or reach Ray.

        Raises:
            UserError: no Ray answers at `cluster.address`.
        """
        cluster = sweep.config.cluster
        sweep.say("Ray starts" if cluster.address is None else "Ray is being reached")
        trials = (path for state in sweep.states for path in state.trial.config.code())
        code = sorted({*trials, *(sweep.plan.search.code() if sweep.plan.search is not None else ())})
        # Ray lets its workers import from the folder that it is started in; where a resume stands is not one for that.
        with chdir(os.environ.get(TYPED_ELSEWHERE, ".")):
            engine.start_ray(cluster, code)
        sigterm_interrupts()  # Ray has put a handler of its own
        if cluster.address is None:
            threading.Thread(target=self._watch_servers, args=(sweep,), name="ray", daemon=True).start()

    def _watch_servers(self, sweep: SweepRun) -> None:
        """Interrupt this process when a server of its Ray ends: nothing that was asked of it is answered then."""
        while not self._stopped.wait(1.0) and not sweep.closed:
            if lost := engine.lost_server():
                self.interrupted_by = f"Ray's {lost}"
                os.kill(os.getpid(), signal.SIGINT)
                return

    def run(self, sweep: SweepRun) -> None:
        """Hand the trials to Ray Tune and wait for them."""
        from fsdp_lab.sweep.executors.tuner import build_tuner

        # Of Tune's own state on disk, which nothing here reads, it need not tell that it could not be written.
        logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
        if sweep.config.cluster.address is None:
            ray_private.keep_ready_processes()
        ray_private.survive_memory_kills()
        if missing := ray_private.missing():
            sweep.say(ray_private.slower(missing))
        try:
            build_tuner(sweep).fit()
        except KeyboardInterrupt:
            gc.disable()  # Tune's destructors ask Ray, which may not answer any more; this process ends soon
            raise

    def stop(self) -> None:
        self._stopped.set()
        engine.stop_ray()
