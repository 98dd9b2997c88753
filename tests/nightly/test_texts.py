"""What nights say. `verdicts.md` has what gate.md shows of each case: `python -m tests.nightly.test_texts` writes it
again, to be read before it is committed. The page has made-up nights: months of real ones cannot be had in a test."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fsdp_lab.config.metrics import DATA_WAIT, FORECAST_ERROR, MEMORY, MIB, SPEED, declared
from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.nightly.gate import LOSS, STATUS, Night, Verdict, changes, judge
from fsdp_lab.nightly.night import night_id
from fsdp_lab.nightly.texts import chart, frame_of_nights, markdown, nights_page
from tests.nightly.conftest import made_up_nights

VERDICTS = Path(__file__).with_name("verdicts.md")
FIRST = 1.7951e9
ORIGIN = {
    "machine": "EPYC (16 cores), 2 workers", "commit": "3b3f407aa1", "code": "1", "library ray": "2.56.0",
    "library fsdp_lab": "0.1.0 (commit 9e1d2f5b0c)", "library torch": "2.15.0", "user code my_model": "1",
}  # fmt: skip
Trials = list[dict[str, Any]]


def trials(
    speed: float = 262.0, loss: float = 0.5123, memory: float = 19.25, spread: float = 0.01,
    status: str = "finished", wait: float = 0.012,
) -> Trials:  # fmt: skip
    """Three repeats of two settings; of `ddp` nothing changes."""
    ddp = {"setting": "sharding=ddp", LOSS: 0.5123, MEMORY: 24.5 * MIB, DATA_WAIT: 0.012, FORECAST_ERROR: 0.0}
    own = {"setting": "sharding=per_block", LOSS: loss, MEMORY: memory * MIB, DATA_WAIT: wait, FORECAST_ERROR: 0.0}
    rows = []
    for ended, share in (("finished", 1.0), ("finished", 1 + spread), (status, 1 - spread)):
        rows.append({**ddp, STATUS: "finished", SPEED: 310.0 * share})
        rows.append({**own, STATUS: ended, SPEED: speed * share})
    return rows


def last_of(*rows: Trials, changed: dict[str, str] | None = None) -> Night:
    """The last of the nights with these trials, each judged against those before; in its origin something changed."""
    nights: list[Night] = []
    for number, each in enumerate(rows):
        moment, last = FIRST + number * 86400, number == len(rows) - 1
        night = Night(night_id(moment), moment, trials=each, origin=ORIGIN | ((changed or {}) if last else {}))
        frames = [(one.id, one.origin["machine"] == night.origin["machine"], one.frame) for one in nights]
        findings = judge(night.frame, frames, ToleranceConfig(), 0.005)
        bad = any(finding.is_regression for finding in findings)
        before = nights[-1] if nights else None
        nights.append(dataclasses.replace(
            night, findings=findings, baseline=before and before.id, changed=changes(before, night) if before else [],
            verdict=Verdict.regression if bad else Verdict.good,
        ))  # fmt: skip
    return nights[-1]


def cases() -> dict[str, Night]:
    first = last_of(trials())
    return {
        "the first night": first,
        "the first night, in which not every trial finished": last_of(trials(status="oom")),
        "nothing changed": last_of(trials(), trials()),
        "slower, with new libraries": last_of(
            trials(), trials(speed=185.5),
            changed={"library ray": "2.57.0", "commit": "5b0c9e1d2f", "code": "2", "library fsdp_lab": "0.2.0"},
        ),
        "a drift of three nights, with code that is not committed": last_of(
            trials(), trials(speed=227.0), trials(speed=204.0),
            changed={"user code my_model": "2", "user code my_data": "1", "code": "2", "library mlflow": "3.1.0"},
        ),
        "a slide": last_of(*(trials(speed=262.0 * 0.995**n) for n in range(13))),
        "better": last_of(trials(), trials(speed=340.0)),
        "noise": last_of(trials(spread=0.2), trials(speed=205.0, spread=0.2)),
        "a trial that no longer finishes, and a longer wait for data": last_of(
            trials(), trials(status="oom", wait=0.31)
        ),
        "a regression on another machine": last_of(
            trials(), trials(memory=25.0), changed={"machine": "NVIDIA H200, 2 workers"}
        ),
        "accepted": dataclasses.replace(
            last_of(trials(), trials(loss=0.61)), verdict=Verdict.accepted,
            accepted={"reason": "the data grew", "by": "ada", "at": first.id},
        ),
        "a slow rank": dataclasses.replace(
            last_of(trials(), trials(speed=185.5)),
            slow=["Trial 0: Rank 1 is slower than the others: it waits 153 ms a step for its data."],
        ),
        "nothing finished": dataclasses.replace(first, verdict=Verdict.failed, trials=[]),
    }  # fmt: skip


def all_verdicts() -> str:
    return "\n".join(f"<!-- {name} -->\n{markdown(night)}" for name, night in cases().items())


def test_the_verdicts_are_those_that_were_read():
    assert all_verdicts() == VERDICTS.read_text()


def test_the_page_has_the_last_thirty_nights_and_their_charts():
    nights = made_up_nights(34)
    text = nights_page("nightly", nights, ToleranceConfig()).partition("plotly.js v")[0]
    assert nights[4].id in text and nights[3].id not in text
    assert "sharding=ddp: samples/s -40.0 %" in text and "&lt;new&gt; model" in text
    assert "commit0 → commit1" in text and "torch 2.15.0 → 2.16.0" in text
    places = [text.index(f"<h2>{name}</h2>") for name in ("Nights", "samples/s by night", "peak MiB by night")]
    assert places == sorted(places)
    figure: Any = chart(declared(SPEED), nights[:14], frame_of_nights(nights[:14]), 0.1)
    ddp = next(trace for trace in figure.data if trace.name == "sharding=ddp")  # of 500, 510 and 520 samples/s
    assert (ddp.y[0], ddp.error_y.array[0], ddp.error_y.arrayminus[0]) == (510.0, 10.0, 10.0)
    crosses, diamonds = (next(trace for trace in figure.data if trace.marker.symbol == s) for s in ("x", "diamond"))
    assert list(crosses.x) == [ddp.x[10]] and set(diamonds.x) == {ddp.x[11]}, "what was bad, and what was accepted"
    assert len(figure.layout.shapes) == 1  # the commit of the second week


if __name__ == "__main__":
    VERDICTS.write_text(all_verdicts())
