"""Forecasts with their answers, by the rules and in the words of a sweep's report. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import may_change_speed
from fsdp_lab.config.metrics import MEMORY
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.forecast.capacity import GIB
from fsdp_lab.forecast.keep import predicted
from fsdp_lab.forecast.speed.predict import Speed
from fsdp_lab.forecast.table import COLUMNS, Row, forecasts_frame
from fsdp_lab.forecast.words import no_forecast_text, say
from fsdp_lab.record.trial import words
from fsdp_lab.report.answer import Answer, comparisons
from fsdp_lab.report.qualify import LEAST
from fsdp_lab.report.recommend import recommend
from fsdp_lab.report.settings import Rules, Setting, Settings, combinations

if TYPE_CHECKING:
    import pandas as pd

WORKERS, BATCH = "cluster.num_workers", "training.global_batch_size"
CONDITIONS = (WORKERS, "forecast.device", BATCH)  # each value has its own answer
_WAITS = 0.1  # share of a step that gathers and scatters bound, above which hybrid sharding is suggested


@dataclass(frozen=True)
class ForecastAnswer(Answer):
    """The answer for one device, number of workers and global batch size.

    Attributes:
        where: the swept values of device, workers and batch size.
        rows: of the settings, by the numbers of their trials in the recommendation.
        remedies: overrides that need less memory on a GPU, to try if nothing fits.
    """

    where: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    remedies: Sequence[str] = ()

    def row(self, setting: Setting) -> Row:
        return self.rows[setting.trials[0]]

    @cached_property
    def best(self) -> Row | None:
        """The recommended one; None: nothing fits."""
        setting = self.recommendation.setting
        return self.row(setting) if setting else None

    @property
    def least(self) -> Row:
        return min(self.rows, key=lambda row: row.forecast.needed_bytes)

    @property
    def num_replicas(self) -> int | None:
        """The `sharding.dp_replicate` that shards within a node; None: that would not help."""
        speed, request = (self.best.forecast.speed, self.best.request) if self.best else (None, None)
        if speed is None or speed.network is None or request is None or request.sheet is None:
            return None
        sharding = request.config.sharding
        nodes, left_over = divmod(request.num_workers, request.sheet.node_size)
        whole_node = request.sheet.node_size == sharding.tp  # nothing is left to shard within a node
        if sharding.kind == "ddp" or sharding.dp_replicate > 1 or left_over or whole_node:
            return None
        return nodes if speed.shares.get("gather", 0.0) + speed.shares.get("scatter", 0.0) >= _WAITS else None


def answers(
    rows: Sequence[Row], swept: Sequence[str], tolerance: float, remedies: Sequence[str] = ()
) -> list[ForecastAnswer]:
    """Return the answer for each device, number of workers and global batch size.

    Args:
        rows: the forecasts; those with an error are ignored.
        tolerance: `report.speed_tolerance`: within it another setting wins over the fastest if that nearly fills its
            GPU.
        remedies: overrides that need less memory on a GPU.
    """
    having = [row for row in rows if not row.forecast.error]
    if not having:
        return []
    frame, conditions = _frame(having, swept), [key for key in CONDITIONS if key in swept]
    rules = Rules(
        [key for key in swept if key not in CONDITIONS and may_change_speed(key)],
        speed_tolerance=tolerance,
        predicted=True,
    )
    made = []
    # with `${per_worker:2}` the batch size varies with keys such as sharding.tp
    batches = [row.request.config.training.global_batch_size if row.request else 0 for row in having]
    by_batch = combinations(frame.assign(batch=batches), [*conditions, "batch"])
    is_named = by_batch.nunique() == combinations(frame, conditions).nunique()
    for _, some in frame.groupby(by_batch):
        where = some.iloc[0][conditions].astype(str).to_dict() if len(some) < len(frame) else {}
        where |= {} if is_named else {BATCH: str(batches[some.index[0]])}
        r, own = recommend(Settings(some.reset_index(drop=True), rules)), [having[place] for place in some.index]
        answer = ForecastAnswer(r, **comparisons(r), where=where, rows=own, remedies=remedies)
        notes = [*say("basis", answer), *answer.notes]
        (sentence,) = say("head", answer)
        made.append(replace(answer, sentence=sentence, details=say("details", answer), notes=notes))
    return made


def _frame(rows: Sequence[Row], swept: Sequence[str]) -> pd.DataFrame:
    """Return forecasts as a sweep's frame."""
    import pandas as pd

    frame = forecasts_frame(rows, swept)
    short = [row.forecast.host_is_short for row in rows]  # if the host is short, its memory counts
    host = [row.forecast.host.memory_bytes or 0 for row in rows]
    figures = {
        MEMORY: frame["needed_bytes"],
        "forecast/needed_bytes": frame["needed_bytes"].mask(short, [r.forecast.host_needed_bytes for r in rows]),
        LEAST: frame["least_bytes"].where(frame["fits"] == "unsure"),
        "forecast/capacity_bytes": frame["capacity_bytes"].mask(short, host),
    }
    speeds = [predicted(row.forecast.speed) if row.forecast.speed else None for row in rows]
    return frame[[*swept, "device"]].assign(
        status=TrialStatus.finished,
        predicted=pd.Series(speeds, frame.index, object),
        **{key: values.astype(float) for key, values in figures.items()},
    )


