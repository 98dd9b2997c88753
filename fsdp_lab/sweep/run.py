"""Trials through Ray Tune, each a Ray Train job; what comes back goes to MLflow, the table and the terminal."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fsdp_lab.compose import Trial
from fsdp_lab.config import TrialConfig, check_trial, default_num_workers, to_dict
from fsdp_lab.config.checks import gpus_here
from fsdp_lab.engine import cluster as engine
from fsdp_lab.engine.files import clear_left_over, read_json, read_metrics
from fsdp_lab.engine.job import Job, trial_function
from fsdp_lab.forecast.fits import Forecast, capacity_bytes
from fsdp_lab.forecast.run import Background, Request
from fsdp_lab.sweep.console import Console, epoch_line, mib
from fsdp_lab.sweep.results import TrialState, setting, write_results
from fsdp_lab.tracking import Tracker

INTERRUPTED = 130


class Sweep:
    """The driver's view of a sweep: the only place that writes MLflow runs and `results.csv`."""

    def __init__(self, states: list[TrialState], folder: Path, swept: Sequence[str], console: Console) -> None:
        self.states, self.folder, self.swept, self.console = states, folder, swept, console
        self.tracker = Tracker(states[0].trial.config.tracking, on_problem=console.say)
        self.parent: str | None = None
        self.unwritable = False
        self.notes_told: set[str] = set()

    def open(self, sweep: bool) -> None:
        """Make the store's schema and the parent run: once, before any trial.

        Raises:
            TrackingError: the store cannot be reached.
        """
        self.tracker.open()
        if sweep:
            name = "/".join(self.folder.parts[-2:])
            self.parent = self.tracker.start_sweep(name, self.folder, command_line(), len(self.states))
        self.write()

    def begin(self, number: int) -> None:
        """A trial gets its run, and its turn."""
        self._record(number)
        self.console.say(f"{label(number, self.states)} starts: {run_name(self.states[number].trial, self.swept)}")

    def _record(self, number: int) -> None:
        state = self.states[number]
        trial = state.trial
        state.begin()
        state.run_id = self.tracker.start_trial(
            run_name(trial, self.swept),
            trial.config,
            trial.choices,
            trial.overrides,
            trial.folder,
            self.parent,
        )
        if state.run_id and (forecast := state.forecast_figures()):
            self.tracker.log_epoch(state.run_id, {"epoch": 0.0, **forecast})
        self.write()

    def folder_of(self, number: int) -> Path:
        """Where the processes of a trial write."""
        return storage(self.states[number].trial, self.folder)

    def is_training(self, number: int) -> bool:
        return self.states[number].ended or (self.folder_of(number) / "facts.json").exists()

    def waits(self, number: int, needed: dict[str, float], free: dict[str, float], total: dict[str, float]) -> None:
        """Say what a trial that does not get going is short of."""
        parts = [
            f"{amount:g} {name} ({free.get(name, 0):g} of {total[name]:g} free)" for name, amount in needed.items()
        ]
        limit = self.states[number].trial.config.cluster.wait_timeout_s
        self.console.say(
            f"{label(number, self.states)} waits for {' and '.join(parts)}; "
            f"it gives up after cluster.wait_timeout_s={limit:g} s"
        )

    def starts(self, number: int) -> None:
        """Say that a trial has its places and its workers are on their way."""
        self.console.say(f"{label(number, self.states)} waits for its worker processes to start and import PyTorch")

    def take_reports(self, number: int) -> None:
        """Log what the trial's folder has and MLflow has not."""
        state = self.states[number]
        folder = self.folder_of(number)
        if not state.facts_told and (facts := read_json(folder / "facts.json")):
            state.facts_told = True
            if state.run_id:
                self.tracker.log_facts(state.run_id, facts)
            for note in facts["notes"]:
                self.say_once(f"note: {note}")  # each trial's run is tagged with its own
        for metrics in read_metrics(folder):
            if metrics["epoch"] <= state.metrics.get("epoch", 0):
                continue
            state.metrics = metrics
            if state.run_id:
                self.tracker.log_epoch(state.run_id, state.figures())
            shown = None if len(self.states) == 1 else number
            self.console.say(epoch_line(shown, state, state.trial.config.training.epochs))
            self.write()

    def end(self, number: int, status: str, error: str | None) -> None:
        state = self.states[number]
        if state.ended:
            return
        self.take_reports(number)
        state.end(status, error)
        if state.run_id:
            # the end first: a file that the store does not take must not leave the run open
            self.tracker.finish(state.run_id, status, error)
            self._log_files(number, state.run_id)
        took = f" after {state.seconds:.1f} s" if state.seconds is not None else ""
        self.console.say(f"{label(number, self.states)} {status}{took}" + (f": {error}" if error else ""))
        self.write()

    def say_once(self, text: str) -> None:
        if text not in self.notes_told:
            self.notes_told.add(text)
            self.console.say(text)

    def waits_for_forecasts(self, done: int, total: int) -> None:
        self.console.say(f"waits for the forecasts: {done} of {total} done; forecast.enabled=false does without them")

    def take_forecasts(self, found: Sequence[Forecast | None]) -> None:
        """Keep what was forecast, and end the trials that are not to be tried: `forecast.prune`."""
        for number, (state, forecast) in enumerate(zip(self.states, found, strict=True)):
            state.forecast = forecast
            if forecast is None:
                continue
            if forecast.error:
                self.console.say(f"{label(number, self.states)} has no forecast: {forecast.error}")
            elif forecast.capacity_bytes is None and state.trial.config.forecast.prune:
                self.say_once(
                    "forecast.prune=true: how much fits is not known (nvidia-smi does not say), so nothing is left "
                    "out; set forecast.capacity_gib"
                )
        known = [f.peak_bytes for f in found if f and not f.error]
        if known:
            low, high = mib(min(known)), mib(max(known))
            self.console.say(f"forecast: {low if low == high else f'{low} to {high}'} MiB at the peak of a worker")
        for number, state in enumerate(self.states):
            if state.forecast is not None and state.forecast.largest_microbatch is not None:
                most = state.forecast.largest_microbatch
                self.console.say(f"{label(number, self.states)}: the largest microbatch that fits is {most}")
            if state.trial.config.forecast.prune and state.forecast is not None and state.forecast.fits is False:
                self.skip(number, state.forecast)
        self.console.update()

    def skip(self, number: int, forecast: Forecast) -> None:
        """Record a trial that cannot fit, without starting it."""
        assert forecast.capacity_bytes is not None
        clear_left_over(self.folder_of(number))  # what another command left there is not this one's result
        self._record(number)
        self.end(
            number,
            "skipped",
            f"needs {mib(forecast.needed_bytes)} MiB of {mib(forecast.capacity_bytes)} MiB a device by the forecast "
            f"(peak {mib(forecast.peak_bytes)}, the rest allowed for); forecast.prune=true does not start it",
        )

    def close(self, error: BaseException | None) -> int:
        """End what is still open, and the parent run.

        Args:
            error: what ended the sweep before its time, other than an interrupt.

        Returns:
            the exit status: 0 when every trial has a result, 1 when one failed, 130 when interrupted.
        """
        early = "failed" if error else "interrupted"
        for number, state in enumerate(self.states):
            if state.status == "running":
                self.end(number, early, str(error) if error else None)
        statuses = {early if state.status == "waiting" else state.status for state in self.states}
        worst = next((s for s in ("interrupted", "failed") if s in statuses), "finished")
        if self.parent:
            self.tracker.finish(self.parent, worst, str(error) if error else None)
            for name in ("results.csv", "multirun.yaml"):
                if (self.folder / name).exists():
                    self.tracker.log_artifact(self.parent, self.folder / name)
        return {"finished": 0, "failed": 1, "interrupted": INTERRUPTED}[worst]

    def write(self) -> None:
        """`results.csv` and the table. A full disk is told once: MLflow may lie on another one and goes on."""
        try:
            write_results(self.folder / "results.csv", self.states, self.swept)
        except OSError as error:
            if not self.unwritable:
                self.console.say(f"{self.folder}/results.csv is not up to date: {error.strerror}; free the disk")
            self.unwritable = True
        self.console.update()

    def _log_files(self, number: int, run_id: str) -> None:
        files = (("model.pt", "model"), ("metrics.jsonl", ""), ("error.txt", ""), ("memory_*_rank*.*", "memory"))
        for pattern, where in files:
            for path in sorted(self.folder_of(number).glob(pattern)):
                self.tracker.log_artifact(run_id, path, where)


