"""The recommended setting, against frames of which it can be said by eye. What is said of it is in test_golden.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.metrics import MEDIAN_STEP, MEMORY, MIB, OTHERS_CPU, SPEED
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import answer, settings_of
from fsdp_lab.report.recommend import Recommendation, recommend
from fsdp_lab.report.settings import Coded, Settings
from tests.report.sweeps import REPEATED, ROWS, on_cpu, rounds, sweep, trial

ROUNDED = {"train/loss_eps": 2.0**-7}  # near 4, bfloat16 has 4, 4.03125, 4.0625 above, and 3.984375 below


def of(made: SweepRecord) -> Recommendation:
    return recommend(Settings(made.frame(as_typed=True), settings_of(made).rules))


def chosen(made: SweepRecord) -> dict[str, str]:
    setting = of(made).setting
    assert setting is not None
    return setting.values


def codes(reasons: list[Coded] | dict[str, Coded]) -> list[str]:
    return [str(reason.code) for reason in (reasons.values() if isinstance(reasons, dict) else reasons)]


def one_axis(axis: str, *rows: tuple[str, float, float, float], **figures: float) -> list[TrialRecord]:
    """Trials by the value of an axis, its MiB, samples/s and val/loss."""
    return [
        replace(trial(n, ("", "", "finished", mib, speed, loss), **figures), setting={axis: value})
        for n, (value, mib, speed, loss) in enumerate(rows)
    ]


def test_the_fastest_that_fits_and_reached_the_loss_is_taken():
    r = of(sweep())
    assert chosen(sweep()) == {"sharding": "root", "precision": "bf16"}
    assert {name: reason.code for name, reason in r.why_not.items()} == {
        "sharding=ddp precision=bf16": "loss_too_high", "sharding=per_block precision=fp32": "oom",
    }  # fmt: skip
    # of the two that have the best loss: 1000 samples/s against 900
    assert chosen(sweep(loss_tolerance=0.0)) == {"sharding": "ddp", "precision": "fp32"}
    assert of(sweep(speed_tolerance=0.0)).tied == []
    assert r.why_not["sharding=ddp precision=bf16"].values["above"] == pytest.approx(0.1)
    assert (r.why.code, [s.name for s in r.tied]) == ("tied", ["sharding=per_block precision=bf16"])
    # by hand: 40 MiB/1950, 50/1980; 60/900, 80/1500, 100/1000 are beaten by both
    assert [s.name for s in r.front] == ["sharding=root precision=bf16", "sharding=per_block precision=bf16"]
    against = {c.setting.name: c for c in r.others}["sharding=ddp precision=fp32"]
    assert against.speed is not None and not against.speed.known, "one run each has no interval"
    assert (against.speed.value, against.memory, against.loss) == pytest.approx((1000 / 1980, 2, 1 / 1.01 - 1))


def test_ties_go_by_simplicity_loss_and_scarce_memory():
    for axis, other, simple in (
        ("offload", "cpu", "none"),
        ("sharding.api", "fsdp1", "fsdp2"),
        ("sharding.tp", "2", "1"),
    ):
        rows = one_axis(axis, (other, 90, 1010.0, 1.0), (simple, 100, 1000.0, 1.0))
        assert chosen(sweep(rows, axes=[axis])) == {axis: simple}
    rows = one_axis("optimizer.lr", ("0.1", 99, 1000.0, 1.019), ("0.001", 100, 1000.0, 1.0))
    assert chosen(sweep(rows, axes=["optimizer.lr"])) == {"optimizer.lr": "0.001"}
    for needed, expected, by in ((95.0, "small", "memory"), (80.0, "large", "speed")):  # of 100 MiB
        figures = {"forecast/needed_bytes": needed * MIB, "forecast/capacity_bytes": 100.0 * MIB}
        rows = one_axis("model", ("large", 90, 1000.0, 1.0), ("small", 40, 990.0, 1.0), **figures)
        assert chosen(sweep(rows, axes=["model"])) == {"model": expected}
        assert of(sweep(rows, axes=["model"])).tie_break == by


@pytest.mark.parametrize(
    ("losses", "others", "qualifies", "once"),
    [
        ((1.00, 1.06, 0.97), (1.03, 1.05, 0.99), True, False),  # medians of 1.00 and 1.03
        ((1.00, 1.06, 0.97), (1.05, 1.113, 1.0185), False, False),  # 5 % in every round
        ((1.00, 1.01, 0.99), (1.10, 1.11, 1.12), False, False),
        ((1.00, 1.01, 0.99), (2.0, 5.0, 9.0), False, False),  # its own spread is no excuse
        ((1.00, 1.00, 1.00), (1.03, 1.03, 1.03), False, False),  # of one seed
        ((1.00,), (1.03,), False, True),
        ((1.00, 1.20, 0.80), (1.03,), True, False),  # what one run is worth, the others show
        ((-2.0, -1.9, -2.1), (-1.8, -1.9, -1.7), False, False),  # have no ratios
    ],
)
def test_a_loss_disqualifies_by_its_interval(
    losses: tuple[float, ...], others: tuple[float, ...], qualifies: bool, once: bool
):
    rows = []
    for row, speed, values in ((0, 1000.0, losses), (3, 2000.0, others)):
        runs = rounds(row, *(speed + n for n in range(len(values))))
        rows += [replace(run, figures={**run.figures, "val/loss": x}) for run, x in zip(runs, values, strict=True)]
    r = of(sweep(rows, axes=REPEATED))
    reasons = {name: reason for name, reason in r.why_not.items() if reason.code == "loss_too_high"}
    assert reasons.keys() == (set() if qualifies else {"sharding=root precision=bf16"})
    assert [reason.values["once"] for reason in reasons.values()] == ([] if qualifies else [once])


@pytest.mark.parametrize("narrow", [(), (0,), (1,), (0, 1)])
def test_losses_are_not_ranked_within_their_rounding(narrow: tuple[int, ...]):
    """4.03 is 0.75 % above 4: more than the tolerance, and less than a step of bfloat16."""
    rows = [
        trial(0, ("ddp", "fp32", "finished", 100, 1000.0, 4.0), **(ROUNDED if 0 in narrow else {})),
        trial(1, ("root", "fp32", "finished", 100, 1500.0, 4.03), **(ROUNDED if 1 in narrow else {})),
    ]
    learned = of(sweep(rows, loss_tolerance=0.001))
    assert learned.setting is not None and learned.setting.values["sharding"] == ("root" if narrow else "ddp")
    assert codes(learned.why_not) == ([] if narrow else ["loss_too_high"])
    assert [c.rounded for c in learned.others] == [bool(narrow)]
    front = of(sweep(rows, objectives=[("val/loss", "min"), (SPEED, "max")])).front
    assert [s.values["sharding"] for s in front] == (["root"] if narrow else ["ddp", "root"]), "nor on a front"
    axis = "training.grad_accum_steps"
    tied = sweep(one_axis(axis, ("1", 100, 1500.0, 4.0), ("2", 100, 1520.0, 4.03), **ROUNDED), axes=[axis])
    assert chosen(tied) == {axis: "2"} and of(tied).tie_break == "speed", "nor in a tie"


@pytest.mark.parametrize(
    ("loss", "classes", "task", "learned"),
    [(2.29, 10, "classification", False), (2.2, 10, "classification", True), (5.0, 10, "custom", True)],
)
def test_learning_is_judged_against_guessing(loss: float, classes: int, task: str, learned: bool):
    """For our image classifiers alone: who guesses among ten classes has a loss of ln 10, which is 2.303."""
    config = SweepConfig()
    config.model.arguments["num_classes"], config.task.name = classes, task
    one = replace(trial(0, ("", "", "finished", 100, 1000.0, loss)), config=config)
    assert ("nothing_learned" in codes(of(sweep([one])).notes)) is not learned


def test_trials_beside_other_processes_are_named():
    rows = [on_cpu(0, 0, 0.05, 1000.0), on_cpu(1, 2, 0.3, 900.0), on_cpu(2, 3, 0.44, 3000.0)]
    told = answer(sweep(rows))
    assert chosen(sweep(rows)) == {"sharding": "root", "precision": "bf16"}
    assert codes(told.recommendation.caveats) == ["others_cpu"], "before the figures that it is about"
    assert "trials 1, 2:" in told.details[0] and "the fastest of 3 settings" in told.details[1]
    assert of(sweep([on_cpu(0, 0, 0.05, 1000.0), on_cpu(1, 2, 0.25, 900.0)])).caveats == []
    on_gpus = [trial(n, ROWS[n], **{OTHERS_CPU: 0.9}) for n in (0, 2)]
    assert of(sweep(on_gpus)).caveats == []


def test_objectives_decide_in_their_order():
    rows = [trial(i, row) for i, row in enumerate(ROWS)]
    assert chosen(sweep(rows, objectives=[(MEMORY, "min")])) == {"sharding": "per_block", "precision": "bf16"}
    assert chosen(sweep(rows, objectives=[("val/loss", "min")])) == {"sharding": "root", "precision": "fp32"}, "60 MiB"
    both = of(sweep(rows, objectives=[("val/loss", "min"), (SPEED, "max")]))
    # by hand: the least loss at 1000 samples/s, then 1.010 at 1980; the rest are beaten
    assert [s.name for s in both.front] == ["sharding=ddp precision=fp32", "sharding=root precision=bf16"]
    for order, expected in ((1, ("ddp", "fp32")), (-1, ("root", "bf16"))):
        objectives = [("val/loss", "min"), (SPEED, "max")][::order]
        best = chosen(sweep(rows, objectives=objectives, loss_tolerance=0.0, speed_tolerance=0.0))
        assert tuple(best.values()) == expected, objectives
    assert of(sweep([trial(0)], objectives=[("val/absent", "min")])).setting is None


def test_what_has_no_loss_or_no_room_does_not_qualify():
    figures = {"forecast/needed_bytes": 90.0 * MIB, "forecast/capacity_bytes": 80.0 * MIB}
    no_loss = trial(2, ("root", "fp32", "finished", 10, 2000.0, math.nan))
    r = of(sweep([trial(0), no_loss, trial(3, ROWS[3], **figures)]))
    assert r.setting is not None and r.setting.values["sharding"] == "ddp"
    assert codes(r.why_not) == ["too_large", "no_figure"]


def test_repeats_make_one_setting_and_one_that_failed_spoils_it():
    rows = [*rounds(3, 2000.0, 1500.0, 1900.0), *rounds(5, 1200.0, 1000.0, 1600.0)]
    r = of(sweep(rows, axes=REPEATED))
    (other,) = r.others
    assert r.setting is not None and r.setting.values["sharding"] == "root" and other.tied
    in_rounds = of(sweep([*rounds(3, 1000.0, 900.0, 800.0), *rounds(5, 1050.0, 945.0, 840.0)], axes=REPEATED))
    assert in_rounds.why.code == "fastest", "5 % in each round, though rounds differ by more"
    apart = of(sweep([*rows[:3], *rounds(5, 1200.0, 1000.0, 1400.0)], axes=REPEATED))
    assert not apart.others[0].tied and apart.why.code == "fastest"
    for status, fits in (("waiting", True), ("interrupted", True), ("stopped", True), ("oom", False)):
        more = replace(rows[1], number=60, status=TrialStatus(status), figures={}, epochs=[])
        assert (chosen(sweep([*rows, more], axes=REPEATED))["sharding"] == "root") is fits, status
    offload = one_axis("offload", ("cpu", 100, 300.0, 1.0), ("none", 100, 200.0, 1.0))
    on_a_cpu = of(sweep([replace(row, facts={"device": "cpu"}) for row in offload], axes=["offload"]))
    assert on_a_cpu.setting is not None and on_a_cpu.setting.values == {} and "idle" in codes(on_a_cpu.notes)


@pytest.mark.parametrize(
    ("faster", "other", "figures", "above"),
    [
        (1.8e-6, 0.0, ROUNDED, None),  # of a model that knows everything: bfloat16 has an exact 0
        (1.1e-7, 0.0, {}, None),
        (0.05, 0.06, ROUNDED, 0.2),  # what the rounding does not explain, is none
        (-2.0, -1.0, ROUNDED, 0.5),
        (1e-10, 2e-10, {"train/first_loss": 1e-9}, 1.0),  # mean squares of small targets, which start at 1e-9
    ],
)
def test_losses_next_to_zero_differ_by_the_first_ones_rounding(
    faster: float, other: float, figures: dict[str, float], above: float | None
):
    """The val/loss of two settings; above: the share by which the other is too high."""
    rows = one_axis("precision", ("fp32", 100, 1000.0, faster), ("bf16", 100, 900.0, other), **figures)
    (compared,) = of(sweep(rows, axes=["precision"])).others
    assert (compared.rounded, compared.loss) == (above is None, pytest.approx(above or 0.0))
    assert codes([reason] if (reason := compared.why_not) else []) == ([] if above is None else ["loss_too_high"])


def test_the_answer_as_data_is_of_the_setting_not_of_one_repeat():
    rows = rounds(3, 1000.0, 1000.0, 8000.0)
    for row, loss in zip(rows, (1.0, 1.02, 1.01), strict=True):
        row.figures["val/loss"] = loss
    made = sweep(rows, axes=REPEATED, command="python -m fsdp_lab '--config-dir=my options' -m sharding=root,ddp")
    data = answer(made).as_data
    assert answer(made).command.startswith("python -m fsdp_lab '--config-dir=my options'")
    assert data["setting"] == {"sharding": "root", "precision": "bf16"} and data["trial"] == 30
    # the median of losses; of speeds the mean of logarithms, the third root of 8e9
    assert data["figures"]["val/loss"] == 1.01 and data["figures"][SPEED] == pytest.approx(2000)
    none = answer(sweep([trial(0, ("ddp", "fp32", "oom", 0, 0, 0))]))
    assert none.as_data == {"sentence": none.sentence, "finding": ""}


def test_trials_that_ran_side_by_side_are_counted_once_in_a_note():
    """A second is what each clock of two nodes may be off."""
    spans = [(0.0, 10.0), (8.5, 20.0), (12.0, 20.0), (19.5, 30.0), None, (12.0, 13.0)]
    settings = [{"sharding": str(n), "precision": "fp32"} for n in range(len(spans))]
    rows = [replace(trial(n), span=span, setting=settings[n]) for n, span in enumerate(spans)]
    assert list(sweep(rows).frame()["beside"]) == [0, 1, 1, 0, 0, 0]
    (note,) = [note for note in of(sweep(rows)).caveats if note.code == "side_by_side"]
    assert note.values["count"] == 2


def test_the_ratio_by_median_steps_is_shown_where_it_differs():
    """One run each, of which a busy spell has slowed the second: 1.35 times by the means of all steps."""

    def by_median(first: float, second: float, axis: str = "sharding") -> Any:
        rows = one_axis(axis, ("a", 100, 1350.0, 1.0), ("b", 100, 1000.0, 1.0))
        for row, median_step in zip(rows, (first, second), strict=True):
            row.figures[MEDIAN_STEP] = median_step
        why = of(sweep(rows, axes=[axis])).why
        assert why.code == "fastest" and why.values["ratio"].value == pytest.approx(1.35)
        return why.values["by_median"]

    assert by_median(0.010, 0.0114).value == pytest.approx(1.14)
    assert by_median(0.010, 0.0134) is None, "about the same"
    assert by_median(0.010, 0.0114, "training.global_batch_size") is None, "of other steps"


@pytest.mark.parametrize(
    ("speeds", "steps", "rates", "taken"),
    [
        ((1150.0, 1000.0), (0.0122, 0.010), ("1", "1"), "fp32"),  # 1.15 times by the mean, 0.82 by the median
        ((1000.0, 1150.0), (0.010, 0.0122), ("1", "1"), "fp32"),
        ((1150.0, 1000.0), (0.010, 0.0101), ("1", "1"), "bf16"),  # one order, by whatever ratios
        ((1050.0, 1000.0), (0.010, 0.0100), ("1", "1"), "bf16"),
        ((1150.0, 1000.0), (0.0122, 0.010), ("1", "2"), "bf16"),  # two runs of each show how sure that is
    ],
)
def test_no_order_is_claimed_that_the_median_steps_contradict(
    speeds: tuple[float, float], steps: tuple[float, float], rates: tuple[str, str], taken: str
):
    """The figures of bf16, then of fp32, which is simpler. A second rate has the same ones."""
    figures = [("bf16", speeds[0], steps[0]), ("fp32", speeds[1], steps[1])]
    rows = [
        replace(one, setting={"precision": precision, "optimizer.lr": rate})
        for n, (precision, speed, step) in enumerate(figures)
        for rate in sorted(set(rates))
        for one in [trial(2 * n + int(rate), ("", "", "finished", 100, speed, 1.0), **{MEDIAN_STEP: step})]
    ]
    r = of(sweep(rows, axes=["precision", "optimizer.lr"]))
    assert r.setting is not None and r.setting.values["precision"] == taken
    assert (r.why.code == "tied", len(r.unordered)) == ((True, 1) if taken == "fp32" else (False, 0))


@pytest.mark.parametrize(
    ("axis", "speeds", "shares", "is_claimed"),
    [
        ("precision", (100.0, 2000.0), (0.96, 0.10), False),  # which setting ran first, waited
        ("precision", (2000.0, 100.0), (0.10, 0.96), False),
        ("precision", (1000.0, 2000.0), (0.30, 0.60), True),  # of the same wait the faster one has more
        ("precision", (1000.0, 2000.0), (0.30, 0.10), True),  # 0.25 of 0.5 ms
        ("data.loader_workers", (100.0, 2000.0), (0.96, 0.10), True),  # which is what is compared
        ("precision", (100.0, 2000.0), (math.nan, 0.10), True),
    ],
)
def test_speeds_are_not_compared_that_waiting_for_data_explains(
    axis: str, speeds: tuple[float, float], shares: tuple[float, float], is_claimed: bool
):
    rows = one_axis(axis, *((value, 100, x, 1.0) for value, x in zip(("fp32", "bf16"), speeds, strict=True)))
    for row, share in zip(rows, shares, strict=True):
        row.figures["perf/data_wait_share"] = share
    told = answer(sweep(rows, axes=[axis]))
    r = told.recommendation
    assert r.why.code == ("fastest" if is_claimed else "tied")
    assert any("10 % of" in line and "96 % of" in line for line in told.details) is not is_claimed
    assert is_claimed or (r.setting is not None and r.setting.values == {axis: "fp32"}), "the simplest"


@pytest.mark.parametrize(
    ("steps", "seconds", "is_said"),
    [(3.0, 0.03, True), (9.0, 0.9, True), (10.0, 0.1, False), (3.0, 30.0, False), (math.nan, math.nan, False)],
)
def test_a_few_steps_are_too_few_for_an_order(steps: float, seconds: float, is_said: bool):
    timed = {"perf/timed_steps": steps, "perf/timed_s": seconds}
    rows = one_axis("sharding", ("ddp", 100, 3970.0, 1.0), ("root", 100, 1000.0, 1.0), **timed)
    details = answer(sweep(rows, axes=["sharding"])).details
    assert ("too few for an order of speeds" in details[0]) is is_said
    assert "3.97× the speed" in details[-1]
    assert details[-1].startswith("In these it was the fastest of 2" if is_said else "It is the fastest of 2")
    again = [replace(one, figures={**one.figures, **timed}) for row in (0, 3) for one in rounds(row, 1.0, 2.0, 3.0)]
    assert of(sweep(again, axes=REPEATED)).caveats == [], "repeats show how sure that is"


def test_settings_that_do_not_qualify_are_named_with_their_reasons():
    failed = replace(
        trial(2, ("root", "fp32", "failed", 0, 0, 0)),
        reason=Reason.of(Code.error, rank=0, error="ValueError", text="no such thing: " + "x" * 200),
    )
    rows = [trial(0), trial(1, ("ddp", "bf16", "oom", 0, 0, 0)), failed]
    (line, *_) = answer(sweep(rows)).details
    assert line.startswith("No other setting qualifies: `precision=bf16` ran out of memory; `sharding=root` failed (")
    assert "ValueError: no such thing" in line and len(line) < 200
    many = [trial(n, (str(n), "fp32", "oom", 0, 0, 0)) for n in range(1, 6)]
    (line, *_) = answer(sweep([trial(0), *many])).details
    assert line == "No other setting qualifies: ran out of memory (5 of 6)."


def test_an_interval_names_the_trials_that_it_is_from():
    rows = [replace(row, setting={**row.setting, "optimizer.lr": str(row.number)}) for row in rounds(3, 10.0, 11.0)]
    rows += [replace(trial(2), setting={"sharding": "ddp", "precision": "fp32", "optimizer.lr": "1"})]
    (line,) = [x for x in answer(sweep(rows, axes=["sharding", "precision", "optimizer.lr"])).details if "95 %" in x]
    assert "from trials 30, 31, whose optimizer.lr cannot change it" in line
    (line,) = [x for x in answer(sweep(rounds(3, 10.0, 11.0), axes=REPEATED)).details if "95 %" in x]
    assert "from repeats: " in line
