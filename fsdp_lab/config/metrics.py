"""Every metric of a trial, declared once: its key, unit and direction, its columns, and the nightly tolerance.

Tables, plots, the check of objectives, the nightly gate and MLflow's description read `METRICS`. To add a metric, add a
line there and the code that measures it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

MEMORY, SPEED, FORECAST_ERROR = "memory/peak_bytes", "perf/samples_per_s", "forecast/error"
PREDICTED_SPEED, RATIO_ERROR, USD = "forecast/samples_per_s", "forecast/ratio_error", "perf/usd_per_million"
PREDICTED_BY = "predicted_by"  # tag of a trial: the basis of its predicted speed
RATIO_GROUP = "ratio_group"  # tag: the group of predictions within which the error of ratios applies
FORECAST_WORDS = (PREDICTED_BY, RATIO_GROUP)  # the values of a forecast that are text
OTHERS_CPU, TIMED_STEPS = "perf/others_cpu", "perf/timed_steps"
MEDIAN_STEP, SLOW_STEP = "perf/step_time_p50_s", "perf/step_time_p95_s"
FORECAST = "forecast/peak_bytes"
DATA_WAIT = "perf/data_wait_share"
TRAIN_LOSS, VAL_LOSS = "train/loss", "val/loss"
LABELS = "train/labels"  # for a loss that also returns its count
LOSS_EPS = "train/loss_eps"  # of the type in which a loss is computed
FIRST_LOSS, EARLY_LOSS, WARM_LOSS = "train/first_loss", "train/early_loss", "train/warm_loss"
# Of a trial's first steps and of its plain loop.
EVAL_LOSS, CHECK_VAL_LOSS = "check/eval_loss", "check/val_loss"
FIRST_GRAD_NORM, CHANGE_NORM = "check/grad_norm", "check/change_norm"
CHECKED = (EVAL_LOSS, FIRST_LOSS, EARLY_LOSS, FIRST_GRAD_NORM, CHANGE_NORM, CHECK_VAL_LOSS)
CHECK_STEPS, CHECK_SAMPLES = 3, 256  # steps and samples of a plain loop
CHECK_BATCHES = 4  # of each rank, where batches are the user's own
LOSSES = (TRAIN_LOSS, VAL_LOSS, "val/bits_per_byte")
_FLOAT32_EPS = 2.0**-23
MIB = 2**20

Table = Literal["csv", "terminal", "report"]


@dataclass(frozen=True)
class Column:
    """How one table shows a metric, if that differs from the metric itself.

    Attributes:
        label: None: the metric's own.
        form: None: the metric's own.
        last: it comes after the other columns.
        marks_best: whether the table marks the best value.
    """

    label: str | None = None
    form: str | None = None
    last: bool = False
    marks_best: bool = True


_SHOWN = Column()


@dataclass(frozen=True)
class Gate:
    """How the nightly gate judges a metric.

    Attributes:
        tolerance: a key of `nightly.tolerance`; "": it is not judged.
        kind: the quantity that the tolerance limits: a `ratio` to the earlier value, or in the metric's own unit the
            `distance` from 0, the `fall` or the `rise`.
        key: of the metric in the results of a night; None: the metric's own.
        label: of the metric in the table of a night; None: the metric's own.
    """

    tolerance: str = ""
    kind: Literal["ratio", "distance", "fall", "rise"] = "ratio"
    key: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Metric:
    """A figure of a trial, or a family of them.

    Attributes:
        key: as it is measured and logged. `<...>` in it stands for a category or a rank.
        label: its name in tables and plots, with the unit that they show.
        unit: of the value under `key`; "" for none.
        about: a line in the description of the MLflow experiment; "": it is not logged under this key.
        better: `min` or `max`; "" for neither.
        form: a format for `value / scale`.
        scale: how many of `unit` are one of the unit that is shown.
        objective: an objective or a scheduler may name it.
        is_speed: it is a speed of training, or follows from one: nights on two machines do not share it.
        mib_key: under this key MLflow also gets the value in MiB, because its pages show bytes with all their digits.
        csv: its column of `results.csv`; None: it has none.
        terminal: its column of the terminal's table; None: it has none.
        report: its column of the report's table; None: it has none.
    """

    key: str
    label: str
    unit: str
    about: str
    better: Literal["min", "max", ""] = ""
    form: str = "{:.4g}"
    scale: float = 1
    objective: bool = True
    is_speed: bool = False
    mib_key: str = ""
    csv: Column | None = None
    terminal: Column | None = None
    report: Column | None = None
    gate: Gate = Gate()

    @property
    def is_family(self) -> bool:
        return "<" in self.key

    def matches(self, key: str) -> bool:
        if not self.is_family:
            return key == self.key
        return re.fullmatch(re.sub("<[a-z]+>", "[a-z_]+", self.key.replace("<r>", r"\d+")), key) is not None

    def text(self, value: float | None) -> str:
        """Return the value as tables show it; "" for None."""
        return "" if value is None else self.form.format(value / self.scale)

    def best_of(self, values: Collection[float]) -> float | None:
        """Return the best value; None if neither direction is better, or all values look the same."""
        if not self.better or len({self.text(value) for value in values}) < 2:
            return None
        return min(values) if self.better == "min" else max(values)


# Tables and messages keep this order.
METRICS = (
    Metric(
        "epoch", "epoch", "", "", form="{:.0f}", objective=False,
        csv=_SHOWN, terminal=_SHOWN, report=_SHOWN,
    ),
    Metric(
        TRAIN_LOSS, "train loss", "", "the mean over the epoch's steps, each over the global batch; one point an epoch",
        better="min", form="{:.4f}",
        csv=_SHOWN, terminal=Column(marks_best=False), report=_SHOWN,
    ),
    Metric(
        LOSS_EPS, "loss eps", "", "the relative rounding of the type in which the loss is computed, if that is "
        "narrower than float32: bfloat16 0.0078, float16 0.00098", form="{:.2g}", objective=False,
    ),
    Metric(
        FIRST_LOSS, "first loss", "", "of the first step: how large losses are before anything is learned",
        objective=False,
    ),
    Metric(
        EARLY_LOSS, "early loss", "", "of the second and third step: settings that are only sharded differently agree "
        "in it", objective=False,
    ),
    Metric(
        LABELS, "labels", "labels", "those that counted in an average step, over the global batch; for a `task.loss` "
        "that returns `(sum, count)`", form="{:.1f}", objective=False,
    ),
    Metric(
        EVAL_LOSS, "eval loss", "", "of the first global batch before the first step, in `eval()` mode; this and the "
        "next three are compared with the plain loop's", objective=False,
    ),
    Metric(
        FIRST_GRAD_NORM, "first grad norm", "", "the norm of all gradients in the first step, before clipping",
        objective=False,
    ),
    Metric(
        CHANGE_NORM, "change norm", "", "the norm of the change of all parameters after the third step",
        objective=False,
    ),
    Metric(
        CHECK_VAL_LOSS, "early val loss", "", "over the first 256 validation samples after the third step",
        objective=False,
    ),
    Metric(
        WARM_LOSS, "warm loss", "", "with lr_schedule.warmup_steps: of the first step after one at the full learning "
        "rate, or of step 20", objective=False,
    ),
    Metric("train/lr", "lr", "", "the learning rate of the last step", form="{:.3g}"),
    Metric(
        "train/grad_norm", "grad norm", "", "the norm of all gradients before clipping, the mean over the epoch's "
        "steps; for language models, and with training.max_grad_norm", csv=_SHOWN, report=_SHOWN,
    ),
    Metric("train/loss_scale", "loss scale", "", "the factor of fp16 losses", form="{:.0f}"),
    Metric(
        "train/skipped_steps", "skipped steps", "steps", "the epoch's steps whose fp16 gradients overflowed",
        better="min", form="{:.0f}", csv=Column(last=True),
    ),
    Metric(
        "train/step", "step", "steps", "optimizer steps so far; the step axis of every metric is the epoch",
        form="{:.0f}", objective=False,
    ),
    Metric(
        VAL_LOSS, "val loss", "", "the mean over the whole validation split",
        better="min", form="{:.4f}",
        csv=_SHOWN, terminal=_SHOWN, report=_SHOWN,
        # by the train loss if there is no validation split
        gate=Gate("loss", key="loss", label="final loss"),
    ),
    Metric(
        "val/accuracy", "val accuracy", "", "over the whole validation split",
        better="max", form="{:.3f}",
        csv=_SHOWN, terminal=Column("val acc"), report=_SHOWN,
    ),
    Metric(
        "val/perplexity", "perplexity", "", "tokens: `exp(val/loss)`, as of so many equally likely tokens",
        better="min", form="{:.2f}", csv=_SHOWN, report=_SHOWN,
    ),
    Metric(
        "val/bits_per_byte", "bits/byte", "bits", "text: the loss in bits per byte of text",
        better="min", form="{:.3f}", csv=_SHOWN, terminal=_SHOWN, report=_SHOWN,
    ),
    Metric(
        SPEED, "samples/s", "samples/s", "of all ranks together, over all timed steps of the run so far; warm-up steps "
        "are excluded, here and below",
        better="max", is_speed=True, form="{:.0f}",
        csv=_SHOWN, terminal=_SHOWN, report=Column(form="{:.1f}"),
        gate=Gate("samples_per_s"),
    ),
    Metric(
        "perf/tokens_per_s", "tokens/s", "tokens/s", "of all ranks together",
        better="max", is_speed=True, form="{:.0f}",
        csv=_SHOWN, terminal=_SHOWN, report=_SHOWN,
    ),
    Metric(
        "perf/tokens_per_s_per_device", "tokens/s/device", "tokens/s", "of one rank",
        better="max", is_speed=True, form="{:.0f}", csv=_SHOWN,
    ),
    Metric(
        USD, "$ per million", "$", "tokens, or samples where none are counted, by `forecast.usd_per_gpu_hour`",
        better="min", is_speed=True, report=_SHOWN,
    ),
    Metric(
        "perf/tflops_per_device", "TFLOP/s/device", "TFLOP/s", "tokens: the FLOPs of the model, without recomputation",
        better="max", is_speed=True, form="{:.3g}", csv=_SHOWN, report=_SHOWN,
    ),
    Metric(
        DATA_WAIT, "data wait", "", "the share of the timed steps in which a process waits for batches, "
        "the mean over ranks; its GPU may be busy meanwhile",
        better="min", is_speed=True, form="{:.3f}", csv=_SHOWN, report=_SHOWN,
        gate=Gate("data_wait_share", kind="rise"),
    ),
    Metric(
        TIMED_STEPS, "timed steps", "steps", "the steps behind the speed", form="{:.0f}", objective=False,
        csv=Column(last=True),
    ),
    Metric("perf/timed_s", "timed s", "s", "how long they took", form="{:.2f}", objective=False, csv=Column(last=True)),
    Metric(
        "perf/speed_error", "speed error", "", "the relative standard error of the speed, estimated from the steps "
        "of this run", form="{:.4f}", objective=False, csv=Column(last=True),
    ),
    Metric(
        OTHERS_CPU, "others' CPU", "", "the share of the machine's cores that other processes used while steps were "
        "timed; the largest of several nodes", form="{:.2f}", objective=False, csv=_SHOWN, report=_SHOWN,
    ),
    Metric(
        MEDIAN_STEP, "step p50 ms", "s", "the median time of an optimizer step",
        better="min", is_speed=True, form="{:.2f}", scale=1e-3, csv=_SHOWN, report=_SHOWN,
    ),
    Metric(
        SLOW_STEP, "step p95 ms", "s", "95 % of the steps took no longer",
        better="min", is_speed=True, form="{:.2f}", scale=1e-3, csv=_SHOWN,
    ),
    Metric(
        "perf/mfu", "MFU", "", "the share of the device's peak FLOP/s that the model used, if the peak is known; "
        "causal attention counts whole",
        better="max", is_speed=True, form="{:.3f}", csv=_SHOWN, report=Column(last=True),
    ),
    Metric(
        "perf/rank<r>/<part>_share", "share", "", "of two untimed steps of each rank, up to eight ranks: `compute`, "
        "`data` (waiting for batches) and `others` (waiting for slower ranks); the rest is exchange",
        is_speed=True, form="{:.3f}", objective=False,
    ),
    Metric(
        MEMORY, "peak MiB", "bytes", "the highest memory of all tensors of a rank",
        better="min", form="{:.2f}", scale=MIB, mib_key="memory/peak_mib",
        csv=_SHOWN, terminal=_SHOWN, report=_SHOWN,
        gate=Gate("peak_memory"),
    ),
    Metric(
        "memory/reserved_bytes", "reserved MiB", "bytes",
        "GPUs: the memory that a process reserved on the GPU; this is what runs out",
        better="min", form="{:.2f}", scale=MIB, mib_key="memory/reserved_mib", csv=_SHOWN,
    ),
    Metric(
        "memory/host_peak_bytes", "host peak MiB", "bytes", "GPUs: the highest memory of a rank's tensors on the host",
        better="min", form="{:.2f}", scale=MIB, mib_key="memory/host_peak_mib", csv=_SHOWN, report=_SHOWN,
    ),
    Metric(
        "memory/<category>_bytes", "MiB", "bytes", "the parts of the highest peak of all ranks: `param`, `grad`, "
        "`activation` …; `host_…` on the host; GPUs: `active`, the blocks in use, and `workspace`, cuBLAS's own, which "
        "`active` and `reserved` include",
        better="min", form="{:.2f}", scale=MIB,
    ),
    Metric(
        "memory/rank<r>/<total>_bytes", "MiB", "bytes",
        "`peak`, `active`, `reserved` and `host_peak` of each rank, up to eight ranks; of any number in "
        "`memory_peaks_rank<r>.json`",
        better="min", form="{:.2f}", scale=MIB,
    ),
    Metric(
        "memory/rank_<which>/<total>_bytes", "MiB", "bytes",
        "above eight ranks: `smallest` and `median` of these totals; the largest is `memory/<total>_bytes`",
        better="min", form="{:.2f}", scale=MIB,
    ),
    Metric(
        "forecast/peak_bytes", "forecast MiB", "bytes", "the peak that was forecast before the trial ran",
        form="{:.2f}", scale=MIB, objective=False, mib_key="forecast/peak_mib",
        csv=_SHOWN, terminal=_SHOWN, report=_SHOWN,
    ),
    Metric(
        "forecast/reserved_bytes", "forecast reserved MiB", "bytes", "GPUs: the forecast of `memory/reserved_bytes`",
        form="{:.2f}", scale=MIB, objective=False, csv=_SHOWN,
    ),
    Metric(
        "forecast/host_bytes", "forecast host MiB", "bytes", "the forecast of `memory/host_peak_bytes`",
        form="{:.2f}", scale=MIB, objective=False, csv=_SHOWN,
    ),
    Metric(
        "forecast/needed_bytes", "needed MiB", "bytes", "the forecast with allowances for libraries",
        form="{:.2f}", scale=MIB, objective=False,
    ),
    Metric(
        "forecast/capacity_bytes", "capacity MiB", "bytes", "the memory of a device, if known",
        form="{:.2f}", scale=MIB, objective=False,
    ),
    Metric(
        FORECAST_ERROR, "forecast error", "", "`forecast / measured - 1`, of the peaks",
        form="{:+.4f}", objective=False,
        csv=_SHOWN, report=_SHOWN, gate=Gate("forecast_error", kind="distance"),
    ),
    Metric(
        "forecast/step_s", "predicted step s", "s", "the predicted time of an optimizer step on "
        "`forecast.device`",
        objective=False, csv=_SHOWN,
    ),
    Metric(
        PREDICTED_SPEED, "predicted samples/s", "samples/s", "predicted, of all ranks together",
        form="{:.0f}", objective=False, csv=_SHOWN, terminal=_SHOWN, report=Column(form="{:.1f}"),
    ),
    Metric(
        "forecast/samples_per_s_low", "predicted samples/s, at least", "samples/s", "nine of ten runs reach it",
        form="{:.0f}", objective=False,
    ),
    Metric(
        "forecast/samples_per_s_high", "predicted samples/s, at most", "samples/s", "nine of ten runs do not "
        "exceed it",
        form="{:.0f}", objective=False,
    ),
    Metric(
        RATIO_ERROR, "error of ratios", "", "of the ratio of two predicted speeds; nine of ten ratios are within it",
        form="{:.3f}", objective=False,
    ),
    Metric(
        "perf/forecast_error", "speed forecast error", "", "`predicted / measured - 1`, of the seconds of a step",
        form="{:+.3f}", objective=False, is_speed=True, csv=_SHOWN, report=_SHOWN,
        gate=Gate("speed_forecast_error", kind="fall"),
    ),
    Metric(
        "forecast/largest_microbatch", "largest microbatch", "samples", "the largest that fits, by the forecast",
        form="{:.0f}", objective=False, csv=_SHOWN,
    ),
    Metric(
        "checkpoint/save_s", "save s", "s", "the time until a checkpoint was written",
        better="min", form="{:.2f}", csv=Column(last=True),
    ),
    Metric(
        "checkpoint/blocked_s", "blocked s", "s", "the time that training waited for it", better="min", form="{:.2f}"
    ),
    Metric(
        "checkpoint/bytes", "checkpoint MiB", "bytes", "its size on the disk, of all ranks",
        better="min", form="{:.2f}", scale=MIB,
    ),
)  # fmt: skip


def declared(key: str) -> Metric:
    """Return the declaration of a metric, or of its family.

    Raises:
        KeyError: there is none.
    """
    exact = [metric for metric in METRICS if metric.key == key]
    for metric in exact or METRICS:
        if metric.matches(key):
            return metric
    raise KeyError(f"{key} is not declared in fsdp_lab.config.metrics")


def table_columns(table: Table, known: Iterable[str] = ()) -> list[Metric]:
    """Return the metrics that a table shows, in its order, with its labels and formats.

    Args:
        known: the keys of the figures to show; those of `task.metrics`, which are not declared, follow ours of `val/`.
    """
    place = [metric.key for metric in METRICS].index(SPEED)
    metrics = [*METRICS[:place], *_of_users(known), *METRICS[place:]]
    shown = [(column, metric) for metric in metrics if (column := getattr(metric, table)) is not None]
    return [
        dataclasses.replace(
            metric,
            label=column.label or metric.label,
            form=column.form or metric.form,
            better=metric.better if column.marks_best else "",
        )
        for column, metric in sorted(shown, key=lambda pair: pair[0].last)
    ]


def _of_users(keys: Iterable[str]) -> Iterator[Metric]:
    for key in dict.fromkeys(keys):
        if key.startswith("val/") and not any(metric.matches(key) for metric in METRICS):
            label = key.replace("/", " ", 1)
            yield Metric(key, label, "", "", objective=False, csv=_SHOWN, terminal=_SHOWN, report=_SHOWN)


def gated() -> list[Metric]:
    """Return the metrics that the nightly gate judges, with their keys and labels in the results of a night."""
    judged = [metric for metric in METRICS if metric.gate.tolerance]
    return [dataclasses.replace(m, key=m.gate.key or m.key, label=m.gate.label or m.label) for m in judged]


def objective_keys() -> list[str]:
    """Return the metrics that an objective may name, without families."""
    return [metric.key for metric in METRICS if metric.objective and not metric.is_family]


def can_be_objective(key: str) -> bool:
    """Whether an objective may name the metric, or one of its family."""
    return any(metric.objective and metric.matches(key) for metric in METRICS)


def spacing(key: str, figures: Mapping[str, float]) -> float:
    """Return the insignificant difference from a trial's figure: the rounding of a loss, 0 for most other metrics.

    `LOSS_EPS` is the relative rounding of the type of the loss; without it the type is float32. Losses below the
    rounding of the first loss count as zero, and so do other figures that tables show as zero.
    """
    value = abs(figures.get(key, 0.0))
    if key == "val/perplexity":
        return value * spacing(VAL_LOSS, figures)
    if key in LOSSES:
        eps = figures.get(LOSS_EPS, _FLOAT32_EPS)
        zero = eps * abs(figures.get(FIRST_LOSS, 1.0))
        return zero if value <= zero else eps * value
    shown = [metric for metric in METRICS if metric.matches(key)][:1]
    return value if any(metric.text(value) == metric.text(0.0) for metric in shown) else 0.0


def same_loss(key: str, one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Return whether the metric is a loss that differs only by rounding between two trials."""
    return key in LOSSES and abs(one[key] - other[key]) <= max(spacing(key, one), spacing(key, other))


def mib_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that MLflow also gets in MiB."""
    return {m.mib_key: figures[m.key] / MIB for m in METRICS if m.mib_key and m.key in figures}


def mib(num_bytes: float) -> str:
    """Return bytes as tables show them, without the unit."""
    return f"{num_bytes / MIB:.2f}"
