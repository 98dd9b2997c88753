"""The forecasts of a sweep's trials, and the trials that `forecast.prune` and `forecast.keep` skip."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from hashlib import sha256
from statistics import NormalDist

from fsdp_lab.config import SweepConfig, UserError, workers_of
from fsdp_lab.config.machine import gpus_are_here
from fsdp_lab.config.metrics import DATA_WAIT, MEDIAN_STEP, MIB, OTHERS_CPU, SLOW_STEP, SPEED, TIMED_STEPS
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import Engine
from fsdp_lab.config.wording import count, significant, time_left
from fsdp_lab.engine import resources
from fsdp_lab.forecast.answer import CONDITIONS, answers
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.devices import capacity_here, data_sheet_here, host_of, refined, torch_version
from fsdp_lab.forecast.keep import passed_over
from fsdp_lab.forecast.observations import record_observation
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.run import Background, Forecaster
from fsdp_lab.forecast.speed.device import digest
from fsdp_lab.forecast.speed.refine import Observation
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.words import no_forecast_text
from fsdp_lab.machine.hardware import num_gpus
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.choice import PLAIN
from fsdp_lab.report.render import needs_text
from fsdp_lab.sweep.names import OF_A_NIGHT, label, setting
from fsdp_lab.sweep.sweep import Sweep

MAX_OTHERS_CPU = 0.1  # the share of the cores that others may use while a trial runs that corrects forecasts
_USERS = ("model_error", "user_error")  # errors that training would raise, too
_WAITED = 0.05  # the share of waiting above which a GPU's steps correct no forecast


class Forecasts:
    """Forecasts the known trials while Ray starts, and those of a search one by one. Use it as a context.

    On a running cluster, forecasts start once it is reached. A trial is not started if its model cannot be trained. If
    all forecasts fail by errors that training would raise too, no trial is started, except on a running cluster: its
    nodes may have files that this machine lacks. Other reasons for a missing forecast are logged, each once.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        # Errors of predictions stay comparable: a resume corrects by the trials that its start knew, a night by none.
        self._before = 0.0 if OF_A_NIGHT in os.environ else sweep.started.begun
        self._early: Background | None = None
        if sweep.config.cluster.address is None:
            self._early = Background([self._request(config, num_gpus() > 0) for config in self._wanted().values()])
        self._forecaster, self._began = Forecaster(), time.monotonic()
        self._pending: dict[int, tuple[Future[Forecast], Request]] = {}
        self._known: dict[str, Forecast] = {}

    def __enter__(self) -> Forecasts:
        if self._early is not None:
            self._early.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        if self._early is not None:
            self._early.__exit__()

    def end(self) -> None:
        """End the process of forecasts, which holds PyTorch in memory."""
        self._forecaster.__exit__()

    def _request(self, config: SweepConfig, cuda: bool) -> Request:
        """Return the request of a trial. Trials that ended before the sweep started correct its device."""
        request = _request(config, cuda)
        try:
            return replace(request, sheet=refined(request.sheet, config, request.num_workers, self._before))
        except UserError as error:
            self._sweep.log_once(f"no finished trials correct the forecasts: {error}")
            return request

    def _wanted(self) -> dict[int, SweepConfig]:
        """Return the configurations of the trials that are still to run and to forecast."""
        configs = {n: state.trial.config for n, state in enumerate(self._sweep.trials) if not state.ended}
        return {n: config for n, config in configs.items() if _is_forecast(config)}

    def ready(self) -> None:
        """Wait for the forecasts of the known trials, before the first of them starts."""
        sweep, asked = self._sweep, self._sweep.config.forecast
        # else `forecast.keep` has chosen before. After a kill while it skipped trials, the fastest are still there
        is_new = not any(s.ended and s.status is not TrialStatus.skipped for s in sweep.trials)
        requests = {n: self._request(config, resources.num_gpus() > 0) for n, config in self._wanted().items()}
        forecasts = dict(zip(requests, self._results(list(requests.values())), strict=True))
        self._known = {request.key: forecasts[n] for n, request in requests.items()}
        if peaks := [forecast.peak_bytes for forecast in forecasts.values() if not forecast.error]:
            low, high = (significant(peak / MIB) for peak in (min(peaks), max(peaks)))
            sweep.log(f"forecast: {low if low == high else f'{low} to {high}'} MiB at the peak of a worker")
        failing = {n: f for n, f in forecasts.items() if f.error and f.error.code in _USERS}
        if self._early is None or len(failing) < len(forecasts):
            failing = {n: f for n, f in failing.items() if _cannot_train(f)}
        self._fail(failing)
        if len(failing) == len(forecasts):
            return
        for number, forecast in forecasts.items():
            if number not in failing:
                self._take(number, forecast)
        if asked.keep is not None and is_new:
            self._keep_promising(asked.keep, requests)

    def _results(self, requests: list[Request]) -> list[Forecast]:
        def waits(done: int, total: int) -> None:
            left = time_left(done, total, time.monotonic() - self._began)
            far = f"{done} of {total} done{', ' if left else ''}{left}"
            self._sweep.log(f"waiting for the forecasts: {far}; forecast.enabled=false skips them")

        if self._early is not None:
            return self._early.result(waits)
        with Background(requests) as background:
            return background.result(waits)

    def _keep_promising(self, keep: str, requests: Mapping[int, Request]) -> None:
        """Skip the trials that `forecast.keep` leaves out, and log that. Each number of workers has its own ranking."""
        settings = {n: request.key for n, request in requests.items()}
        to_run = {n: self._known[key] for n, key in settings.items() if not self._sweep.trials[n].ended}
        best = _recommended(self._sweep, to_run)
        left_out: dict[int, Reason] = {}
        why: dict[str, None] = {}
        for workers in sorted({requests[n].num_workers for n in to_run}):
            mine = {n: forecast for n, forecast in to_run.items() if requests[n].num_workers == workers}
            mine_best = {settings[n] for n in best if n in mine}
            reasons, nothing_skipped = passed_over(mine, settings, keep, mine_best)
            left_out |= reasons
            why[nothing_skipped] = None
        for number, reason in left_out.items():
            self._sweep.skip(number, reason)
        kept = len({settings[n] for n in to_run if n not in left_out})
        result = f"{count(len(left_out), 'trial')} skipped" if left_out else "; ".join(why)
        self._sweep.log(f"forecast.keep={keep}: {count(kept, 'setting')} to measure, {result}")

    def added(self, number: int) -> None:
        """Forecast a suggested trial: while it starts, or before with `forecast.prune`, which may skip it."""
        config = self._sweep.config_of(number)
        if not _is_forecast(config):
            return
        request = self._request(config, resources.num_gpus() > 0)
        if (known := self._known.get(request.key)) is not None:  # this trial repeats another
            self._judge(number, known)
            return
        future = self._forecaster.submit(request)
        if config.forecast.prune:
            self._judge(number, self._forecaster.result(future, request))
        else:
            self._pending[number] = (future, request)

    def tick(self) -> None:
        for number, (future, request) in list(self._pending.items()):
            if future.done():
                del self._pending[number]
                self._take(number, self._forecaster.result(future, request))

    def ended(self, number: int) -> None:
        """Correct later predictions for a device by a finished trial that was predicted."""
        sweep, state = self._sweep, self._sweep.trials[number]
        speed = state.forecast.speed if state.forecast is not None else None
        if state.status is not TrialStatus.finished or speed is None or speed.parts is None:
            return
        request = _request(state.trial.config, resources.num_gpus() > 0)
        if request.sheet is None or not ran_there(request, state.device):
            return
        step_s = reliable_step_s(state.figures, speed.samples, request.cuda)
        if step_s is None:
            return
        setting = sha256(request.key.encode()).hexdigest()[:16]
        device, noise = digest(request.sheet), noise_of(state.figures)
        one = Observation(setting, speed.parts, step_s, torch_version(), device, speed.group, time.time(), noise)
        try:
            record_observation(speed.device, f"{sweep.folder.absolute()}/{number}", one)
        except (OSError, UserError) as error:
            sweep.log_once(f"measured speeds of {speed.device} could not be saved for later forecasts: {error}")

    def _judge(self, number: int, forecast: Forecast) -> None:
        """Use the forecast of a trial that has not started, or fail the trial if its model cannot be trained."""
        if _cannot_train(forecast):
            self._fail({number: forecast})
        else:
            self._take(number, forecast)

    def _fail(self, forecasts: Mapping[int, Forecast]) -> None:
        """Fail trials that training would fail, too. Errors of one class from one line are one reason."""
        first: dict[tuple[str, str], tuple[int, str]] = {}
        for number, forecast in forecasts.items():
            why = forecast.error
            assert why is not None
            earlier, text = first.setdefault((why.error, why.at), (number, why.text))
            if earlier == number:
                may_train = not _cannot_train(forecast) or None
                reason = Reason.of(Code.forecast_failed, text=why.text, may_train=may_train)
                self._sweep.fail(number, reason, forecast.traceback)
            else:
                other = why.text if why.text != text else None
                self._sweep.fail(number, Reason.of(Code.same_as, trial=earlier, text=other))

    def _take(self, number: int, forecast: Forecast) -> None:
        """Publish a forecast, and skip the trial if it cannot fit."""
        sweep, trial = self._sweep, self._sweep.trials[number].trial
        prune = trial.config.forecast.prune
        if forecast.error:
            sweep.log_once(f"no forecast: {no_forecast_text(forecast.error)}")
        elif forecast.capacity_bytes is None and prune:
            sweep.log_once(
                "forecast.prune=true skips no trial: the memory of the GPU is not known (the driver does not report "
                "it); set forecast.capacity_gib"
            )
        if forecast.no_speed:
            sweep.log_once(f"no speed is predicted: {forecast.no_speed}")
        if forecast.solved is not None:
            sweep.log(f"{label(trial)}: the largest microbatch that fits is {forecast.solved.value}")
        sweep.forecast(number, forecast)
        if not prune or forecast.fits is not False:
            return
        needs = needs_text(**forecast.shortage)
        if forecast.unsure:
            sweep.log(f"{label(trial)} starts, but is not sure to fit: {needs}; it may be slow, or run out of memory")
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


