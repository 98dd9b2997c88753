"""The trials through Ray Tune, each a Ray Train job. Tune asks for the next trial, and is told when one stops early."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher

from fsdp_lab.config import ConfigError, check_trial, stops_on, to_dict
from fsdp_lab.config.schema import SchedulerName, TrialConfig
from fsdp_lab.engine import cluster as engine
from fsdp_lab.engine import ray_private
from fsdp_lab.engine.files import read_outcome, why_unwritten
from fsdp_lab.engine.job import Job, trial_function

if TYPE_CHECKING:
    from fsdp_lab.sweep.driver import Sweep

_QUIET_S = 20.0  # a start takes about ten seconds; who waits longer is told what for
_REPEAT_S = 60.0


def tune_all(run: Sweep) -> None:
    """Hand the trials to Ray Tune and wait for them."""
    # Of Tune's own state on disk, which nothing here reads, it need not tell that it could not be written.
    logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
    if run.config.cluster.address is None:
        ray_private.keep_ready_processes()
    if missing := ray_private.missing():
        run.console.say(ray_private.slower(missing))
    places = Places(run)
    first = [state for state in run.states if not state.ended]
    side_by_side = min((places.of(state.trial.config).side_by_side for state in first), default=0)
    # Tune's process for a trial only waits: it takes a byte, since it must take something, and no core.
    tune.Tuner(
        tune.with_resources(trial_function, {"memory": 1, **engine.driver_node()}),
        tune_config=tune.TuneConfig(
            search_alg=NextTrial(run, places),
            scheduler=scheduler(run),
            num_samples=-1,
            max_concurrent_trials=side_by_side or places.of(run.config).side_by_side,
            reuse_actors=True,
            trial_name_creator=lambda trial: f"trial_{trial.config['number']}",
            trial_dirname_creator=lambda trial: f"trial_{trial.config['number']}",
        ),
        run_config=tune.RunConfig(
            name=".ray_tune",
            storage_path=str(run.folder),
            verbose=0,
            callbacks=[DriverCallback(run, places), *ray_private.quiet_tune()],
            # a trial whose own process was killed; what goes wrong in it is the job's to try again
            failure_config=tune.FailureConfig(max_failures=run.config.cluster.max_failures),
        ),
    ).fit()


class Places:
    """What trials need of the cluster, asked of it once for each need."""

    def __init__(self, run: Sweep) -> None:
        self.run = run
        self._known: dict[str, engine.Resources] = {}

    def of(self, config: TrialConfig) -> engine.Resources:
        """
        Raises:
            ConfigError: the cluster can never hold it.
        """
        key = str(config.cluster)
        if key not in self._known:
            check_trial(config, engine.resolve_num_workers(config.cluster))
            self._known[key] = engine.check_capacity(config.cluster)
        return self._known[key]


class NextTrial(Searcher):
    """Gives Tune the sweep's next trial when it has a place for one."""

    def __init__(self, run: Sweep, places: Places) -> None:
        super().__init__()
        self.run, self.places = run, places

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps a copy on disk, which nobody reads: the folder of the sweep is what a resume reads."""
        return {}

    def suggest(self, trial_id: str) -> Any:
        while True:
            number = self.run.next()
            if number is None:
                return Searcher.FINISHED
            config = self.run.states[number].trial.config
            try:
                self.places.of(config)
                break
            except ConfigError as error:
                if self.run.search is None:
                    raise
                self.run.end(number, "failed", str(error))  # the cluster cannot hold what was suggested
        self.run.prepare(number)
        job = Job(
            job_config(config),
            str(self.run.folder_of(number)),
            engine.resolve_num_workers(config.cluster),
            engine.resolve_cpus_per_worker(config.cluster),
            engine.num_gpus() > 0,
            os.getcwd(),
        )
        training = config.training
        ends = {"epochs": training.epochs, "max_steps": training.max_steps}
        return {"number": number, **ends, "job": json.dumps(job.as_dict())}

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass

    def save(self, checkpoint_path: str) -> None:
        pass

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass


def job_config(config: TrialConfig) -> dict[str, Any]:
    """What a trial's processes are told: all but where MLflow is, whose address may hold a password."""
    return {key: value for key, value in to_dict(config).items() if key != "tracking"}


