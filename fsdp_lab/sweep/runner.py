"""A sweep from its first trial to its last: a function runs the trials, the outputs show them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.config.sweep import Engine
from fsdp_lab.config.wording import count
from fsdp_lab.engine.cluster import lost_server, start_ray, stop_ray
from fsdp_lab.engine.inline import run_inline
from fsdp_lab.sweep.shutdown import interruptible, sigterm_interrupts
from fsdp_lab.sweep.sweep import Sweep

if TYPE_CHECKING:
    from fsdp_lab.sweep.outputs.outputs import Outputs


def run_sweep(sweep: Sweep, execute: Callable[[Sweep], None], outputs: Outputs) -> ExitCode:
    """Run the trials of a sweep. The folder is locked by the caller.

    Args:
        execute: starts what trials need, calls `outputs.ready`, and runs the trials that `Sweep.next` gives.

    Raises:
        UserError: MLflow or Ray cannot be reached, or a trial needs more than the cluster has.
    """
    sweep.outputs = outputs
    error: BaseException | None = None
    interrupted = False
    with interruptible(sweep), outputs.console.bar, outputs.plain_loops, outputs.forecasts:
        try:
            sweep.open()
            if sweep.has_more():
                execute(sweep)
                outputs.ran()
            else:
                sweep.log(f"nothing to do: {_all_ended(sweep)}")
        except KeyboardInterrupt:
            interrupted = True
            sweep.log(f"{sweep.interrupted_by} has ended: it was killed" if sweep.interrupted_by else "interrupted")
        except BaseException as caught:
            error = caught
            raise
        finally:
            # before Ray stops: that takes seconds, and people press Ctrl-C twice
            try:
                code = sweep.close(interrupted, error)
            finally:
                if sweep.config.engine is Engine.ray:
                    stop_ray()
    return code


def _all_ended(sweep: Sweep) -> str:
    failed = sum(state.status is TrialStatus.failed for state in sweep.trials)
    if failed:
        return f"{failed} of {count(len(sweep.trials), 'trial')} failed; add resume_failed=true to train again"
    if len(sweep.trials) == 1:
        return "the trial has a result"
    return f"all {len(sweep.trials)} trials have a result"


def run_here(sweep: Sweep) -> None:
    """Run one trial after the other, in this process."""
    sweep.outputs.ready()
    while (number := sweep.next()) is not None:
        sweep.prepare(number)
        sweep.begin(number)
        config = part(sweep.config_of(number), TrialConfig)
        run_inline(config, sweep.folder_of(number), partial(sweep.epoch, number), sweep.address_of(number))
        sweep.end(number)


def run_on_ray(sweep: Sweep) -> None:
    """Run trials through Ray Tune, each a Ray Train job, as many side by side as the cluster holds."""
    cluster = sweep.config.cluster
    if cluster.address is None:
        sweep.log("Ray starts")
    start_ray(cluster, sweep.code())
    sigterm_interrupts()  # Ray has installed its own handler
    if cluster.address is None:
        threading.Thread(target=_watch_servers, args=(sweep,), name="ray", daemon=True).start()
    sweep.outputs.ready()
    if sweep.has_more():
        from fsdp_lab.sweep.tuner import run_trials  # imports Ray, which reads its environment then

        run_trials(sweep)


def _watch_servers(sweep: Sweep) -> None:
    """Interrupt this process when a server of its Ray ends, because Ray answers nothing then."""
    while sweep.ending is None:
        time.sleep(1.0)
        if (lost := lost_server()) and sweep.ending is None:
            sweep.interrupted_by = f"Ray's {lost}"
            os.kill(os.getpid(), signal.SIGINT)
            return


EXECUTORS = {Engine.inline: run_here, Engine.ray: run_on_ray}
