"""A sweep from its first trial to its last."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from fsdp_lab.compose import Trial
from fsdp_lab.config import workers_of
from fsdp_lab.config.checks import check_driver
from fsdp_lab.config.schema import Engine
from fsdp_lab.engine import cluster as engine
from fsdp_lab.engine.files import read_outcome
from fsdp_lab.forecast.run import Background
from fsdp_lab.hardware import num_gpus
from fsdp_lab.report.write import FILES
from fsdp_lab.sweep.console import Console
from fsdp_lab.sweep.driver import Sweep, forecast_requests, to_forecast
from fsdp_lab.sweep.interrupt import INTERRUPTED, interruptible, sigterm_interrupts
from fsdp_lab.sweep.names import go_on_command, relative
from fsdp_lab.sweep.record import Record
from fsdp_lab.sweep.results import TrialState
from fsdp_lab.sweep.search import Search


def run_trials(
    search: Search | None,
    states: list[TrialState],
    first: Trial,
    folder: Path,
    swept: Sequence[str],
    record: Record,
    resumed: bool = False,
) -> int:
    """Run trials, as many side by side as the cluster holds. The folder is locked by the caller.

    Args:
        first: a trial of the sweep, for the keys that all share.

    Returns:
        the exit status, see `Sweep.close`.

    Raises:
        UserError: MLflow or Ray cannot be reached, a trial needs more than the cluster has, or PyTorch cannot use
            this machine's GPUs.
    """
    config = first.config
    if config.cluster.address is None:  # another machine's driver is for its workers to ask
        check_driver()
    early = None
    if config.engine is Engine.ray and config.cluster.address is None:  # it is this machine that will train
        states_to_forecast = list(to_forecast(states).values())
        early = Background(forecast_requests(states_to_forecast, num_gpus() > 0, workers_of(config)))
    with Console(states, swept) as console, interruptible() as deadline, early or nullcontext():
        run = Sweep(search, states, first, folder, swept, record, console, resumed)
        deadline.sweep = run
        error: BaseException | None = None
        interrupted = False
        try:
            run.open()
            if not run.has_more():
                console.say(f"nothing is left to do: all {len(states)} trials have a result")
            elif config.engine is Engine.inline:
                run_inline_all(run)
            else:
                start_and_take_forecasts(run, early)
                if config.cluster.address is None:
                    deadline.watch_ray()
                if run.has_more():
                    from fsdp_lab.sweep.tune import tune_all

                    with run.forecaster:
                        tune_all(run)
        except KeyboardInterrupt:
            interrupted = True
            gc.disable()  # Tune's destructors ask Ray, which may not answer any more; this process ends soon
            console.say(f"Ray's {deadline.lost} has ended: it was killed" if deadline.lost else "interrupted")
        except BaseException as caught:
            error = caught
            raise
        finally:
            # before Ray stops: that takes seconds, and people press Ctrl-C twice
            status = run.close(interrupted, error)
            engine.stop_ray()
    console.final(run.answer)
    report = f"report: {relative(folder)}/{FILES[0]}   " if run.answer else ""
    go_on = f"   to go on: {go_on_command(folder)}" if status == INTERRUPTED else ""
    results = f"results: {relative(folder)}/results.csv   compare: {run.tracker.ui_url or 'make ui'}"
    results += f"   MLflow run: {run.parent_id}" if run.parent_id else ""
    console.rich.print(f"{report}{results}{go_on}", highlight=False, soft_wrap=True)
    return status


def run_inline_all(run: Sweep) -> None:
    """One trial after the other, in this process."""
    from fsdp_lab.engine.inline import run_inline

    while (number := run.next()) is not None:
        folder = run.folder_of(number)
        run.prepare(number)
        run.begin(number)
        run_inline(run.states[number].trial.config, folder, lambda number=number: run.take_reports(number))  # type: ignore[misc]
        outcome = read_outcome(folder)
        run.end(number, outcome.status if outcome else "failed", outcome.error if outcome else "its folder is full")


def start_and_take_forecasts(run: Sweep, early: Background | None) -> None:
    """Start or reach Ray, and forecast the trials that are known.

    Args:
        early: the forecasts of all states, begun already; None where it takes a cluster to know what to ask.
    """
    cluster = run.config.cluster
    run.console.say("Ray starts" if cluster.address is None else "Ray is being reached")
    engine.start_ray(cluster)
    sigterm_interrupts()  # Ray has put a handler of its own
    wanted = to_forecast(run.states)
    if early is not None:
        found = early.result(run.waits_for_forecasts)
    else:
        workers = engine.resolve_num_workers(cluster)
        with Background(forecast_requests(list(wanted.values()), engine.num_gpus() > 0, workers)) as forecasts:
            found = forecasts.result(run.waits_for_forecasts)
    run.take_forecasts(dict(zip(wanted, found, strict=True)))
