"""The interface to Ray Tune: it asks for the next trial, and reports when one starts, reports or ends."""

from __future__ import annotations

import gc
import json
import logging
import math
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.exceptions import OutOfMemoryError
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.search import Searcher

from fsdp_lab.config import ConfigError, SweepConfig, TrialConfig, part, to_dict, workers_of
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.wording import count, resources_text
from fsdp_lab.engine import resources, shortcut
from fsdp_lab.engine.files_of_ranks import receive_now
from fsdp_lab.engine.job import Job, trial_function
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import read_progress
from fsdp_lab.record.trial_json import Outcome, read_trial
from fsdp_lab.sweep.names import label
from fsdp_lab.sweep.schedulers import build_scheduler
from fsdp_lab.sweep.sweep import Sweep

_QUIET_S = 20.0  # a start takes about ten seconds; a longer wait is logged with its reason
_MOST_STARTS = 5  # of a trial whose own processes end without a new epoch
_ROUNDING = 1e-6  # of sums of shares of a core
_KILLED = re.compile(r"Selected to kill: .*\bworker ID=(\w+)")  # in the report of Ray's memory monitor
_STORE_S = 5.0  # for the files of a stopped trial


class Places:
    """The places of a sweep's trials on the cluster, and the deaths of their own processes, through all starts of Tune.

    Attributes:
        most: how many trials may run side by side: fewer after each death because memory ran out.
        taken: Tune's name of a running trial -> its resources.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.most = sweep, math.inf
        self.taken: dict[str, dict[str, float]] = {}
        self._needs: dict[str, dict[str, float]] = {}
        self._at_starts = Counter[tuple[int, int]]()
        self._by_memory = Counter[int]()

    def needed(self, config: SweepConfig) -> dict[str, float]:
        """Return the resources of a trial's workers together.

        Raises:
            ConfigError: the cluster could not hold them when they were first compared.
        """
        tp = config.sharding.tp
        key = f"{config.cluster} {tp}"
        if key not in self._needs:
            self._needs[key] = resources.check_capacity(config.cluster, workers_of(config), tp)
        return self._needs[key]

    def has_room(self, config: SweepConfig) -> bool:
        """Return whether a trial fits beside the running ones. The first always does: it waits for nodes that died."""
        if not self.taken:
            return True
        if len(self.taken) >= self.most:
            return False
        total, all_taken = ray.cluster_resources(), self.taken.values()
        return all(
            amount + sum(taken.get(name, 0.0) for taken in all_taken) <= total.get(name, 0.0) + _ROUNDING
            for name, amount in self.needed(config).items()
        )

    def free(self, number: int) -> None:
        """End the workers of a trial, whose own process was killed or is to be stopped, and free their places."""
        resources.release_placement_group(self.sweep.folder_of(number))

    def died_at_start(self, number: int) -> None:
        """Start a trial again after its process ended before it started; fail it if that happens often."""
        key = number, len(self.sweep.trials[number].epochs)
        self._at_starts[key] += 1
        self._begin_again(number, Reason.of(Code.no_outcome) if self._at_starts[key] > _MOST_STARTS else None)

    def died_for_memory(self, report: str) -> None:
        """Start the running trials again, fewer side by side, after Ray's memory monitor killed processes of trials.

        The monitor kills them because ranks hold too much. A trial is out of memory if the monitor kills it a second
        time, and no other with it. Of several, it is not known which one filled the memory.

        Args:
            report: Ray's, which names the processes that it killed.
        """
        sweep, running, killed = self.sweep, self.sweep.running(), _KILLED.findall(report)
        victims = [n for n in running if read_trial(sweep.folder_of(n)).process in killed] or running
        if not running:
            return
        self.most = max(1, len(running) // 2)
        sweep.log(
            f"Ray killed the own process of {' and of '.join(label(sweep.trials[n].trial) for n in victims)} for lack "
            f"of memory; what ran resumes in a new one, {count(self.most, 'trial')} side by side"
        )
        for number in running:
            again = self._by_memory[number] and victims == [number]
            self._begin_again(number, Reason.of(Code.host_out_of_memory) if again else None)
        self._by_memory.update(victims)

    def _begin_again(self, number: int, reason: Reason | None) -> None:
        """Start a trial again, unless it has an outcome, or a reason why it ends."""
        state = self.sweep.trials[number]
        if state.status is TrialStatus.running:
            state.resuming = True
            self.free(number)
        outcome = Outcome(reason.status, reason) if reason else None
        if outcome := read_trial(self.sweep.folder_of(number)).outcome or outcome:
            self.sweep.end(number, outcome)
        else:
            self.sweep.put_back(number)


def run_trials(sweep: Sweep) -> None:
    """Run the trials of a sweep; again with fewer side by side if Ray kills processes of trials when memory runs out.

    Raises:
        ConfigError: the cluster cannot hold a trial.
    """
    # Nothing here reads Tune's own state on disk, so a warning that it was not written is useless.
    logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
    if why := shortcut.unusable():
        sweep.log(f"trials take seconds longer to start: {why}")
    elif sweep.config.cluster.address is None:
        shortcut.keep_ready_processes()
    places = Places(sweep)
    try:
        while sweep.has_more():
            try:
                build_tuner(places).fit()
                return
            except Exception as error:
                if not any(isinstance(each, OutOfMemoryError) for each in (error, error.__cause__)):
                    raise
                places.died_for_memory(str(error))
    except KeyboardInterrupt:
        gc.disable()  # Tune's destructors ask Ray, which may not answer any more; this process ends soon
        raise


def build_tuner(places: Places) -> tune.Tuner:
    """Return a tuner for the sweep. Checks first that the cluster can hold each known trial.

    Raises:
        ConfigError: the cluster cannot hold a trial.
    """
    sweep = places.sweep
    places.taken.clear()  # of a start before this one
    for config in [state.trial.config for state in sweep.trials if not state.ended] or [sweep.config]:
        places.needed(config)  # raises before the first trial starts
    # Tune's process for a trial only waits: it asks for no core, and for a byte, because it must ask for something.
    return tune.Tuner(
        tune.with_resources(trial_function, {"memory": 1, **resources.driver_node()}),
        tune_config=tune.TuneConfig(
            search_alg=NextTrial(places),
            scheduler=build_scheduler(sweep.config),
            num_samples=-1,
            reuse_actors=True,
            trial_name_creator=lambda trial: f"trial_{trial.config['number']}",
            trial_dirname_creator=lambda trial: f"trial_{trial.config['number']}",
        ),
        run_config=tune.RunConfig(
            name=".ray_tune",
            storage_path=str(sweep.folder),
            verbose=0,
            callbacks=[TuneCallback(places)],
            # retries after a trial's own process was killed; the job retries other failures
            failure_config=tune.FailureConfig(max_failures=sweep.config.cluster.max_failures),
        ),
    )


class NextTrial(Searcher):
    """Gives Tune the sweep's next trial when it has a place for one."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._sweep, self._places = places.sweep, places

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: Tune keeps a copy on disk, which is never read. A resume reads the sweep's folder."""
        return {}

    def suggest(self, trial_id: str) -> Any:
        """Return the number and the job of the next trial; None if none can start now, FINISHED at the end."""
        while self._may_have_room():
            number = self._sweep.next()
            if number is None:
                return None if self._sweep.has_more() else Searcher.FINISHED
            config = self._sweep.config_of(number)
            try:
                needed = self._places.needed(config)
            except ConfigError as error:
                if not self._sweep.config.search.samples:
                    raise
                self._sweep.fail(number, Reason.of(Code.user_error, text=str(error)))
                continue
            if not self._places.has_room(config):
                self._sweep.put_back(number)
                return None
            self._places.taken[trial_id] = needed
            self._sweep.prepare(number)
            job = job_of(config, str(self._sweep.folder_of(number)), self._sweep.address_of(number))
            return {"number": number, "job": json.dumps(asdict(job))}
        return None

    def _may_have_room(self) -> bool:
        """Return whether the next trial fits. A search suggests late, so the resources that its trials share decide."""
        number = self._sweep.next_waiting()
        with suppress(ConfigError):  # what is suggested may be smaller
            return self._places.has_room(self._sweep.config_of(number) if number is not None else self._sweep.config)
        return True

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self._places.taken.pop(trial_id, None)


