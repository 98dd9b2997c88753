"""The forecasts of a sweep's trials, and the trials that `forecast.prune` and `forecast.keep` skip."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from types import TracebackType

from fsdp_lab.config import UserError, workers_of
from fsdp_lab.config.conf import DEVICE_KINDS
from fsdp_lab.config.machine import gpus_are_here
from fsdp_lab.config.metrics import DATA_WAIT, MIB, OTHERS_CPU, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.wording import count, significant, time_left
from fsdp_lab.engine import resources
from fsdp_lab.forecast.answer import CONDITIONS, answers
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.devices import capacity_here, check_sweep, data_sheet, data_sheet_here, host_of, torch_version
from fsdp_lab.forecast.keep import passed_over
from fsdp_lab.forecast.observations import record_observation
from fsdp_lab.forecast.run import Background, Forecaster, Request
from fsdp_lab.forecast.speed.device import digest
from fsdp_lab.forecast.speed.predict import Speed
from fsdp_lab.forecast.speed.refine import Observation
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.words import no_forecast_text
from fsdp_lab.machine.hardware import gpus, num_gpus
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.choice import PLAIN
from fsdp_lab.report.reason_texts import needs_text
from fsdp_lab.sweep.names import label, setting
from fsdp_lab.sweep.runner import Ending, Listener, SweepPlan, SweepRun
from fsdp_lab.sweep.state import TrialState

MAX_OTHERS_CPU = 0.1  # the share of the cores that other processes may use beside a trial that is learnt from
_USERS = ("model_error", "user_error")  # what training would end with, too
_WAITED = 0.05  # of its steps, from which a GPU's are not learnt from


class Forecasts(Listener):
    """Forecasts the known trials while Ray starts, and those of a search one by one.

    On a running cluster, forecasts begin when it has been reached. A trial whose model cannot be trained is not
    started. If all forecasts fail by errors that training would meet too, no trial is; not so on such a cluster, whose
    nodes may have files that this machine lacks. Otherwise the reason for a missing forecast is logged, once for all
    trials that share it.
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
            sweep.log(f"waiting for the forecasts: {far}; forecast.enabled=false skips them")

        wanted, workers = _wanted(sweep.states), workers_of(sweep.config)
        if self._early is not None:
            result = self._early.result(waits)
        else:
            with Background(_requests(list(wanted.values()), resources.num_gpus() > 0, workers)) as background:
                result = background.result(waits)
        known = [forecast.peak_bytes for forecast in result if not forecast.error]
        if known:
            low, high = (significant(peak / MIB) for peak in (min(known), max(known)))
            sweep.log(f"forecast: {low if low == high else f'{low} to {high}'} MiB at the peak of a worker")
        requests = _requests(list(wanted.values()), resources.num_gpus() > 0, workers)
        self._known = {request.key: forecast for request, forecast in zip(requests, result, strict=True)}
        # else `forecast.keep` has chosen before; a kill while it skipped leaves the fastest to choose from
        is_new = not any(s.ended and s.status is not TrialStatus.skipped for s in sweep.states)
        failing = {n: f for n, f in zip(wanted, result, strict=True) if f.error and f.error.code in _USERS}
        if self._early is None or len(failing) < len(wanted):
            failing = {n: f for n, f in failing.items() if _cannot_train(f)}
        _fail(sweep, failing)
        if failing and len(failing) == len(wanted):
            return
        for number, forecast in zip(wanted, result, strict=True):
            if number not in failing:
                self._take(sweep, number, forecast)
        asked = sweep.config.forecast
        named = asked.device not in DEVICE_KINDS
        if named and any(r.sheet is None and data_sheet(r.config) is not None for r in requests):
            here = ", ".join(sorted({gpu.name for gpu in gpus()})) or "CPUs"
            sweep.log_once(
                f"no speed is predicted: forecast.device={asked.device} is not the device of these trials ({here})"
            )
        if asked.keep is not None and is_new:
            self._keep_promising(sweep, asked.keep, dict(zip(wanted, requests, strict=True)))

    def _keep_promising(self, sweep: SweepRun, keep: str, requests: dict[int, Request]) -> None:
        """Skip the trials that `forecast.keep` leaves out, and log that. Each number of workers has its own ranking."""
        settings = {n: request.key for n, request in requests.items()}
        to_run = {n: self._known[key] for n, key in settings.items() if not sweep.states[n].ended}
        best = _recommended(sweep, to_run)
        left_out: dict[int, Reason] = {}
        why: dict[str, None] = {}
        for workers in sorted({requests[n].num_workers for n in to_run}):
            mine = {n: forecast for n, forecast in to_run.items() if requests[n].num_workers == workers}
            mine_best = {settings[n] for n in best if n in mine}
            reasons, nothing_skipped = passed_over(mine, settings, keep, mine_best)
            left_out |= reasons
            why[nothing_skipped] = None
        for number, reason in left_out.items():
            sweep.skip(number, reason)
        kept = len({settings[n] for n in to_run if n not in left_out})
        result = f"{count(len(left_out), 'trial')} skipped" if left_out else "; ".join(why)
        sweep.log(f"forecast.keep={keep}: {count(kept, 'setting')} to measure, {result}")

    def added(self, sweep: SweepRun, number: int) -> None:
        """Forecast a suggested trial: first with `forecast.prune`, which may skip it, else while it starts."""
        config = sweep.states[number].trial.config
        if not config.forecast.enabled:
            return
        workers = workers_of(config)
        (request,) = _requests([sweep.states[number]], resources.num_gpus() > 0, workers)
        if (known := self._known.get(request.key)) is not None:  # of a trial that this one repeats
            self._judge(sweep, number, known)
            return
        future = self._forecaster.submit(request)
        if config.forecast.prune:
            self._judge(sweep, number, self._forecaster.result(future, request))
        else:
            self._pending[number] = (future, request)

    def tick(self, sweep: SweepRun) -> None:
        for number, (future, request) in list(self._pending.items()):
            if future.done():
                del self._pending[number]
                self._take(sweep, number, self._forecaster.result(future, request))

    def ended(self, sweep: SweepRun, number: int) -> None:
        """Record a finished trial to correct later predictions."""
        state = sweep.states[number]
        if state.status is TrialStatus.finished and state.forecast is not None and state.forecast.speed is not None:
            self._remember(sweep, number, state.forecast.speed)

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        """End the process of forecasts, which holds PyTorch in memory."""
        self._forecaster.__exit__()

    def _remember(self, sweep: SweepRun, number: int, speed: Speed) -> None:
        """Let a trial that was predicted correct later predictions of its device."""
        state = sweep.states[number]
        workers = workers_of(state.trial.config)
        (request,) = _requests([state], resources.num_gpus() > 0, workers)
        if speed.parts is None or request.sheet is None or not ran_there(request, state.device):
            return
        step_s = reliable_step_s(state.metrics, speed.samples, request.cuda)
        if step_s is None:
            return
        setting = sha256(request.key.encode()).hexdigest()[:16]
        one = Observation(setting, speed.parts, step_s, torch_version(), digest(request.sheet))
        try:
            record_observation(speed.device, f"{sweep.folder.absolute()}/{number}", one)
        except (OSError, UserError) as error:
            sweep.log_once(f"measured speeds of {speed.device} could not be saved for later forecasts: {error}")

    def _judge(self, sweep: SweepRun, number: int, forecast: Forecast) -> None:
        """Take the forecast of a trial that has not started, or fail the trial if its model cannot be trained."""
        if _cannot_train(forecast):
            _fail(sweep, {number: forecast})
        else:
            self._take(sweep, number, forecast)

    def _take(self, sweep: SweepRun, number: int, forecast: Forecast) -> None:
        """Publish a forecast, and skip the trial if it cannot fit."""
        name, state = label(number, sweep.states), sweep.states[number]
        prune = state.trial.config.forecast.prune
        if forecast.error:
            sweep.log_once(f"no forecast: {no_forecast_text(forecast.error)}")
        elif forecast.capacity_bytes is None and prune:
            sweep.log_once(
                "forecast.prune=true skips no trial: the memory of the GPU is not known (the driver does not report "
                "it); set forecast.capacity_gib"
            )
        if forecast.no_speed:
            sweep.log_once(f"no speed is predicted: {forecast.no_speed}")
        if forecast.largest_microbatch is not None:
            sweep.log(f"{name}: the largest microbatch that fits is {forecast.largest_microbatch}")
        sweep.forecast(number, forecast)
        if not prune or forecast.fits is not False:
            return
        needs = needs_text(**forecast.shortage)
        if forecast.tight:
            sweep.log(f"{name} starts, but memory is tight: {needs}; it may be slow, or run out of memory")
        else:
            sweep.skip(number, Reason.of(Code.does_not_fit, **forecast.shortage))


