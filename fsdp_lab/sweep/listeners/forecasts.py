"""The forecasts of a sweep's trials, and what `forecast.prune` makes of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from types import TracebackType
from typing import Any

from fsdp_lab.config import UserError, workers_of
from fsdp_lab.config.conf import DEVICE_KINDS
from fsdp_lab.engine import cluster as engine
from fsdp_lab.forecast.devices import (
    capacity_here,
    check_sweep,
    data_sheet,
    data_sheet_here,
    device_notes,
    torch_version,
)
from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.forecast.keep import Predicted, passed_over, why_all
from fsdp_lab.forecast.observations import record_observation
from fsdp_lab.forecast.run import Background, Forecaster, Request
from fsdp_lab.hardware import cpu_name, gpus, num_gpus
from fsdp_lab.metrics import DATA_WAIT, MIB, OTHERS_CPU, PREDICTED_SPEED, RATIO_ERROR, RATIO_GROUP, SPEED
from fsdp_lab.speed.fitted import digest
from fsdp_lab.speed.measured import DISTURBED
from fsdp_lab.speed.predict import Speed
from fsdp_lab.speed.refine import Observation
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.names import label
from fsdp_lab.sweep.runner import Ending, Listener, SweepPlan, SweepRun
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.wording import count, significant, time_left

_WAITED = 0.05  # of its steps, from which a GPU's are not learnt from


class Forecasts(Listener):
    """Forecasts the trials that are known while Ray starts, the ones that a search suggests one by one.

    On a cluster that is not started here, what to forecast is known only when it has been reached. Where all forecasts
    fail by one error that training would meet too, no trial is started; not so on such a cluster, whose nodes may have
    files that this machine lacks. Else why a trial has no forecast is told when it has trained an epoch, or ended
    without failing: most often it fails for the same reason, and says so itself.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._early: Background | None = None
        if plan.config.cluster.address is None:
            check_sweep(plan.config)
            wanted = list(_wanted(plan.state.trials).values())
            self._early = Background(_requests(wanted, num_gpus() > 0, workers_of(plan.config)))
        self._forecaster, self._began = Forecaster(), time.monotonic()
        self._pending: dict[int, tuple[Future[Forecast], Request]] = {}
        self._known: dict[str, Forecast] = {}
        self._without: dict[int, str] = {}  # by trial, why it has none
        self._device: dict[int, str] = {}  # by trial, what it runs on

    def __enter__(self) -> Forecasts:
        if self._early is not None:
            self._early.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forecaster.__exit__()
        if self._early is not None:
            self._early.__exit__()

    def ready(self, sweep: SweepRun) -> None:
        """Wait for the forecasts of the known trials, before the first of them starts."""

        def waits(done: int, total: int) -> None:
            left = time_left(done, total, time.monotonic() - self._began)
            far = f"{done} of {total} done{', ' if left else ''}{left}"
            sweep.say(f"waits for the forecasts: {far}; forecast.enabled=false does without them")

        wanted = _wanted(sweep.states)
        if self._early is not None:
            found = self._early.result(waits)
            workers = workers_of(sweep.config)
        else:
            workers = engine.resolve_num_workers(sweep.config.cluster)
            with Background(_requests(list(wanted.values()), engine.num_gpus() > 0, workers)) as background:
                found = background.result(waits)
        known = [forecast.peak_bytes for forecast in found if not forecast.error]
        if known:
            low, high = (significant(peak / MIB) for peak in (min(known), max(known)))
            sweep.say(f"forecast: {low if low == high else f'{low} to {high}'} MiB at the peak of a worker")
        requests = _requests(list(wanted.values()), engine.num_gpus() > 0, workers)
        self._known = {request.key: forecast for request, forecast in zip(requests, found, strict=True)}
        if self._early is not None and found and all(f.fails and f.error == found[0].error for f in found):
            _fail(sweep, list(wanted), found[0].error)
            return
        for number, forecast in zip(wanted, found, strict=True):
            self._take(sweep, number, forecast)
        self._keep_promising(sweep, dict(zip(wanted, requests, strict=True)))

    def _keep_promising(self, sweep: SweepRun, requests: dict[int, Request]) -> None:
        """Skip what `forecast.keep` leaves out, and say so."""
        asked = sweep.config.forecast
        for request in requests.values():
            for note in device_notes(request.config, request.num_workers) if request.sheet is not None else ():
                sweep.say_once(f"note: {note}")
        named = asked.device not in DEVICE_KINDS
        if named and any(r.sheet is None and data_sheet(r.config) is not None for r in requests.values()):
            here = ", ".join(sorted({gpu.name for gpu in gpus()})) or "CPUs"
            sweep.say_once(
                f"forecast.device={asked.device} is not what these trials run on ({here}): no speed is predicted"
            )
        if asked.keep is None:
            return
        ended = {n: state for n, state in enumerate(sweep.states) if n not in requests and state.ended}
        (first, *_) = requests.values() or (None,)
        if first is None:
            return
        others = zip(ended, _requests(list(ended.values()), first.cuda, first.num_workers), strict=True)
        settings = {n: request.key for n, request in [*requests.items(), *others]}
        before = {n: found for n, state in ended.items() if (found := _predicted(state)) is not None}
        forecasts = {n: self._known[settings[n]] for n in requests if not sweep.states[n].ended}
        left_out = passed_over(forecasts, settings, asked.keep, before)
        for number, reason in left_out.items():
            sweep.skip(number, reason)
        kept = len({settings[n] for n in forecasts if n not in left_out})
        skipped = f"{count(len(left_out), 'trial')} skipped"
        why = skipped if left_out else why_all(forecasts, settings, asked.keep, before)
        sweep.say(f"forecast.keep={asked.keep}: {count(kept, 'setting')} to measure, {why}")

    def added(self, sweep: SweepRun, number: int) -> None:
        """Forecast a suggested trial: first with `forecast.prune`, which may skip it, else while it starts."""
        config = sweep.states[number].trial.config
        if not config.forecast.enabled:
            return
        workers = engine.resolve_num_workers(config.cluster)
        (request,) = _requests([sweep.states[number]], engine.num_gpus() > 0, workers)
        if (known := self._known.get(request.key)) is not None:  # of a trial that this one repeats
            self._take(sweep, number, known)
            return
        future = self._forecaster.submit(request)
        if config.forecast.prune:
            self._take(sweep, number, self._forecaster.result(future, request))
        else:
            self._pending[number] = (future, request)

    def tick(self, sweep: SweepRun) -> None:
        for number, (future, request) in list(self._pending.items()):
            if future.done():
                del self._pending[number]
                self._take(sweep, number, self._forecaster.result(future, request))

    def facts(self, sweep: SweepRun, number: int, facts: dict[str, Any]) -> None:
        self._device[number] = str(facts.get("device"))

    def epoch(self, sweep: SweepRun, number: int, metrics: dict[str, float]) -> None:
        self._say_why(sweep, number)

    def ended(self, sweep: SweepRun, number: int) -> None:
        state = sweep.states[number]
        if state.status is not TrialStatus.failed:
            self._say_why(sweep, number)
        if state.status is TrialStatus.finished and state.forecast is not None and state.forecast.speed is not None:
            self._remember(sweep, number, state.forecast.speed)

    def _say_why(self, sweep: SweepRun, number: int) -> None:
        if (reason := self._without.pop(number, None)) is not None:
            sweep.say(f"{label(number, sweep.states)} has no forecast: {reason}")

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        self._forecaster.__exit__()  # its process holds PyTorch in memory

    def _remember(self, sweep: SweepRun, number: int, speed: Speed) -> None:
        """Let a trial that was predicted correct later predictions of its device."""
        state = sweep.states[number]
        workers = engine.resolve_num_workers(state.trial.config.cluster)
        (request,) = _requests([state], engine.num_gpus() > 0, workers)
        if speed.parts is None or request.sheet is None or not ran_there(request, self._device.get(number)):
            return
        step_s = undisturbed_step_s(state.metrics, speed.samples, request.cuda)
        if step_s is None:
            return
        setting = sha256(request.key.encode()).hexdigest()[:16]
        one = Observation(setting, speed.parts, step_s, torch_version(), digest(request.sheet))
        try:
            record_observation(speed.device, f"{sweep.folder.absolute()}/{number}", one)
        except (OSError, UserError) as error:
            sweep.say_once(f"what finished trials say of {speed.device} is not kept for later forecasts: {error}")

    def _take(self, sweep: SweepRun, number: int, forecast: Forecast) -> None:
        """Publish a forecast, and skip the trial where it is not to be tried."""
        name, prune = label(number, sweep.states), sweep.states[number].trial.config.forecast.prune
        if forecast.error:
            self._without[number] = forecast.error
            if sweep.states[number].ended:
                self.ended(sweep, number)
        elif forecast.capacity_bytes is None and prune:
            sweep.say_once(
                "forecast.prune=true: how much fits is not known (the driver does not say), so nothing is left "
                "out; set forecast.capacity_gib"
            )
        if forecast.no_speed:
            sweep.say_once(f"no speed is predicted: {forecast.no_speed}")
        if forecast.largest_microbatch is not None:
            sweep.say(f"{name}: the largest microbatch that fits is {forecast.largest_microbatch}")
        sweep.forecast(number, forecast)
        if prune and forecast.tight:
            sweep.say(f"{name} starts though it is tight: {forecast.shortage}; it may be slow, or run out of memory")
        elif prune and forecast.fits is False:
            sweep.skip(number, f"{forecast.shortage}; forecast.prune=true does not start it")