def job_of(config: SweepConfig, folder: str, address: str | None) -> Job:
    """Return the job of a trial. `address`: the trial's in object storage; None: none."""
    return Job(
        config=to_dict(part(config, TrialConfig)),
        folder=folder,
        num_workers=workers_of(config),
        cpus_per_worker=resources.resolve_cpus_per_worker(config.cluster),
        use_gpu=resources.num_gpus() > 0,
        launched_in=str(Path.cwd()),
        timeout_s=config.trial_timeout_s,
        wait_timeout_s=config.cluster.wait_timeout_s,
        max_failures=config.cluster.max_failures,
        placement=config.cluster.placement.name,
        ray_is_ours=config.cluster.address is None,
        storage=address,
        by_shortcut=shortcut.unusable() is None,
    )


class TuneCallback(TrialProgressCallback):
    """Passes Ray Tune's events on to the sweep. Runs in the driver, between Tune's own steps.

    Tune adds no `TrialProgressCallback` of its own then, which would print a line for a trial that reported nothing.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._sweep, self._places = places.sweep, places
        self._speak_at: dict[int, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: Tune keeps a copy of its callbacks on disk, and this one's state is in the driver."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        self._sweep.begin(number)
        self._speak_at[number] = time.monotonic() + _QUIET_S

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        """Publish the epoch that a trial reports. If the scheduler stops the trial, its workers end first."""
        number = trial.config["number"]
        if result.get("done"):
            # The outcome first: then it is no failure that its workers end. The next trial waits for their places.
            self._sweep.write_stop(number, result)
            self._places.free(number)
            if address := self._sweep.address_of(number):
                # meanwhile no other trial's report is read
                get = threading.Thread(target=receive_now, args=(address, self._sweep.folder_of(number)), daemon=True)
                get.start()
                get.join(_STORE_S)
        self._sweep.epoch(number, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """End a trial; start it again if its process ended before the trial started."""
        number = trial.config["number"]
        self._speak_at.pop(number, None)
        self._places.taken.pop(trial.trial_id, None)
        if self._sweep.trials[number].status is TrialStatus.starting:
            self._log(number, ": its own process ended before it began; it starts in a new one")
            for other, state in enumerate(self._sweep.trials):  # the process may have kept places of a trial that ended
                if state.ended:
                    self._places.free(other)
            self._places.died_at_start(number)
            return
        if read_trial(self._sweep.folder_of(number)).outcome is None:  # its process was killed: it frees no places
            self._places.free(number)
        self._sweep.end(number)

    on_trial_error = on_trial_complete

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Start a trial again: its own process was killed, and Tune starts another."""
        number = trial.config["number"]
        self._places.free(number)
        self._log(number, ": its own process was killed; it resumes in a new one")

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Log what a trial is waiting for whose workers do not report yet."""
        self._sweep.tick()
        for trial in trials if self._places.taken else ():
            # Tune reports no error of a trial if its process does not leave the trial before; it would wait for others
            if trial.status == "ERROR" and trial.trial_id in self._places.taken:
                self.on_trial_complete(iteration, trials, trial)
        for number, speak_at in list(self._speak_at.items()):
            if self._sweep.read_facts(number):
                del self._speak_at[number]
            elif time.monotonic() > speak_at and not read_progress(self._sweep.folder_of(number)):
                self._speak_at[number] = math.inf
                config = self._sweep.config_of(number)
                needed = resources_text(self._places.needed(config))
                limit = f"cluster.wait_timeout_s={config.cluster.wait_timeout_s:g}"
                self._log(
                    number,
                    f" has no worker yet: it waits for {needed}, or they still start; it gives up after {limit} s",
                )

    def _log(self, number: int, what: str) -> None:
        self._sweep.log(f"{label(self._sweep.trials[number].trial)}{what}")
