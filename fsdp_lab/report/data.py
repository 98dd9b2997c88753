"""The data of a report: a sweep's trials as they ended, in plain values, wherever they were read from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from fsdp_lab.config import may_change_speed
from fsdp_lab.metrics import MEMORY, OTHERS_CPU, SPEED, TRAIN_LOSS, VAL_LOSS
from fsdp_lab.report.speed import Run
from fsdp_lab.status import TrialStatus
from fsdp_lab.takehome import Setup

# Axes that distinguish attempts at a setting, not settings.
REPEATS = ("repeat", "training.seed")


@dataclass(frozen=True)
class TrialRow:
    """A trial as recorded in the folder or in MLflow.

    Attributes:
        number: of the trial.
        setting: its value for each axis of the sweep, as typed.
        status: how it ended.
        figures: metric key -> its latest value, with forecasts; bytes, samples/s, seconds.
        epochs: the metrics of each epoch, in order; `epoch` is one of the keys.
        overrides: the command line that trains it again, alone.
        error: why it failed; None: it did not.
        run_id: of its MLflow run; "": it has none.
        seconds: that it took; None: not known.
        device: `cpu` or the name of the GPU; "": it ended before that was known.
        setup: for writing its setting for other programs; None: not known.
        predicted_by: the basis of its predicted speed; "": not known, or it has none.
    """

    number: int
    setting: dict[str, str]
    status: TrialStatus
    figures: dict[str, float] = field(default_factory=dict)
    epochs: Sequence[dict[str, float]] = ()
    overrides: Sequence[str] = ()
    error: str | None = None
    run_id: str = ""
    seconds: float | None = None
    device: str = ""
    setup: Setup | None = None
    predicted_by: str = ""

    @property
    def name(self) -> str:
        """The trial's name in a chart."""
        return f"trial {self.number}: {words(self.setting)}"


@dataclass(frozen=True)
class Setting:
    """The trials that differ only in the attempt: one, or several repeats."""

    values: dict[str, str]
    trials: list[TrialRow]

    @property
    def name(self) -> str:
        """The values as typed."""
        return words(self.values)

    @property
    def finished(self) -> list[TrialRow]:
        """The trials that finished."""
        return [trial for trial in self.trials if trial.status == TrialStatus.finished]

    def of(self, key: str) -> list[float]:
        """Return the values of a metric in the finished trials that have it."""
        return [trial.figures[key] for trial in self.finished if math.isfinite(trial.figures.get(key, math.nan))]

    def median(self, key: str) -> float:
        """Return the median over the finished trials; NaN if none has the metric."""
        return median(self.of(key)) if self.of(key) else math.nan


