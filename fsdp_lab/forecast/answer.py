"""The answers of forecasts, by the rules of a sweep's report and in its words. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fsdp_lab.config import may_change_speed
from fsdp_lab.config.metrics import MEMORY
from fsdp_lab.config.parallel import Granularity
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.forecast.keep import predicted
from fsdp_lab.forecast.speed.predict import Speed
from fsdp_lab.forecast.table import Row, forecasts_frame
from fsdp_lab.forecast.words import say
from fsdp_lab.report.answer import Answer, with_comparisons
from fsdp_lab.report.qualify import LEAST
from fsdp_lab.report.recommend import recommend
from fsdp_lab.report.settings import Rules, Setting, Settings, combinations

if TYPE_CHECKING:
    import pandas as pd

WORKERS, BATCH = "cluster.num_workers", "training.global_batch_size"
CONDITIONS = (WORKERS, "forecast.device", BATCH)  # each value has its own answer
_WAITS = 0.5  # the share of a step that gathers and scatters bound, from which hybrid sharding is named


@dataclass(frozen=True)
class ForecastAnswer(Answer):
    """The answer for one device, number of workers and global batch size.

    Attributes:
        where: the swept values of these.
        rows: of the settings, by the numbers of their trials in the recommendation.
        remedies: overrides that leave more room on a GPU, to try first if one is nearly full.
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
    def roomy(self) -> Setting | None:
        """The fastest other setting that leaves room on its GPU; None without one."""
        r = self.recommendation
        able = [s for s in r.able if s is not r.setting and not self.row(s).forecast.nearly_full]
        return max(able, key=lambda s: samples_per_s(self.row(s)), default=None)

    @property
    def num_replicas(self) -> int | None:
        """The `sharding.dp_replicate` that shards within a node; None: the step waits for no network between nodes."""
        speed, request = (self.best.forecast.speed, self.best.request) if self.best else (None, None)
        if speed is None or speed.network is None or request is None or request.sheet is None:
            return None
        sharding = request.config.sharding
        nodes, left_over = divmod(request.num_workers, request.sheet.node_size)
        if sharding.granularity is Granularity.ddp or sharding.dp_replicate > 1 or left_over:
            return None
        return nodes if speed.shares.get("gather", 0.0) + speed.shares.get("scatter", 0.0) >= _WAITS else None


def answers(
    rows: Sequence[Row], swept: Sequence[str], tolerance: float, remedies: Sequence[str] = ()
) -> list[ForecastAnswer]:
    """Return the answer for each device, number of workers and global batch size.

    Args:
        rows: the forecasts; those with an error are left out.
        tolerance: `report.speed_tolerance`: what the fastest may be given up for if it nearly fills its GPU.
        remedies: overrides that leave more room on a GPU.
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
    for _, some in frame.groupby(combinations(frame, conditions)):
        where = some.iloc[0][conditions].astype(str).to_dict() if len(some) < len(frame) else {}
        answer = with_comparisons(ForecastAnswer(recommend(Settings(some.reset_index(drop=True), rules))))
        answer = replace(answer, where=where, rows=[having[place] for place in some.index], remedies=remedies)
        notes = [*say("basis", answer), *answer.notes]
        (sentence,) = say("head", answer)
        made.append(replace(answer, sentence=sentence, details=say("details", answer), notes=notes))
    return made


def _frame(rows: Sequence[Row], swept: Sequence[str]) -> pd.DataFrame:
    """Return forecasts as a sweep's frame."""
    import pandas as pd

    frame = forecasts_frame(rows, swept)
    short = [row.forecast.host_is_short for row in rows]  # of the host, which is then what it does not fit
    host = [row.forecast.host.memory_bytes or 0 for row in rows]
    figures = {
        MEMORY: frame["needed_bytes"],
        "forecast/needed_bytes": frame["needed_bytes"].mask(short, [r.forecast.host_needed_bytes for r in rows]),
        LEAST: frame["least_bytes"].where(frame["fits"] == "tight"),
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