def ran_there(request: Request, device: str | None) -> bool:
    """Whether a trial ran on what its speed was predicted for, as that was calibrated, and is one that is predicted as
    it runs.

    Args:
        device: what rank 0 says that it ran on; None: nothing.
    """
    assert request.sheet is not None
    config, measured = request.config, request.sheet.measured
    if config.precision.float8 or config.compile_memory_budget is not None:
        return False
    if request.cuda:
        return device == request.sheet.name
    own = measured is None or measured.machine == cpu_name()
    return own and config.cluster.address is None and config.cluster.cpus_per_worker in (None, 1.0)


def undisturbed_step_s(metrics: Mapping[str, float], samples: int, cuda: bool) -> float | None:
    """Return the seconds of a trial's step, without waiting for data; None where others used the cores, where no step
    was timed, or where it is not known how much longer a GPU's steps were by waiting.

    Args:
        samples: of a step.
    """
    speed, waited = metrics.get(SPEED), metrics.get(DATA_WAIT, 0.0)
    if not speed or metrics.get(OTHERS_CPU, 0.0) > DISTURBED or (cuda and waited > _WAITED):
        return None
    return samples / speed * (1.0 if cuda else 1 - waited)


def _fail(sweep: SweepRun, numbers: Sequence[int], error: str | None) -> None:
    """End trials that would all train in vain. The reason is told once."""
    first, *others = numbers
    sweep.fail(first, f"{error} Its forecast found this; forecast.enabled=false trains nonetheless.")
    for number in others:
        sweep.fail(number, f"for the same reason as {label(first, sweep.states)}")


def _predicted(state: TrialState) -> Predicted | None:
    """What an earlier start has predicted of a trial; None where it has not."""
    figures = state.forecast_figures
    try:
        speed, low, high = (figures[f"{PREDICTED_SPEED}{end}"] for end in ("", "_low", "_high"))
        return Predicted(speed, low, high, figures.get(RATIO_ERROR), state.forecast_words.get(RATIO_GROUP, ""))
    except KeyError:
        return None


def _wanted(states: Sequence[TrialState]) -> dict[int, TrialState]:
    """The trials that are still to run, and to be forecast, by their numbers."""
    return {i: state for i, state in enumerate(states) if not state.ended and state.trial.config.forecast.enabled}


def _requests(states: Sequence[TrialState], cuda: bool, num_workers: int) -> list[Request]:
    """One for each trial.

    Args:
        cuda: whether the trials will run on GPUs, whatever `forecast.device` says.
        num_workers: what `cluster.num_workers=null` stands for.
    """
    configs = [state.trial.config for state in states]
    return [
        Request(c, c.cluster.num_workers or num_workers, cuda, capacity_here(c, cuda), sheet=data_sheet_here(c, cuda))
        for c in configs
    ]