def run_trials(trials: Sequence[Trial], folder: Path, swept: Sequence[str], sweep: bool) -> int:
    """Run trials, as many side by side as the cluster holds.

    Returns:
        the exit status, see `Sweep.close`.

    Raises:
        UserError: MLflow or Ray cannot be reached, or a trial needs more than the cluster has.
    """
    states = [TrialState(trial) for trial in trials]
    with Console(states, swept) as console, interruptible():
        run = Sweep(states, folder, swept, console)
        run.open(sweep)
        error: BaseException | None = None
        try:
            start_and_forecast(run)
            if not all(state.ended for state in states):
                tune_all(run)
        except KeyboardInterrupt:
            console.say("interrupted")
        except BaseException as caught:
            error = caught
            raise
        finally:
            status = run.close(error)  # before Ray stops: that takes seconds, and people press Ctrl-C twice
            engine.stop_ray()
    console.final()
    console.rich.print(f"results: {relative(folder)}/results.csv   compare: make ui", highlight=False)
    return status


def start_and_forecast(run: Sweep) -> None:
    """Start or reach Ray, and forecast every trial: meanwhile, where it is this machine that will train."""
    cluster = run.states[0].trial.config.cluster
    here = cluster.address is None
    run.console.say("Ray starts" if here else "Ray is being reached")
    with ExitStack() as stack:
        if here:
            requests = forecast_requests(run.states, gpus_here() > 0, default_num_workers())
            forecasts = stack.enter_context(Background(requests))
        engine.start_ray(cluster)
        sigterm_interrupts()  # Ray has put a handler of its own
        if not here:
            requests = forecast_requests(run.states, engine.num_gpus() > 0, engine.resolve_num_workers(cluster))
            forecasts = stack.enter_context(Background(requests))
        found = iter(forecasts.result(run.waits_for_forecasts))
        run.take_forecasts([next(found) if s.trial.config.forecast.enabled else None for s in run.states])


