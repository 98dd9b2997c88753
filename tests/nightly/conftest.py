"""The schedule of studies, and nights that are made up."""

from __future__ import annotations

from datetime import UTC, datetime

from fsdp_lab.config.metrics import FORECAST_ERROR, MEMORY, MIB, SPEED
from fsdp_lab.nightly.gate import LOSS, STATUS, Finding, Night, Outcome, Verdict
from fsdp_lab.nightly.night import night_id

# No schedule is to start a night in a test.
IN_TWELVE_HOURS = (f"nightly.cron='0 {(datetime.now(UTC).hour + 12) % 24} * * *'", "nightly.timezone=UTC")

# What a test changes in a copy of the code, so that a night is slow: a file, and a piece of it that occurs once.
SLOWED = ("fsdp_lab/training/speed.py", "samples_per_s = samples / run.seconds\n")


def made_up_nights(count: int = 34) -> list[Night]:
    """One a day; the tenth is a regression, the eleventh accepted; a new commit every week, torch anew at the 20th."""
    nights = []
    for number in range(count):
        moment = 1.78e9 + number * 86400
        trials = [
            {"setting": setting, STATUS: "finished", SPEED: speed + place,
             MEMORY: (4.0 + place) * MIB, LOSS: 1.2, FORECAST_ERROR: 0.0}
            for place, setting in enumerate(("sharding=ddp", "sharding=per_block")) for speed in (500.0, 510.0, 520.0)
        ]  # fmt: skip
        bad = Finding("sharding=ddp", SPEED, Outcome.regression, "x", 510.0, 306.0, -0.4)
        night = Night(
            night_id(moment), moment, {10: Verdict.regression, 11: Verdict.accepted}.get(number, Verdict.good),
            trials=trials,
            findings=[bad] if number == 10 else [], accepted={"reason": "<new> model"} if number == 11 else None,
            origin={"commit": f"commit{number // 7}", "library torch": "2.15.0" if number < 20 else "2.16.0"},
        )  # fmt: skip
        nights.append(night)
    return nights
