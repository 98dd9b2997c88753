"""What the driver keeps of a sweep: in MLflow, the table, on the terminal."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from fsdp_lab.compose import Trial
from fsdp_lab.config import objectives
from fsdp_lab.config.schema import Engine
from fsdp_lab.engine import cluster as engine
from fsdp_lab.engine.files import (
    Outcome,
    clear_attempt,
    clear_left_over,
    read_any_facts,
    read_json,
    read_metrics,
    read_outcome,
    read_progress,
    write_outcome,
)
from fsdp_lab.files import write_json
from fsdp_lab.forecast.fits import Forecast, capacity_bytes
from fsdp_lab.forecast.run import Forecaster, Request
from fsdp_lab.metrics import mib
from fsdp_lab.report.answer import Answer, pareto_front
from fsdp_lab.report.write import FILES, write_report
from fsdp_lab.sweep.console import Console, epoch_line
from fsdp_lab.sweep.interrupt import INTERRUPTED
from fsdp_lab.sweep.names import command_line, go_on_command, label, relative, resume_command, run_name, short_name
from fsdp_lab.sweep.record import Record, add_trial, write_hydra_folder
from fsdp_lab.sweep.report import sweep_of
from fsdp_lab.sweep.results import TrialState, storage, write_results
from fsdp_lab.sweep.search import Search
from fsdp_lab.tracking import Tracker

_WRITE_EVERY_S = 1.0  # a table of many trials takes its time, and a resume makes it anew


class Sweep:
    """The driver's view of a sweep: the only place that writes MLflow runs and `results.csv`.

    Args:
        states: the trials that are known at first; a search adds its own.
        resumed: whether an earlier start has left something of them in the folder.
    """

    def __init__(
        self,
        search: Search | None,
        states: list[TrialState],
        first: Trial,
        folder: Path,
        swept: Sequence[str],
        record: Record,
        console: Console,
        resumed: bool,
    ) -> None:
        if search is not None:
            search.say = console.say
        self.search, self.states, self.config, self.folder, self.swept = search, states, first.config, folder, swept
        self.record, self.console, self.resumed = record, console, resumed
        if len(objectives(self.config)) > 1:
            console.front = self.front
        self.tracker = Tracker(self.config.tracking, on_problem=console.say)
        self.parent: str | None = None
        self.answer: Answer | None = None  # of the report
        self.unwritable = False
        self.opened = self.closed = False
        self.notes_told: set[str] = set()
        self._places_free_since: list[float] = []
        self._written, self._to_write = 0.0, False
        self.forecaster = Forecaster()
        self._forecasts: dict[int, tuple[Future[Forecast], Request]] = {}

    def open(self) -> None:
        """Make the store's schema and the parent run: once, before any trial. Of a resumed sweep, send what the
        store has not got.

        Raises:
            TrackingError: the store cannot be reached.
        """
        self.tracker.open()
        self.opened = True
        found = self.tracker.find_runs(self.record.id) if self.resumed else {}
        if self.record.multirun:
            if "" in found:
                self.parent = found[""].handle
                self.tracker.reopen(self.parent)
            else:
                name = "/".join(self.folder.parts[-2:])
                count = len(self.states) or None
                self.parent = self.tracker.start_sweep(name, self.folder, command_line(), count, self.record.id)
        for number, state in enumerate(self.states):
            run = found.get(str(number))
            if run is not None:
                state.run = run.handle
                if not run.recorded:
                    self._log_config(number)
            if state.ended and (run is None or not run.recorded):
                self._send_again(number)
        self.write()

    def _send_again(self, number: int) -> None:
        """Let the store have all that the folder of an ended trial has."""
        state = self.states[number]
        if state.run is None:
            self._start_run(number)
        else:
            self.tracker.check_epochs(state.run)
        assert state.run is not None
        if facts := read_any_facts(self.folder_of(number)):
            self.tracker.log_facts(state.run, facts)
        if state.forecast_figures:
            self.tracker.log_epoch(state.run, {"epoch": 0.0, **state.forecast_figures})
        for metrics in read_metrics(self.folder_of(number)):
            self.tracker.log_epoch(state.run, state.figures(metrics))
        self._finish_run(number)

    def has_more(self) -> bool:
        """Whether a trial is still to be begun."""
        return any(not state.ended for state in self.states) or (self.search is not None and self.search.has_more())

    def next(self) -> int | None:
        """The number of the trial to begin next; None when there is none."""
        while True:
            waiting = next((i for i, state in enumerate(self.states) if state.status == "waiting"), None)
            if waiting is None:
                trial = self.search.next() if self.search is not None else None
                if trial is None:
                    return None
                clear_left_over(storage(trial, self.folder))
                write_hydra_folder(trial)
                add_trial(self.folder, trial)
                self.states.append(TrialState(trial))
                waiting = len(self.states) - 1
                self.forecast_suggested(waiting)
            if not self.states[waiting].ended:
                self.states[waiting].status = "starting"
                return waiting

    def forecast_suggested(self, number: int) -> None:
        """Forecast a trial that a search has just suggested: first with `forecast.prune`, which may end it here, else
        while it starts."""
        state = self.states[number]
        if state.trial.config.forecast.enabled and self.config.engine is Engine.ray:
            workers = engine.resolve_num_workers(state.trial.config.cluster)
            (request,) = forecast_requests([state], engine.num_gpus() > 0, workers)
            future = self.forecaster.submit(request)
            if state.trial.config.forecast.prune:
                self.take_forecast(number, self.forecaster.result(future, request))
            else:
                self._forecasts[number] = (future, request)

    def begin(self, number: int) -> None:
        """A trial gets its run, and its turn. A second time when its process was killed and it is tried again."""
        state = self.states[number]
        if self._places_free_since and state.begun is None:
            state.place_free_since = self._places_free_since.pop(0)
        before = list(read_metrics(self.folder_of(number)))
        state.epochs_before = int(before[-1]["epoch"]) if before else 0
        self._record(number)
        from_epoch = f", from epoch {state.epochs_before}" if before else ""
        self.console.say(f"{label(number, self.states)} starts{from_epoch}: {run_name(state.trial, self.swept)}")

    def _record(self, number: int) -> None:
        state = self.states[number]
        state.begin()
        if state.run is None:
            self._start_run(number)
        elif state.goes_on and not state.reopened:
            state.reopened = True
            self.tracker.reopen(state.run)
        self._tell_forecast(number)
        self.write()

    def _tell_forecast(self, number: int) -> None:
        state = self.states[number]
        if state.run is not None and (figures := state.forecast_figures):
            with suppress(OSError):  # a full disk ends a trial where it loses results, not here
                write_json(self.folder_of(number) / "forecast.json", figures)
            self.tracker.log_epoch(state.run, {"epoch": 0.0, **figures})

    def _start_run(self, number: int) -> None:
        state = self.states[number]
        trial = state.trial
        state.run = self.tracker.start_trial(
            short_name(trial, self.swept),
            trial.overrides,
            trial.folder,
            self.parent,
            self.record.id,
            str(number),
        )
        self._log_config(number)

    def _log_config(self, number: int) -> None:
        trial, run = self.states[number].trial, self.states[number].run
        self.tracker.log_config(run or "", trial.config, trial.choices, trial.folder, self.resumed)

    def folder_of(self, number: int) -> Path:
        """Where the processes of a trial write."""
        return storage(self.states[number].trial, self.folder)

    def prepare(self, number: int) -> None:
        """A folder without what another command left there; a trial that goes on keeps what it has."""
        folder = self.folder_of(number)
        folder.mkdir(parents=True, exist_ok=True)
        if self.states[number].goes_on:
            clear_attempt(folder)
        else:
            clear_left_over(folder)

    def is_training(self, number: int) -> bool:
        return self.states[number].ended or (self.folder_of(number) / "facts.json").exists()

    def recovers(self, number: int) -> None:
        self.console.say(f"{label(number, self.states)}: its own process was killed; it goes on in a new one")

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
            self.tracker.log_facts(state.run or "", facts)
            for note in facts["notes"]:
                self.say_once(f"note: {note}")  # each trial's run is tagged with its own
        for metrics in read_metrics(folder):
            if metrics["epoch"] <= state.metrics.get("epoch", 0):
                continue
            state.metrics = {**state.metrics, **metrics}  # what the last epoch has not keeps its latest value
            first_step = read_progress(folder).get("first_step")
            if state.turnaround_s is None and state.place_free_since is not None and first_step is not None:
                state.turnaround_s = first_step - state.place_free_since
                with suppress(OSError):
                    write_json(folder / "turnaround.json", {"turnaround_s": state.turnaround_s})
            self.tracker.log_epoch(state.run or "", state.figures(metrics))
            if metrics["epoch"] > state.epochs_before:
                shown = None if state.trial.index is None else number
                self.console.say(epoch_line(shown, metrics, state.trial.config.training.epochs))
            self.write()

    def end(self, number: int, status: str, error: str | None) -> None:
        """A trial has its result; or, interrupted, none yet."""
        state = self.states[number]
        if state.ended:
            return
        self.take_reports(number)
        state.end(status, error)
        folder = self.folder_of(number)
        if status != "interrupted" and read_outcome(folder) is None:
            try:
                write_outcome(folder, Outcome(status, error, state.seconds))
            except OSError:
                self.say_once(f"{folder} cannot be written: a resume would try this trial again")
        if status != "skipped":
            self._places_free_since.append(read_progress(folder).get("reported", time.time()))
        if state.run is not None:
            self._finish_run(number)
        took = f" after {state.seconds:.1f} s" if state.seconds is not None else ""
        self.console.say(f"{label(number, self.states)} {status}{took}" + (f": {error}" if error else ""))
        self.write()
        if self.search is not None:
            self.search.tell(state.trial, status, state.metrics)

    def _finish_run(self, number: int) -> None:
        state = self.states[number]
        assert state.run is not None
        # the end first: a file that the store does not take must not leave the run open
        self.tracker.finish(state.run, state.status, state.error)
        files = (
            ("model.pt", "model"),
            ("metrics.jsonl", ""),
            ("error.txt", ""),
            ("failures*/*.json", "failures"),
            ("memory_*_rank*.*", "memory"),
        )
        for pattern, where in files:
            for path in sorted(self.folder_of(number).glob(pattern)):
                inside = "/".join(
                    part for part in (where, *path.relative_to(self.folder_of(number)).parts[1:-1]) if part
                )
                self.tracker.log_artifact(state.run, path, inside)
        if state.status != "interrupted":
            self.tracker.recorded(state.run)

    def say(self, text: str) -> None:
        self.console.say(text)

    def say_once(self, text: str) -> None:
        if text not in self.notes_told:
            self.notes_told.add(text)
            self.console.say(text)

    def waits_for_forecasts(self, done: int, total: int) -> None:
        self.console.say(f"waits for the forecasts: {done} of {total} done; forecast.enabled=false does without them")

    def take_forecasts(self, found: dict[int, Forecast]) -> None:
        """Keep what was forecast, and end the trials that are not to be tried: `forecast.prune`."""
        known = [f.peak_bytes for f in found.values() if not f.error]
        if known:
            low, high = mib(min(known)), mib(max(known))
            self.console.say(f"forecast: {low if low == high else f'{low} to {high}'} MiB at the peak of a worker")
        for number, forecast in found.items():
            self.take_forecast(number, forecast)
        self.console.update()

    def take_forecast(self, number: int, forecast: Forecast) -> None:
        state = self.states[number]
        state.forecast = forecast
        prune = state.trial.config.forecast.prune
        if forecast.error:
            self.console.say(f"{label(number, self.states)} has no forecast: {forecast.error}")
        elif forecast.capacity_bytes is None and prune:
            self.say_once(
                "forecast.prune=true: how much fits is not known (the driver does not say), so nothing is left "
                "out; set forecast.capacity_gib"
            )
        if forecast.largest_microbatch is not None:
            most = forecast.largest_microbatch
            self.console.say(f"{label(number, self.states)}: the largest microbatch that fits is {most}")
        if prune and forecast.fits is False:
            self.skip(number, forecast)
        else:
            self._tell_forecast(number)

    def is_through(self, number: int) -> bool:
        """Whether a trial has done all it was to do, though nobody waited for it."""
        state, folder = self.states[number], self.folder_of(number)
        epochs = [metrics["epoch"] for metrics in read_metrics(folder)]
        whole = bool(epochs) and epochs[-1] >= state.trial.config.training.epochs
        return whole and (not state.trial.config.export or (folder / "model.pt").exists())

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

    def close(self, interrupted: bool, error: BaseException | None = None) -> int:
        """End what is still open, and the parent run; once, whoever comes first.

        Args:
            error: what ended the sweep before its time, other than an interrupt.

        Returns:
            the exit status: 0 when every trial has a result, 1 when one failed, 130 when interrupted.
        """
        statuses = {state.status for state in self.states}
        if interrupted or (not error and any(not state.ended for state in self.states)):
            worst, status = "interrupted", INTERRUPTED
        else:
            worst, status = ("failed", 1) if error or "failed" in statuses else ("finished", 0)
        if self.closed or not self.opened:
            return status
        self.closed = True
        if worst == "interrupted" or error:
            # at once: a store that hangs may be all that follows
            self.console.say(f"to go on: {go_on_command(self.folder)}")
        self.write(0)
        for number, state in enumerate(self.states):
            if state.run is None or state.ended:
                continue
            if state.begun is None:  # of a start before this one, whose end may not have been recorded
                self.tracker.finish(state.run, "interrupted")
            else:
                self.end(number, "interrupted", str(error) if error else None)
        self.write(0)
        if self.parent:
            self.tracker.finish(self.parent, worst, str(error) if error else None)
            if status != INTERRUPTED and not error:
                self._report()
            for name in ("results.csv", "multirun.yaml", *(FILES if self.answer else ())):
                if (self.folder / name).exists():
                    self.tracker.log_artifact(self.parent, self.folder / name)
        if worst == "failed" and not error:
            self.console.say(f"to try what failed again: {resume_command(self.folder)} resume_failed=true")
        unsent = self.tracker.settle(0.0 if status == INTERRUPTED or error else self.config.tracking.patience_s)
        if unsent:
            self.console.say(
                f"the MLflow store has not got {unsent} writes; what was reported is in the trials' folders, and is "
                f"sent by: {resume_command(self.folder)}"
            )
        return status

    @property
    def parent_id(self) -> str:
        """The id of the sweep's own run; "" for a trial alone, and while the store has not got it."""
        return self.tracker.run_id(self.parent)

    def _report(self) -> None:
        """What the sweep says: no sweep is lost over it."""
        try:
            sweep = sweep_of(self.states, self.swept, self.folder, self.record, self.tracker.run_id, self.parent_id)
            self.answer = write_report(sweep, self.folder)
        except Exception as error:  # noqa: BLE001 - the results are there, and the report can be written again
            again = f"python -m fsdp_lab.report sweep={shlex.quote(str(relative(self.folder)))}"
            self.console.say(f"the report could not be written ({error}); to try again: {again}")

    def write(self, at_most_every: float = _WRITE_EVERY_S) -> None:
        """`results.csv` and the table. A full disk is told once: MLflow may lie on another one and goes on."""
        if time.monotonic() - self._written < at_most_every:
            self._to_write = True
            return
        self._to_write, self._written = False, time.monotonic()
        try:
            write_results(self.folder / "results.csv", self.states, self.swept, self.front(), self.tracker.run_id)
        except OSError as error:
            if not self.unwritable:
                self.console.say(f"{self.folder}/results.csv is not up to date: {error.strerror}; free the disk")
            self.unwritable = True
        self.console.update()

    def look(self) -> None:
        """Called again and again while trials run: what was put off is done."""
        for number, (future, request) in list(self._forecasts.items()):
            if future.done():
                del self._forecasts[number]
                self.take_forecast(number, self.forecaster.result(future, request))
        if self._to_write:
            self.write()

    def front(self) -> set[int]:
        """The trials that no other beats in every objective; empty with a single objective."""
        wanted = objectives(self.config)
        if len(wanted) < 2:
            return set()
        finished = [i for i, state in enumerate(self.states) if state.status == "finished"]
        return {finished[place] for place in pareto_front([self.states[i].metrics for i in finished], wanted)}


def to_forecast(states: Sequence[TrialState]) -> dict[int, TrialState]:
    """The trials that are still to run, and to be forecast, by their numbers."""
    return {i: state for i, state in enumerate(states) if not state.ended and state.trial.config.forecast.enabled}


def forecast_requests(states: Sequence[TrialState], cuda: bool, num_workers: int) -> list[Request]:
    """One for each trial.

    Args:
        cuda: whether the trials will run on GPUs, whatever `forecast.device` says.
        num_workers: what `cluster.num_workers=null` stands for.
    """
    configs = [state.trial.config for state in states]
    return [Request(c, c.cluster.num_workers or num_workers, cuda, capacity_bytes(c, cuda)) for c in configs]