def scheduler(run: Sweep) -> TrialScheduler:
    """`scheduler=...`, over the epochs that a trial reports. What is through with its last epoch is not stopped: it
    has its model still to write."""
    settings = run.config.scheduler
    metric, mode = stops_on(run.config)
    most = run.config.training.epochs
    common: dict[str, Any] = {"time_attr": "epoch", "metric": metric, "mode": mode}
    base: TrialScheduler
    match settings.name:
        case SchedulerName.fifo:
            return FIFOScheduler()
        case SchedulerName.asha:
            base = AsyncHyperBandScheduler(
                max_t=max(most, settings.grace_epochs) + 1,
                grace_period=settings.grace_epochs,
                reduction_factor=settings.reduction_factor,
                **common,
            )
        case SchedulerName.median:
            base = MedianStoppingRule(grace_period=settings.grace_epochs, min_samples_required=2, **common)
    decide, complete = base.on_trial_result, base.on_trial_complete

    def not_at_the_end(controller: Any, trial: Any, result: dict[str, Any]) -> str:
        steps = trial.config["max_steps"]
        through = result["epoch"] >= trial.config["epochs"] or (steps is not None and result["step"] >= steps)
        return TrialScheduler.CONTINUE if through else decide(controller, trial, result)

    def only_with_a_result(controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """What ended before its first report has none: the median rule would fail every other trial over it."""
        if "epoch" in result and metric in result:
            complete(controller, trial, result)

    base.on_trial_result = not_at_the_end  # type: ignore[method-assign, assignment]
    base.on_trial_complete = only_with_a_result  # type: ignore[method-assign, assignment]
    return base


class DriverCallback(tune.Callback):
    """Ray Tune's events, passed on to the driver's view of the sweep. Runs in the driver, between Tune's own steps."""

    def __init__(self, sweep: Sweep, places: Places) -> None:
        self.sweep, self.places = sweep, places
        self._speak_at: dict[int, float] = {}
        self._stopped: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps a copy of its callbacks on disk; this one's state is the driver's, and files."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        self.sweep.begin(number)
        self._speak_at[number] = time.monotonic() + _QUIET_S

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        number = trial.config["number"]
        if result.get("done"):  # the scheduler stops it: first of all, before the store is asked anything
            self._stopped.add(number)
            engine.remove_places(self.sweep.folder_of(number))
        self.sweep.take_reports(number)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The trial's own process was killed, and Tune starts it again."""
        number = trial.config["number"]
        engine.remove_places(self.sweep.folder_of(number))
        self.sweep.recovers(number)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Tell what a trial that has not begun to train is waiting for."""
        self.sweep.look()
        for number, speak_at in list(self._speak_at.items()):
            if self.sweep.is_training(number):
                del self._speak_at[number]
                self.sweep.take_reports(number)
            elif time.monotonic() > speak_at:
                self._speak_at[number] = time.monotonic() + _REPEAT_S
                if engine.unmet_request():
                    places = self.places.of(self.sweep.states[number].trial.config)
                    self.sweep.waits(number, places.needed, engine.free_resources(), places.total)
                else:
                    self.sweep.starts(number)

    def _end(self, trial: Any) -> None:
        number = trial.config["number"]
        self._speak_at.pop(number, None)
        folder = self.sweep.folder_of(number)
        outcome = read_outcome(folder)
        if outcome is None:
            # Its process cannot free what the workers hold where it was killed, and would take its time where it
            # was stopped: the next trial waits for these places.
            engine.remove_places(folder)
        if outcome is not None:
            self.sweep.end(number, outcome.status, outcome.error)
        elif number in self._stopped:
            self.sweep.end(number, "finished" if self.sweep.is_through(number) else "stopped", None)
        else:
            self.sweep.end(number, "failed", why_unwritten(folder))