def forecast_requests(states: Sequence[TrialState], cuda: bool, num_workers: int) -> list[Request]:
    """One for each trial, but for those with `forecast.enabled=false`.

    Args:
        cuda: whether the trials will run on GPUs, whatever `forecast.device` says.
        num_workers: what `cluster.num_workers=null` stands for.
    """
    configs = [state.trial.config for state in states if state.trial.config.forecast.enabled]
    return [Request(c, c.cluster.num_workers or num_workers, cuda, capacity_bytes(c, cuda)) for c in configs]


def tune_all(run: Sweep) -> None:
    """Hand the trials to Ray Tune and wait for them."""
    from ray import tune
    from ray.tune import RunConfig, TuneConfig

    from fsdp_lab.sweep.callback import DriverCallback, NoTuneLines

    # Of Tune's own state on disk, which nothing here reads, it need not tell that it could not be written.
    logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
    jobs: dict[int, str] = {}
    places = {}
    for number, state in enumerate(run.states):
        if state.ended:
            continue
        cluster = state.trial.config.cluster
        num_workers = engine.resolve_num_workers(cluster)
        check_trial(state.trial.config, num_workers)
        places[number] = engine.check_capacity(cluster)
        folder = storage(state.trial, run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        clear_left_over(folder)
        job = Job(job_config(state.trial.config), str(folder), num_workers, engine.num_gpus() > 0, os.getcwd())
        jobs[number] = json.dumps(job.as_dict())
    # Tune's process for a trial only waits: it takes a byte, since it must take something, and no core.
    tune.Tuner(
        tune.with_resources(trial_function, {"memory": 1}),
        param_space=tune_space(jobs),
        tune_config=TuneConfig(
            max_concurrent_trials=min(place.side_by_side for place in places.values()),
            reuse_actors=True,
            trial_name_creator=lambda trial: f"trial_{trial.config['number']}",
            trial_dirname_creator=lambda trial: f"trial_{trial.config['number']}",
        ),
        run_config=RunConfig(
            name=".ray_tune",
            storage_path=str(run.folder),
            verbose=0,
            callbacks=[DriverCallback(run, places), NoTuneLines()],
        ),
    ).fit()


def job_config(config: TrialConfig) -> dict[str, Any]:
    """What a trial's processes are told: all but where MLflow is, whose address may hold a password."""
    return {key: value for key, value in to_dict(config).items() if key != "tracking"}


def tune_space(jobs: dict[int, str]) -> dict[str, Any]:
    """Tune's space of exactly these jobs, in their order."""
    from ray import tune

    return {
        "number": tune.grid_search(list(jobs)),
        "job": tune.sample_from(lambda config: jobs[config["number"]]),
    }


def storage(trial: Trial, sweep_folder: Path) -> Path:
    """Where the trial's processes write: its own folder, or the shared one of `cluster.storage_path`."""
    shared = trial.config.cluster.storage_path
    if shared is None:
        return trial.folder.absolute()
    within = trial.folder.name if trial.index is not None else ""
    return Path(shared).absolute() / "-".join(sweep_folder.parts[-2:]) / within


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does: what was reported stays, and the runs are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    sigterm_interrupts()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def sigterm_interrupts() -> None:
    """Let SIGTERM do what Ctrl-C does, which Tune takes for a wish to stop in good order."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))


def run_name(trial: Trial, swept: Sequence[str]) -> str:
    """Short, for lists: the swept settings, or the main ones for a trial alone."""
    keys = swept or ("sharding", "precision", "offload", "reshard_after_forward")
    return " ".join(f"{key}={setting(trial, key)}" for key in keys)


def label(number: int, states: Sequence[TrialState]) -> str:
    return f"trial {number}" if len(states) > 1 else "trial"


def command_line() -> str:
    """As it was typed, for the record."""
    return "python -m fsdp_lab " + " ".join(shlex.quote(argument) for argument in sys.argv[1:])


def relative(path: Path) -> Path:
    """As seen from here, where it lies below."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
