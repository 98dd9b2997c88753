"""A sweep as it was recorded: what was asked, and its trials."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fsdp_lab.config import UserError
from fsdp_lab.files import write_text
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.status import TrialStatus

if TYPE_CHECKING:
    import pandas as pd

RECORD = "record.json"


@dataclass(frozen=True)
class SweepRecord:
    """A sweep and its trials. Everything that shows or judges results reads this.

    Attributes:
        axes: the keys that differ between its trials, in the order of the command line.
        trials: in the order of their numbers.
        loss_tolerance: a setting qualifies if its loss is within this ratio of the best.
        speed_tolerance: settings within this ratio of the fastest tie.
        runs_url: address of an MLflow UI's runs, to which `/<run id>` is added; None: no server is known.
        about: more lines for its head, as (name, text).
        objectives: `(metric, "min" or "max")` of each objective, the most important first; empty: the fastest setting
            that qualifies is recommended.
        study: the name of the study, such as the preset's; "" for a sweep without one.
        log_axes: the axes that were searched on a logarithmic scale.
    """

    name: str
    command: str
    axes: list[str]
    trials: list[TrialRecord]
    loss_tolerance: float
    speed_tolerance: float
    runs_url: str | None = None
    about: Sequence[tuple[str, str]] = ()
    objectives: Sequence[tuple[str, str]] = ()
    study: str = ""
    log_axes: Sequence[str] = ()

    @property
    def statuses(self) -> list[TrialStatus]:
        return [trial.status for trial in self.trials]

    def frame(self) -> pd.DataFrame:
        """Return a row a trial, indexed by its number: what it was, how it ended, its latest metrics.

        The columns are `status`, `reason` (its code), `run_id`, `seconds`, `device` and
        `predicted_by`, then the axes as typed, then the metrics under their keys, as float64; NaN where a trial has
        none.
        """
        import pandas as pd

        head = ("status", "reason", "run_id", "seconds", "device", "predicted_by")
        rows = [
            {
                "trial": trial.number,
                **{name: getattr(trial, name) for name in head},
                "reason": trial.reason.code if trial.reason else None,
                **{axis: trial.setting.get(axis, "") for axis in self.axes},
                **trial.figures,
            }
            for trial in self.trials
        ]
        metrics = sorted({key for trial in self.trials for key in trial.figures})
        frame = pd.DataFrame(rows, columns=["trial", *head, *self.axes, *metrics])
        return frame.astype(dict.fromkeys(["seconds", *metrics], "float64")).set_index("trial")

    def write(self, folder: Path) -> None:
        """Write `record.json`, which every sweep logs: all of this."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["trials"] = [trial.to_dict() for trial in self.trials]
        write_text(folder / RECORD, json.dumps(plain), parents=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the sweep in a `record.json`, wherever it came from. It is data: nothing in it is run or composed.

        Raises:
            UserError: it is damaged, or of another version.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            trials = [TrialRecord.from_dict(trial) for trial in values.pop("trials")]
            about, objectives = ([(str(a), str(b)) for a, b in values.pop(key)] for key in ("about", "objectives"))
            return cls(**values, about=about, objectives=objectives, trials=trials)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); run the sweep again.") from None