def ran_there(request: Request, device: str) -> bool:
    """Return whether a trial ran on the device of its prediction, in a way that predictions cover.

    Args:
        device: rank 0's; "": not known.
    """
    assert request.sheet is not None
    if request.cuda:
        return device == request.sheet.name
    cluster = request.config.cluster
    return cluster.address is None and cluster.cpus_per_worker in (None, 1.0)


def reliable_step_s(metrics: Mapping[str, float], samples: int, cuda: bool) -> float | None:
    """Return the seconds of a trial's step, without waiting for data; None if they are not reliable.

    They are not if other processes used the cores, if no step was timed, or if a GPU waited for an unknown part of
    them.

    Args:
        samples: of a step.
    """
    speed, waited = metrics.get(SPEED), metrics.get(DATA_WAIT, 0.0)
    if not speed or metrics.get(OTHERS_CPU, 0.0) > MAX_OTHERS_CPU or (cuda and waited > _WAITED):
        return None
    return samples / speed * (1.0 if cuda else 1 - waited)


def _cannot_train(forecast: Forecast) -> bool:
    return forecast.error is not None and forecast.error.code == "model_error"


def _fail(sweep: SweepRun, forecasts: Mapping[int, Forecast]) -> None:
    """End trials that would train in vain. Errors of one class, raised by one line, are one reason."""
    first: dict[tuple[str, str], int] = {}
    for number, forecast in forecasts.items():
        why = forecast.error
        assert why is not None
        if (earlier := first.setdefault((why.error, why.at), number)) == number:
            sweep.fail(number, Reason.of(Code.forecast_failed, text=why.text), forecast.traceback)
        else:
            before = forecasts[earlier].error
            other = why.text if before is not None and why.text != before.text else None
            sweep.fail(number, Reason.of(Code.same_as, trial=earlier, text=other))