def samples_per_s(row: Row) -> float:
    """Return the predicted samples/s of all workers; 0 without a speed."""
    speed: Speed | None = row.forecast.speed
    return speed.samples_per_s if speed else 0.0


@dataclass(frozen=True)
class ForecastResult:
    """The forecasts of a command line.

    Attributes:
        axes: the keys that differ between the settings.
        rows: one forecast per setting, the best first; after an interrupt only those that were made.
        shown: the rows, without settings that differ only in a key without effect on them.
        answers: one for each device, number of workers and global batch size; none if no forecast could be made.
        folder: has `forecast.csv`, and a page for each forecast.
        missing: the number of settings without a forecast because of an interrupt.
    """

    axes: Sequence[str]
    rows: Sequence[Row]
    shown: Sequence[Row]
    answers: Sequence[ForecastAnswer]
    folder: Path
    missing: int

    def frame(self) -> pd.DataFrame:
        """Return the rows with the columns of `forecast.csv`: the axes as typed, then bytes, seconds and samples/s."""
        return forecasts_frame(self.rows, self.axes)

    @property
    def recommendation(self) -> ForecastAnswer:
        """The first of the answers. Its sentence names its device, number of workers and batch size if they differ."""
        return self.answers[0]

    @property
    def reasons(self) -> list[str]:
        """Why settings have no forecast, or no speed; each reason once."""
        every = [why for row in self.rows for why in (no_forecast_text(row.forecast.error), row.forecast.no_speed)]
        return sorted({why for why in every if why})

    def plot(self) -> Any:
        """Return a Plotly figure: predicted speeds against needed memory; without speeds, the parts of each peak."""
        import plotly.express as px

        made = [row for row in self.shown if not row.forecast.error]
        frame = forecasts_frame(made, self.axes)
        names = [words(dict(zip(self.axes, row.settings, strict=True))) for row in made]
        if frame["step_s"].isna().all():
            parts = {name: frame[[f"{part}_bytes" for part in of]].sum(axis=1) / GIB for name, of in COLUMNS.items()}
            figure = px.bar(frame[[]].assign(**parts), x=[*parts], y=names, orientation="h")
            figure.update_yaxes(autorange="reversed")
            return figure.update_layout(xaxis_title="GiB at the peak", yaxis_title=None, legend_title=None)
        unit = "tokens" if frame["tokens_per_s_per_device"].notna().any() else "samples"
        x, y = "GiB needed on a device", f"predicted {unit}/s per device"
        rate = frame[f"{unit}_per_s_per_device"]
        figures = {x: frame["needed_bytes"].astype(float) / GIB, y: rate, "setting": names}
        figures["faster"] = rate * (frame["step_s"] / frame["step_low_s"] - 1)
        figures["slower"] = rate * (1 - frame["step_s"] / frame["step_high_s"])
        return px.scatter(
            frame.assign(**figures), x=x, y=y, error_y="faster", error_y_minus="slower", hover_name="setting",
            color=self.axes[0] if self.axes else None, symbol="fits" if frame["fits"].notna().any() else None,
        )  # fmt: skip