@dataclass(frozen=True)
class SweepData:
    """A sweep to report on.

    Attributes:
        name: of the sweep.
        command: that started it.
        axes: the keys that differ between its trials, in the order of the command line.
        trials: in the order of their numbers.
        loss_tolerance: a ratio, see `fsdp_lab.report.choice`.
        speed_tolerance: a ratio, see `fsdp_lab.report.choice`.
        runs_url: address of an MLflow UI's runs, to which `/<run id>` is added; None: no server is known.
        about: more lines for its head, as (name, text).
        others_cpu: on a CPU a run's speed does not count if other processes used more than this share of the cores.
        objectives: `(metric, "min" or "max")` of each objective, the most important first; empty: the fastest setting
            that learned is recommended.
        repeat_max: the most rounds of `repeat=auto`; None: repeats were typed.
        study: the name of the study, such as the preset's; "" for a sweep without one.
        log_axes: the axes that were searched on a logarithmic scale.
        resume: the command that resumes it; "": there is none.
        report: the command that reports on it.
    """

    name: str
    command: str
    axes: list[str]
    trials: list[TrialRow]
    loss_tolerance: float
    speed_tolerance: float
    runs_url: str | None = None
    about: Sequence[tuple[str, str]] = ()
    others_cpu: float = 0.25
    objectives: Sequence[tuple[str, str]] = ()
    repeat_max: int | None = None
    study: str = ""
    log_axes: Sequence[str] = ()
    resume: str = ""
    report: str = "python -m fsdp_lab.report sweep=last"

    @property
    def statuses(self) -> list[TrialStatus]:
        """The status of each trial."""
        return [trial.status for trial in self.trials]

    @property
    def setting_axes(self) -> list[str]:
        """The axes that make a setting: all except repeats and axes that change nothing."""
        return [axis for axis in self.axes if axis not in REPEATS and axis not in self.idle_axes]

    @cached_property
    def idle_axes(self) -> list[str]:
        """The axes whose values make no difference: offload, if all trials ran on a CPU."""
        on_cpu = {trial.device for trial in self.trials if trial.device} == {"cpu"}
        return [axis for axis in self.axes if axis.partition(".")[0] == "offload"] if on_cpu else []

    @cached_property
    def speed_axes(self) -> list[str]:
        """The axes of a setting whose values may differ in speed or peak memory; `init` and the like do not."""
        return [axis for axis in self.setting_axes if may_change_speed(axis)]

    def shared(self, trial: TrialRow) -> bool:
        """Return whether the trial ran on a CPU whose cores other processes used too."""
        return trial.device == "cpu" and trial.figures.get(OTHERS_CPU, 0.0) > self.others_cpu

    @cached_property
    def groups(self) -> dict[str, int]:
        """Setting, by name -> the group of settings that cannot differ in speed."""
        known: dict[tuple[str, ...], int] = {}
        return {
            setting.name: known.setdefault(tuple(setting.values[axis] for axis in self.speed_axes), len(known))
            for setting in self.settings
        }

    @cached_property
    def peaks(self) -> dict[int, float]:
        """Group of settings -> the median of their peak memories, which nothing in it changes; NaN without one."""
        by_group: dict[int, list[float]] = {}
        for setting in self.settings:
            by_group.setdefault(self.groups[setting.name], []).extend(setting.of(MEMORY))
        return {group: median(peaks) if peaks else math.nan for group, peaks in by_group.items()}

    @property
    def timed(self) -> bool:
        """Whether any trial's steps were timed, whether its speed counts or not."""
        return any(_has_speed(trial) for trial in self.trials)

    @cached_property
    def runs(self) -> list[Run]:
        """The runs whose speed counts: timed, finished or stopped early, on cores that other processes did not use."""
        rounds: dict[tuple[str, ...], int] = {}
        for trial in self.trials:
            rounds.setdefault(tuple(trial.setting.get(axis, "") for axis in REPEATS), len(rounds))
        return [
            Run(
                self.groups[setting.name],
                rounds[tuple(trial.setting.get(axis, "") for axis in REPEATS)],
                trial.figures[SPEED],
                trial.figures.get("perf/speed_error"),
                int(trial.figures.get("perf/timed_steps", 0)),
            )
            for setting in self.settings
            for trial in setting.trials
            if trial.status in (TrialStatus.finished, TrialStatus.stopped)
            and _has_speed(trial)
            and not self.shared(trial)
        ]

    @property
    def unfinished(self) -> int:
        """How many trials have no result yet."""
        return sum(not status.is_result for status in self.statuses)

    @cached_property
    def settings(self) -> list[Setting]:
        """In the order of their first trials."""
        settings: dict[tuple[str, ...], Setting] = {}
        for trial in self.trials:
            values = {axis: trial.setting.get(axis, "") for axis in self.setting_axes}
            settings.setdefault(tuple(values.values()), Setting(values, [])).trials.append(trial)
        return list(settings.values())

    @cached_property
    def loss_key(self) -> str:
        """The metric of learning: the validation loss if there is one, else the training loss."""
        return VAL_LOSS if any(VAL_LOSS in trial.figures for trial in self.trials) else TRAIN_LOSS

    def url(self, trial: TrialRow) -> str:
        """Return the address of the trial's run; "" if not known."""
        return f"{self.runs_url}/{trial.run_id}" if self.runs_url and trial.run_id else ""


def words(values: dict[str, str]) -> str:
    """Return text such as `sharding=per_block precision=fp16`, as it is typed."""
    return " ".join(f"{key}={value}" for key, value in values.items()) or "the only setting"


def as_number(text: str) -> float | None:
    """Return the number in a value of an axis; None for a word."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _has_speed(trial: TrialRow) -> bool:
    return 0 < trial.figures.get(SPEED, 0.0) < math.inf