def _recommended(sweep: SweepRun, forecasts: Mapping[int, Forecast]) -> list[int]:
    keys = [*PLAIN, *CONDITIONS, "trial"]
    rows = {
        n: Row([*(str(setting(sweep.states[n].trial, key)) for key in keys[:-1]), str(n)], forecast)
        for n, forecast in forecasts.items()
    }
    best = [answer.best for answer in answers(list(rows.values()), keys, sweep.config.report.speed_tolerance)]
    return [n for n, row in rows.items() if any(row is one for one in best)]


def _wanted(states: Sequence[TrialState]) -> dict[int, TrialState]:
    """Return the trials that are still to run and to forecast, by their numbers."""
    return {i: state for i, state in enumerate(states) if not state.ended and state.trial.config.forecast.enabled}


def _requests(states: Sequence[TrialState], cuda: bool, num_workers: int) -> list[Request]:
    """Return a request for each trial.

    Args:
        cuda: whether the trials will run on GPUs, whatever `forecast.device` says.
        num_workers: the number of ranks that `cluster.num_workers=null` stands for.
    """
    requests = []
    for config in (state.trial.config for state in states):
        workers, sheet = config.cluster.num_workers or num_workers, data_sheet_here(config, cuda)
        host = host_of(workers, sheet, cuda and num_gpus() > 0 and gpus_are_here(config.cluster))
        requests.append(Request(config, workers, cuda, capacity_here(config, cuda), sheet=sheet, host=host))
    return requests