def noise_of(metrics: Mapping[str, float]) -> float:
    """Return the standard error of a trial's mean step as a share of it, from how widely its steps differ."""
    middle, slow, steps = (metrics.get(key, 0.0) for key in (MEDIAN_STEP, SLOW_STEP, TIMED_STEPS))
    if not middle or not steps:
        return 0.0
    deviation = (slow - middle) / NormalDist().inv_cdf(0.95)
    return deviation / middle / math.sqrt(steps)


def _cannot_train(forecast: Forecast) -> bool:
    return forecast.error is not None and forecast.error.code == "model_error"


def _recommended(sweep: Sweep, forecasts: Mapping[int, Forecast]) -> list[int]:
    keys = [*PLAIN, *CONDITIONS, "trial"]
    rows = {
        n: Row([*(str(setting(sweep.trials[n].trial, key)) for key in keys[:-1]), str(n)], forecast)
        for n, forecast in forecasts.items()
    }
    best = [answer.best for answer in answers(list(rows.values()), keys, sweep.config.report.speed_tolerance)]
    return [n for n, row in rows.items() if any(row is one for one in best)]


def _is_forecast(config: SweepConfig) -> bool:
    return config.forecast.enabled and config.engine is Engine.ray


def _request(config: SweepConfig, cuda: bool) -> Request:
    """Return the request of a trial. `cuda`: whether it will run on GPUs, whatever `forecast.device` says."""
    workers, sheet = workers_of(config), data_sheet_here(config, cuda)
    host = host_of(workers, sheet, cuda and num_gpus() > 0 and gpus_are_here(config.cluster))
    return Request(config, workers, cuda, capacity_here(config, cuda), sheet=sheet, host=host)
