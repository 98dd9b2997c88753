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
    config, search = plan.config, plan.search
    has_more = plan.state.open or (search is not None and search.has_more())
    if config.engine is not Engine.ray or not has_more:
        return
    if config.cluster.address is None:
        ray_folder()  # which checks it
    else:
        print(f"connecting to Ray at {config.cluster.address}", flush=True)
        engine.start_ray(config.cluster, _code_of(plan))


def _code_of(plan: SweepPlan) -> list[str]:
    trials = (path for state in plan.state.trials for path in state.trial.config.code())
    return sorted({*trials, *(plan.search.code() if plan.search is not None else ())})


class RayTuneExecutor:
    """The executor of `engine=ray`."""

    def __init__(self) -> None:
        self.interrupted_by: str | None = None
        self._stopped = threading.Event()

    def start(self, sweep: SweepRun) -> None:
        cluster = sweep.config.cluster
        if cluster.address is None:
            sweep.log("Ray starts")
        engine.start_ray(cluster, _code_of(sweep.plan))
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

        from fsdp_lab.sweep.executors.tuner import MAX_STARTING, build_tuner, put_back_running

        # Of Tune's own state on disk, which nothing here reads, it need not tell that it could not be written.
        logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
        if why := shortcut.unusable():
            sweep.log(f"trials take seconds longer to start: {why}")
        elif sweep.config.cluster.address is None:
            shortcut.keep_ready_processes()
        typed, deaths, killed = MAX_STARTING in os.environ, Counter[tuple[int, int]](), True
        try:
            while killed and sweep.has_more():
                killed = False
                try:
                    build_tuner(sweep).fit()
                except Exception as error:
                    if not any(isinstance(each, OutOfMemoryError) for each in (error, error.__cause__)):
                        raise
                    killed = True  # Ray killed a trial's own process, of which Tune knows nothing
                    put_back_running(sweep, deaths)
        except KeyboardInterrupt:
            gc.disable()  # Tune's destructors ask Ray, which may not answer any more; this process ends soon
            raise
        finally:
            if not typed:
                os.environ.pop(MAX_STARTING, None)  # another sweep of this process has its own number

    def stop(self) -> None:
        """Disconnect from Ray; a Ray that was started here ends."""
        self._stopped.set()
        engine.stop_ray()
