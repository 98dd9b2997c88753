"""The recommended setting, against rows of which it can be said by eye."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import shlex

import pytest

from fsdp_lab.config import may_change_speed
from fsdp_lab.metrics import MEMORY, OTHERS_CPU, PREDICTED_SPEED, SPEED
from fsdp_lab.report.answer import answer, plain_text
from fsdp_lab.report.choice import candidates
from fsdp_lab.report.data import TrialRow
from fsdp_lab.report.effects import Effect, effects
from fsdp_lab.report.markdown import to_markdown
from fsdp_lab.report.page import to_html
from fsdp_lab.report.predictions import predictions_sentence
from fsdp_lab.status import TrialStatus
from tests.report.sweeps import ROWS, sweep, trial


def has(text: str, *parts: str) -> None:
    """Check the facts that a sentence states, not its words."""
    assert [part for part in parts if part not in text] == [], text


def test_the_fastest_that_fits_and_learned_is_taken_and_ties_go_to_the_smaller():
    recommendation = answer(sweep())
    assert recommendation.setting is not None and recommendation.setting.values == {
        "sharding": "per_block",
        "precision": "bf16",
    }
    # 1950 / 1000, 40 / 100, and 1.012 against the baseline's 1.000
    assert "1.95× the speed of `sharding=ddp precision=fp32` at 40 % of its peak memory" in recommendation.sentence
    assert "val/loss +1.2 %" in recommendation.sentence
    tie = "Tied in speed with `sharding=root precision=bf16`; the smallest peak memory decided"
    assert recommendation.sentence.endswith(f"{tie} among those within 3 % of the fastest.")
    assert shlex.split(recommendation.command) == [
        "python", "-m", "fsdp_lab", "sharding=per_block", "precision=bf16", "training.epochs=2",
    ]  # fmt: skip
    assert recommendation.why_not["sharding=per_block precision=fp32"] == "ran out of memory"
    assert (
        recommendation.why_not["sharding=ddp precision=bf16"]
        == "learned less: validation loss 1.100 is 10.0 % above the best"
    )
    assert len(recommendation.why_not) == 2
    # by hand: 40 MiB/1950, 50/1980; 60/900, 80/1500, 100/1000 are beaten by both
    assert recommendation.front == ["sharding=root precision=bf16", "sharding=per_block precision=bf16"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"speed_tolerance": 0.0}, {"sharding": "root", "precision": "bf16"}),  # no ties: 1980 is the fastest
        ({"loss_tolerance": 0.2, "speed_tolerance": 0.0}, {"sharding": "root", "precision": "bf16"}),
        (
            {"loss_tolerance": 0.0},
            {"sharding": "ddp", "precision": "fp32"},
        ),  # 1000 against 900: both have the best loss
        ({"loss_tolerance": 0.0, "speed_tolerance": 0.2}, {"sharding": "root", "precision": "fp32"}),
    ],
)
def test_the_tolerances_decide(changed: dict[str, float], expected: dict[str, str]):
    recommendation = answer(sweep(**changed))
    assert recommendation.setting is not None and recommendation.setting.values == expected


def test_of_two_as_fast_and_as_large_the_plainer_is_taken_though_it_is_a_little_slower():
    rows = [
        TrialRow(0, {"offload": "none"}, TrialStatus.finished, trial(0).figures),
        TrialRow(1, {"offload": "cpu"}, TrialStatus.finished),
    ]
    rows[1] = dataclasses.replace(rows[1], figures={**trial(0).figures, "perf/samples_per_s": 1010.0})
    recommendation = answer(sweep(rows, axes=["offload"]))
    assert recommendation.setting is not None and recommendation.setting.name == "offload=none"


def test_on_a_cpu_offload_is_another_name_and_its_trials_are_repeats():
    rows = [
        dataclasses.replace(
            trial(n, **{"perf/samples_per_s": speed}),
            setting={"offload": offload, "sharding": "root"},
            overrides=[f"offload={offload}"],
            facts={"device": device},
        )
        for device in ("cpu", "NVIDIA H200")
        for n, (offload, speed) in enumerate((("cpu", 300.0), ("none", 200.0)))
    ]  # fmt: skip
    recommendation = answer(sweep(rows[:2], axes=["offload", "sharding"]))
    assert recommendation.setting is not None and recommendation.setting.values == {"sharding": "root"}
    # the root of 200 * 300; their logarithms differ by 0.40547, and t of one degree of freedom is 12.7062
    factor = math.exp(12.7062 * 0.40547 / 2)
    assert [round(244.949 / factor, 1), round(244.949 * factor, -1)] == [18.6, 3220]
    assert "245 samples/s (18.6 to 3,220)" in recommendation.sentence
    assert recommendation.command.endswith("offload=none")
    assert recommendation.rules[-1] == "On a CPU, offload has no effect: its values count as repeats of a setting."
    on_gpu = answer(sweep(rows[2:], axes=["offload", "sharding"]))
    assert on_gpu.setting is not None and on_gpu.setting.values["offload"] == "cpu"


def test_a_sweep_that_is_not_over_says_so_first():
    rows = [*sweep().trials, TrialRow(6, {"sharding": "ddp", "precision": "fp16"}, TrialStatus.waiting)]
    assert answer(sweep(rows)).sentence.startswith("So far, with 6 of 7 results: `sharding=per_block precision=bf16`: ")
    assert answer(sweep([rows[0], rows[6]])).sentence.endswith("no other has a result yet.")


def test_plainness_is_worth_no_more_speed_than_the_tolerance():
    rows = [
        TrialRow(n, {"sharding": sharding}, TrialStatus.finished, {**trial(0).figures, "perf/samples_per_s": speed})
        for n, (sharding, speed) in enumerate(
            (("root", 2000.0), ("root", 1500.0), ("root", 1900.0), ("ddp", 1200.0), ("ddp", 1000.0), ("ddp", 1600.0))
        )
    ]
    recommendation = answer(sweep(rows, axes=["sharding"]))  # their repeats overlap, and their peaks are equal
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=root"


def test_a_setting_above_the_capacity_of_a_device_does_not_fit_though_it_finished():
    rows = list(sweep().trials)
    for number in (3, 5):  # a CPU does not run out where a GPU would
        rows[number] = trial(
            number, ROWS[number], **{"forecast/needed_bytes": 90.0 * 2**20, "forecast/capacity_bytes": 80.0 * 2**20}
        )
    recommendation = answer(sweep(rows))
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=ddp precision=fp32"
    assert (
        recommendation.why_not["sharding=root precision=bf16"] == "needs 90 MiB of 80 MiB per device, by its forecast"
    )


def test_when_nothing_qualifies_it_says_that_and_why():
    rows = [trial(0, ("ddp", "fp32", "oom", 0, 0, 0)), trial(1, ("root", "fp32", "diverged", 0, 0, 0))]
    recommendation = answer(sweep(rows))
    assert recommendation.setting is None and recommendation.command == ""
    assert recommendation.sentence == "No setting qualifies: of 2, 1 ran out of memory, 1 diverged."
    nan = trial(0, ("ddp", "fp32", "finished", 10, 100.0, math.nan))
    assert "has no finite val/loss" in answer(sweep([nan])).why_not["sharding=ddp precision=fp32"]
    two = [nan, trial(1, ("root", "fp32", "finished", 10, 100.0, math.nan))]
    assert answer(sweep(two)).sentence == "No setting qualifies: of 2, 2 have no finite val/loss."
    assert "no trial was started" in answer(sweep([])).sentence


def test_repeats_make_one_setting_of_their_medians_and_one_that_failed_spoils_it():
    def repeated(row: int, repeat: int, speed: float) -> TrialRow:
        one = trial(10 * row + repeat, ROWS[row], **{"perf/samples_per_s": speed})
        setting = {**one.setting, "repeat": str(repeat)}
        return dataclasses.replace(one, setting=setting, overrides=[*one.overrides, f"repeat={repeat}"])

    trials = [repeated(0, r, s) for r, s in enumerate((1000.0, 1020.0, 400.0))]
    trials += [repeated(2, r, s) for r, s in enumerate((1010.0, 600.0, 5000.0))]
    axes = ["sharding", "precision", "repeat"]
    recommendation = answer(sweep(trials, axes=axes, speed_tolerance=0.0))  # type: ignore[arg-type]
    assert [s.median("perf/samples_per_s") for s in sweep(trials, axes=axes).settings] == [1000.0, 1010.0]  # type: ignore[arg-type]
    assert recommendation.setting is not None and recommendation.setting.values == {
        "sharding": "root",
        "precision": "fp32",
    }
    assert "repeat" not in recommendation.command
    trials.append(dataclasses.replace(trial(99, (*ROWS[2][:2], "oom", 0, 0, 0)), setting=trials[-1].setting))  # type: ignore[attr-defined]
    recommendation = answer(sweep(trials, axes=axes))  # type: ignore[arg-type]
    assert recommendation.why_not["sharding=root precision=fp32"] == "ran out of memory in 1 of 4 trials"


def test_an_axis_alone_compares_like_with_like():
    # per_block fp32 has no result, so for sharding only the bf16 column is whole; for precision ddp and root are.
    assert effects(sweep(), "sharding", "perf/samples_per_s") == [
        Effect("ddp", 1500.0, 0.0, 1), Effect("root", 1980.0, 0.0, 1), Effect("per_block", 1950.0, 0.0, 1),
    ]  # fmt: skip
    by_precision = effects(sweep(), "precision", "perf/samples_per_s")
    assert [(e.value, e.mean, e.count) for e in by_precision] == [("fp32", 950.0, 2), ("bf16", 1740.0, 2)]
    assert by_precision[0].spread == pytest.approx(50 * math.sqrt(2))  # of 900 and 1000
    # with no whole combination, all count
    some = [trial(0, ROWS[0]), trial(1, ROWS[3])]
    assert [(e.value, e.mean) for e in effects(sweep(some), "sharding", "perf/samples_per_s")] == [
        ("ddp", 1000.0), ("root", 1980.0),
    ]  # fmt: skip


def test_repeats_that_overlap_tie_and_the_sentence_says_their_spread():
    def repeated(row: int, speeds: tuple[float, ...]) -> list[TrialRow]:
        ones = [trial(10 * row + i, ROWS[row], **{"perf/samples_per_s": s}) for i, s in enumerate(speeds)]
        return [dataclasses.replace(one, setting={**one.setting, "repeat": str(i)}) for i, one in enumerate(ones)]

    axes = ["sharding", "precision", "repeat"]
    large, small = (2000.0, 1500.0, 1900.0), (1200.0, 1000.0, 1600.0)  # 1600 is above 1500
    recommendation = answer(sweep([*repeated(3, large), *repeated(5, small)], axes=axes))
    assert recommendation.setting is not None and recommendation.setting.values["sharding"] == "root"
    # logarithms of the ratios by round: 0.5108, 0.4055, 0.1719; their mean 0.3627, its error 0.1001, t = 4.303
    assert recommendation.lines == [
        "`sharding=per_block`: 0.70× (0.45 to 1.07) the speed (tied), 0.8× the memory, val/loss +0.20 %"
    ]
    assert recommendation.sentence.endswith(
        "Tied in speed with `sharding=per_block precision=bf16`; this one had the highest measured speed."
    )
    apart = answer(sweep([*repeated(3, large), *repeated(5, (1200.0, 1000.0, 1400.0))], axes=axes))
    assert apart.setting is not None and apart.setting.values["sharding"] == "root"
    assert "(tied)" not in apart.lines[0] and "Tied" not in apart.sentence
    close = answer(sweep([*repeated(3, large), *repeated(5, (1990.0, 1480.0, 1880.0))], axes=axes))
    assert close.setting is not None and close.setting.values["sharding"] == "per_block", "1 % is within the tolerance"
    assert close.sentence.endswith("the smallest peak memory decided among those within 3 % of the fastest.")


def test_runs_too_short_to_be_timed_are_compared_by_memory_and_state_what_is_missing():
    rows = [trial(0, ROWS[0]), trial(1, ROWS[2])]
    for row in rows:
        del row.figures["perf/samples_per_s"]
    recommendation = answer(sweep(rows))
    assert recommendation.setting is not None and recommendation.setting.values["sharding"] == "root", (
        "60 MiB against 100"
    )
    assert recommendation.why_not == {}
    assert "60.00 MiB at the peak, the least of 2 settings" in recommendation.sentence
    has(recommendation.sentence, "No step was timed", "first 5 steps", "run 6 or more")


def test_one_run_too_short_to_be_timed_does_not_qualify_beside_one_that_was():
    short = trial(1, ROWS[2])
    del short.figures["perf/samples_per_s"]
    recommendation = answer(sweep([trial(0, ROWS[0]), short]))
    assert recommendation.setting is not None and recommendation.setting.values["sharding"] == "ddp"
    assert "ended before a step was timed" in recommendation.why_not["sharding=root precision=fp32"]


def test_the_command_has_the_folder_of_the_users_options():
    recommendation = answer(
        dataclasses.replace(sweep(), command="python -m fsdp_lab -m '--config-dir=conf of mine' model=mine")
    )
    assert shlex.split(recommendation.command)[3] == "--config-dir=conf of mine"
    cut = answer(dataclasses.replace(sweep(), command="python -m fsdp_lab -m '--config-dir=conf of mi"))
    assert "--config-dir" not in cut.command and cut.command


@pytest.mark.parametrize(
    ("seeds", "kept"),
    [(["7"], True), (["7", "7"], True), (["0", "1"], False)],  # given to all; given to all; repeats
)
def test_the_command_keeps_a_seed_that_all_trials_have(seeds: list[str], kept: bool):
    rows = [
        dataclasses.replace(trial(n), overrides=["sharding=ddp", f"training.seed={seed}", f"repeat={n}"])
        for n, seed in enumerate(seeds)
    ]
    axes = ["repeat"] if kept else ["repeat", "training.seed"]
    command = answer(sweep(rows, axes=axes)).command
    assert ("training.seed" in command) is kept
    assert "repeat" not in command and "sharding=ddp" in command


def test_every_other_value_is_reported_against_the_recommended_one():
    recommendation = answer(sweep())  # per_block bf16: 40 MiB, 1950 samples/s, loss 1.012
    assert recommendation.lines == [
        # 1000 / 1950, 100 / 40, 1 / 1.012 - 1
        "`sharding=ddp precision=fp32`: 0.51× the speed, 2.5× the memory, val/loss -1.2 %",
        "`sharding=ddp`: 0.77× the speed, 2× the memory, val/loss +8.7 %, above the tolerance of 2 %",
        "`sharding=root precision=fp32`: 0.46× the speed, 1.5× the memory, val/loss -1.2 %",
        "`sharding=root`: 1.02× the speed (tied), 1.25× the memory, val/loss -0.20 %",
        "`sharding=per_block precision=fp32`: ran out of memory",  # fp32 alone would say so of those that ran
    ]
    assert recommendation.notes == [
        "Each setting ran once, so the variation between runs of a setting is unknown; repeat=auto measures it."
    ]


def test_of_many_settings_only_those_one_value_apart_are_reported():
    rows = [
        TrialRow(n, {"sharding": s, "precision": p}, TrialStatus.finished, {**trial(0).figures, SPEED: speed})
        for n, (s, p, speed) in enumerate(
            (s, p, 100.0 + 9 * i + j) for i, s in enumerate("abc") for j, p in enumerate("xyz")
        )
    ]
    recommendation = answer(sweep(rows, speed_tolerance=0.0))
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=c precision=z"
    assert [line.partition(":")[0] for line in recommendation.lines] == [
        "`sharding=a`", "`sharding=b`", "`precision=x`", "`precision=y`",
    ]  # fmt: skip


@pytest.mark.parametrize(("mib", "chosen"), [(99.5, "ddp"), (98.0, "root")])
def test_of_two_as_fast_one_that_needs_hardly_less_memory_is_not_taken_for_that(mib: float, chosen: str):
    rows = [("ddp", "fp32", "finished", 100.0, 1000.0, 1.0), ("root", "fp32", "finished", mib, 1000.0, 1.0)]
    recommendation = answer(sweep([trial(number, row) for number, row in enumerate(rows)]))
    assert recommendation.setting is not None and recommendation.setting.values["sharding"] == chosen


def trial_without(one: TrialRow, key: str) -> TrialRow:
    return dataclasses.replace(one, figures={name: value for name, value in one.figures.items() if name != key})


def on_cpu(number: int, row: int, others: float, speed: float) -> TrialRow:
    one = trial(number, ROWS[row], **{SPEED: speed, OTHERS_CPU: others})
    return dataclasses.replace(one, facts={"device": "cpu"})


def test_a_speed_measured_while_others_computed_decides_nothing():
    # root bf16 looks three times as fast, but its machine was not its own
    rows = [on_cpu(0, 0, 0.05, 1000.0), on_cpu(1, 2, 0.05, 900.0), on_cpu(2, 3, 0.44, 3000.0)]
    recommendation = answer(sweep(rows))
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=ddp precision=fp32"
    why_not = "its speed was measured while other processes used 44 % of the cores"
    assert recommendation.why_not == {"sharding=root precision=bf16": why_not}
    has(recommendation.notes[0], "speed of trial 2 does not count", "44 %", "run it again")
    assert recommendation.head == "Recommended: "
    allowed = answer(sweep(rows, others_cpu=0.5))
    has(allowed.notes[0], "report.others_cpu=0.5 counts the speed of trial 2", "44 %")
    assert allowed.setting is not None and allowed.setting.name == "sharding=root precision=bf16"
    on_gpu = answer(sweep([dataclasses.replace(row, facts={"device": "NVIDIA H200"}) for row in rows]))
    assert on_gpu.setting is not None and on_gpu.setting.name == "sharding=root precision=bf16"


def test_where_every_run_shared_its_machine_memory_decides_and_it_says_so():
    recommendation = answer(sweep([on_cpu(0, 0, 0.4, 1000.0), on_cpu(1, 2, 0.3, 900.0)]))
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=root precision=fp32", (
        "60 MiB against 100"
    )
    has(
        recommendation.sentence,
        "No setting is recommended", "40 %", "report.others_cpu=0.25",
        "By memory alone: `sharding=root precision=fp32`: 60.00 MiB", "least of 2 settings", "val/loss 1.000",
    )  # fmt: skip
    assert recommendation.by_memory and recommendation.head == ""
    (note,) = recommendation.notes
    has(note, "`sharding=ddp` had 1.11× the speed of `sharding=root`", "report sweep=last report.others_cpu=1")


@pytest.mark.parametrize(
    ("memory", "which"),
    [
        ((100.0, 60.0, 90.0), "60.00 MiB at the peak, the least of 3 settings that fit and learned, val/loss"),
        (
            (100.0, 60.0, 60.5),
            "60.00 MiB at the peak, the least of 3 settings that fit and learned, with 1 other within",
        ),
        ((60.5, 60.0, 90.0), "60.50 MiB at the peak, within 1 % of the least of 3 settings that fit and learned, val/"),
    ],
)  # the third: ddp is the simplest of those within 1 %
def test_settings_that_need_nearly_the_least_memory_are_counted(memory: tuple[float, ...], which: str):
    rows = [on_cpu(i, row, 0.4, 1000.0) for i, row in enumerate((0, 2, 3))]
    for row, mib in zip(rows, memory, strict=True):
        row.figures["memory/peak_bytes"] = mib * 2**20
    recommendation = answer(sweep(rows))
    assert which in recommendation.sentence
    assert plain_text(recommendation)[-1].startswith("  to train it: python -m fsdp_lab sharding=")


def test_of_a_long_search_only_what_ran_to_its_end_has_a_line():
    rows = [trial(i, ("root", str(i), "finished" if i < 3 else "stopped", 60, 1000.0, 1.0 + i / 10)) for i in range(9)]
    searched = dataclasses.replace(sweep(rows), objectives=[("val/loss", "min")])
    assert [line.partition(":")[0] for line in answer(searched).lines] == ["`precision=1`", "`precision=2`"]
    few = dataclasses.replace(sweep(rows[:5]), objectives=[("val/loss", "min")])
    assert "`precision=4`: was stopped early" in answer(few).lines


def test_a_run_on_shared_cores_is_not_compared_with_one_that_had_them_alone():
    recommendation = answer(sweep([on_cpu(0, 0, 0.1, 1000.0), on_cpu(1, 2, 0.4, 300.0)]))
    assert recommendation.by_memory
    (note,) = [note for note in recommendation.notes if "report.others_cpu=1" in note]
    assert note.startswith(
        "`sharding=ddp` and `sharding=root` ran under different loads, so their speeds cannot be compared. To compare"
    )


def test_the_least_memory_of_those_measured_is_reported_beside_a_smaller_forecast_of_what_was_skipped():
    left_out = [("root", "bf16", "skipped", 0, 0.0, 0.0), ("per_block", "bf16", "skipped", 0, 0.0, 0.0)]
    skipped = [
        trial(2 + n, row, **{"forecast/peak_bytes": mib * 2**20, PREDICTED_SPEED: 9.0})
        for n, (row, mib) in enumerate(zip(left_out, (55, 45), strict=True))
    ]
    rows = [on_cpu(0, 0, 0.4, 1000.0), on_cpu(1, 2, 0.3, 900.0)]
    recommendation = answer(sweep([*rows, *skipped]))
    has(
        recommendation.sentence,
        "60.00 MiB at the peak, the least of 2 settings", "`sharding=per_block precision=bf16`", "45.00 MiB",
    )  # fmt: skip
    larger = answer(sweep([*rows, dataclasses.replace(skipped[0], figures={"forecast/peak_bytes": 65 * 2**20})]))
    assert "forecast" not in larger.sentence


def test_the_only_speed_that_counts_is_compared_with_nothing():
    rows = [on_cpu(0, 0, 0.1, 1000.0), on_cpu(1, 2, 0.8, 900.0), on_cpu(2, 3, 0.44, 3000.0)]
    recommendation = answer(sweep(rows))
    assert (
        recommendation.by_memory
        and recommendation.head == ""
        and not recommendation.intervals
        and not recommendation.front
    )
    has(
        recommendation.sentence,
        "No setting is recommended", "only the speed of `sharding=ddp precision=fp32` counts", "80 %",
        "By memory alone: `sharding=root precision=bf16`: 50.00 MiB", "least of 3 settings", "val/loss 1.010",
    )  # fmt: skip
    assert recommendation.lines[0] == "`sharding=ddp precision=fp32`: 2× the memory, val/loss -0.99 %"
    assert recommendation.notes[0].startswith("To compare speeds, run it again when the machine is free")
    resumed = answer(sweep(rows, resume="python -m fsdp_lab resume=out")).notes[0]
    assert "(`python -m fsdp_lab resume=out resume_failed=true`), or see: python" in resumed
    by_objective = answer(sweep(rows, objectives=[("val/loss", "min"), (SPEED, "max")])).sentence
    assert "perf/samples_per_s was not compared: only the speed of" in by_objective
    other_loss = [rows[0], trial(1, (*ROWS[2][:5], 1.1))]  # what did not learn is no candidate, whatever its speed
    shared = dataclasses.replace(on_cpu(1, 2, 0.8, 1.0), figures={**other_loss[1].figures, OTHERS_CPU: 0.8})
    assert answer(sweep([other_loss[0], shared])).head == "Recommended: "


def test_beside_speeds_that_do_not_count_the_fastest_is_one_of_those_that_do():
    rows = [on_cpu(0, 0, 0.1, 1000.0), on_cpu(1, 2, 0.1, 100.0), on_cpu(2, 3, 0.44, 3000.0)]
    assert "the fastest of 2 settings whose speed counts" in answer(sweep(rows)).sentence


def test_memory_that_was_not_measured_decides_nothing():
    rows = [on_cpu(0, 0, 0.4, 1000.0), on_cpu(1, 2, 0.3, 900.0)]
    recommendation = answer(sweep([trial_without(row, MEMORY) for row in rows]))
    assert "By memory" not in recommendation.sentence and "MiB" not in recommendation.sentence
    assert "the limit). No memory was measured either; by the loss alone: `sharding=" in recommendation.sentence


def test_of_two_objectives_a_speed_that_does_not_count_is_left_out_and_reported():
    rows = [on_cpu(0, 0, 0.4, 1000.0), on_cpu(1, 2, 0.55, 900.0)]
    objectives = [("val/loss", "min"), (SPEED, "max")]
    recommendation = answer(dataclasses.replace(sweep(rows), objectives=objectives))
    assert "nan" not in recommendation.sentence and "the lowest val/loss of 2 settings" in recommendation.sentence
    has(recommendation.sentence, "perf/samples_per_s was not compared", "55 %", "report.others_cpu=0.25")
    only = answer(dataclasses.replace(sweep(rows), objectives=objectives[1:]))
    assert only.sentence.startswith("No setting is recommended, because other processes")
    assert only.head == "" and only.basis == "by memory"


def test_axes_that_cannot_change_speed_pool_their_speeds_and_keep_their_losses():
    def one(number: int, sharding: str, init: str, speed: float, loss: float) -> TrialRow:
        figures = {**trial(0).figures, SPEED: speed, "val/loss": loss}
        return TrialRow(number, {"sharding": sharding, "init": init}, TrialStatus.finished, figures)

    # 644 and 470 were measured of two settings that differ in `init` alone
    rows = [
        one(0, "ddp", "meta", 644.0, 1.0), one(1, "ddp", "rank0", 470.0, 1.0),
        one(2, "root", "meta", 500.0, 1.1), one(3, "root", "rank0", 600.0, 1.0),
    ]  # fmt: skip
    pooled = sweep(rows, axes=["sharding", "init"])
    assert pooled.speed_axes == ["sharding"] and len(pooled.settings) == 4
    recommendation = answer(pooled)
    assert {round(interval.value, 3) for interval in recommendation.intervals.values()} == {
        round(math.sqrt(644 * 470), 3), round(math.sqrt(500 * 600), 3),
    }  # fmt: skip
    assert recommendation.why_not == {
        "sharding=root init=meta": "learned less: validation loss 1.100 is 10.0 % above the best"
    }
    assert "`init=rank0`: the same speed, the same memory, the same val/loss" in recommendation.lines
    assert "init cannot change speed or peak memory" in " ".join(recommendation.rules)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("init", False), ("optimizer.lr", False), ("training.seed", False), ("repeat", False), ("lr_schedule", False),
        ("lr_schedule.gamma", False), ("optimizer", True), ("sharding", True), ("training.global_batch_size", True),
        ("model.width", True), ("experiment", True),
    ],
)  # fmt: skip
def test_which_axes_may_change_speed(axis: str, expected: bool):
    assert may_change_speed(axis) is expected


ROUNDED = {"train/loss_eps": 2.0**-7}  # near 4, bfloat16 has 4, 4.03125, 4.0625 above, and 3.984375 below


@pytest.mark.parametrize("narrow", [(), (0,), (1,), (0, 1)])
def test_losses_are_not_ranked_within_their_rounding(narrow: tuple[int, ...]):
    """4.03 is 0.75 % above 4: more than the tolerance, and less than a step of bfloat16."""
    rows = [
        trial(0, ("ddp", "fp32", "finished", 100, 1000.0, 4.0), **(ROUNDED if 0 in narrow else {})),
        trial(1, ("root", "fp32", "finished", 100, 1500.0, 4.03), **(ROUNDED if 1 in narrow else {})),
    ]
    learned = answer(sweep(rows, loss_tolerance=0.001))
    objective = answer(sweep(rows, objectives=[("val/loss", "min")]))
    for recommendation in (learned, objective):
        assert recommendation.setting is not None
    expected = "sharding=root precision=fp32" if narrow else "sharding=ddp precision=fp32"
    assert learned.setting.name == expected
    assert ("learned less" in str(learned.why_not)) is (not narrow)
    assert any("to its rounding" in line for line in learned.lines) is bool(narrow)
    assert objective.setting.name == "sharding=ddp precision=fp32", "the plainer of two equals, or the lowest loss"
    notes = " ".join(learned.notes)
    assert ("Some losses are computed in bfloat16: differences up to 0.031 are rounding" in notes) is bool(narrow)
    far = [rows[0], trial(1, ("root", "fp32", "finished", 100, 1500.0, 4.1), **ROUNDED)]
    assert "learned less" in str(answer(sweep(far, loss_tolerance=0.001)).why_not)


def test_a_loss_within_rounding_breaks_no_tie():
    rows = [
        trial(0, ("root", "fp32", "finished", 100, 1500.0, 4.0), **ROUNDED),
        trial(1, ("root", "fp32", "finished", 100, 1520.0, 4.03), **ROUNDED),
    ]
    rows = [dataclasses.replace(row, setting={"training.grad_accum_steps": str(n + 1)}) for n, row in enumerate(rows)]
    assert answer(sweep(rows, axes=["training.grad_accum_steps"])).setting.name.endswith("=2"), "the speed decides"
    exact = [dataclasses.replace(row, figures={**row.figures, "train/loss_eps": math.nan}) for row in rows]
    assert answer(sweep(exact, axes=["training.grad_accum_steps"])).setting.name.endswith("=1"), "the loss decides"


def test_objectives_that_were_asked_for_decide():
    rows = list(sweep().trials)
    recommendation = answer(sweep(rows, objectives=[("val/loss", "min"), (SPEED, "max")], loss_tolerance=0.011))
    # within 1.1 % of the loss 1.000: ddp fp32, root fp32, root bf16 (1.010); of these root bf16 is the fastest
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=root precision=bf16"
    assert recommendation.axes == [("val/loss", "min"), (SPEED, "max")]
    # by hand: the least loss at 1000 samples/s, then 1.010 at 1980; 1.012 at 1950 and the rest are beaten
    assert recommendation.front == ["sharding=ddp precision=fp32", "sharding=root precision=bf16"]
    smallest = answer(sweep(rows, objectives=[("memory/peak_bytes", "min")]))
    assert smallest.setting is not None and smallest.setting.name == "sharding=per_block precision=bf16"
    assert "the lowest memory/peak_bytes of 4 settings" in smallest.sentence
    best = answer(sweep(rows, objectives=[("val/loss", "min")]))
    assert best.setting is not None and best.setting.name == "sharding=root precision=fp32", "1.000, and 60 MiB of 100"


def test_a_study_of_one_objective_does_not_take_a_worse_loss_for_its_memory():
    rows = [
        trial(0, ("ddp", "fp32", "finished", 100, 1000.0, 1.000)),
        trial(1, ("root", "fp32", "finished", 50, 1000.0, 1.001)),
    ]
    best = answer(sweep(rows, objectives=[("val/loss", "min")]))
    assert best.setting is not None and best.setting.name == "sharding=ddp precision=fp32"
    assert answer(sweep(rows)).setting is not best.setting


def rounds(row: int, *speeds: float) -> list[TrialRow]:
    ones = [trial(10 * row + i, ROWS[row], **{SPEED: s}) for i, s in enumerate(speeds)]
    return [dataclasses.replace(one, setting={**one.setting, "repeat": str(i)}) for i, one in enumerate(ones)]


def test_what_is_still_undecided_shrinks_as_runs_are_repeated():
    def names(*trials: list[TrialRow]) -> list[str]:
        data = sweep(list(itertools.chain(*trials)), axes=["sharding", "precision", "repeat"])
        return [setting.values["sharding"] for setting in candidates(data)]

    once = rounds(0, 1000.0), rounds(2, 900.0), rounds(3, 1980.0), rounds(5, 1950.0)
    assert names(*once) == ["per_block", "root", "root", "ddp"], "one run each settles nothing"
    # 900 and 1000 are far below; root's 1 % against per_block's 40 MiB cannot be worth the tolerance of 3 %
    thrice = (
        rounds(0, 1000.0, 1004.0, 1001.0), rounds(2, 900.0, 902.0, 897.0),
        rounds(3, 1980.0, 1985.0, 1975.0), rounds(5, 1950.0, 1958.0, 1946.0),
    )  # fmt: skip
    assert names(*thrice) == ["per_block"]
    # root is 10 % faster, but by noise of as much
    noisy = rounds(3, 2200.0, 1950.0, 2300.0), rounds(5, 1950.0, 2100.0, 1900.0)
    assert names(*noisy) == ["per_block", "root"]


def test_a_repeat_without_a_result_says_nothing_against_the_setting_that_finished():
    """As a report in the middle of a sweep sees it; and a scheduler that compares repeats with each other."""
    for status in ("waiting", "running", "interrupted", "stopped"):
        rows = [*rounds(0, 400.0), *rounds(3, 1500.0), *rounds(5, 1450.0)]
        more = [dataclasses.replace(rows[1], number=50, status=TrialStatus(status), figures={}, epochs=())]
        recommendation = answer(sweep([*rows, *more], axes=["sharding", "precision", "repeat"]))
        assert recommendation.setting is not None and recommendation.setting.values["sharding"] == "root", status
    failed = [dataclasses.replace(rows[1], number=50, status=TrialStatus.oom, figures={}, epochs=())]
    recommendation = answer(sweep([*rows, *failed], axes=["sharding", "precision", "repeat"]))
    assert recommendation.setting is not None and recommendation.setting.values["sharding"] == "per_block"


def test_an_objective_of_speed_says_what_noise_hides():
    trials = [*rounds(0, 1000.0, 1500.0, 900.0), *rounds(2, 1200.0, 1000.0, 1500.0)]
    recommendation = answer(sweep(trials, axes=["sharding", "precision", "repeat"], objectives=[(SPEED, "max")]))
    assert recommendation.setting is not None and recommendation.setting.values["sharding"] == "root"
    assert "(tied)" in recommendation.lines[0]
    assert recommendation.sentence.endswith(
        "Tied in speed with `sharding=ddp precision=fp32`; this one had the highest measured speed."
    )


def test_an_objective_sentence_claims_no_more_than_is_so():
    small = ("root", "fp32", "finished", 50, 985.0, 1.01)
    recommendation = answer(sweep([trial(0), trial(1, small)], objectives=[(SPEED, "max")]))
    assert recommendation.setting is not None and recommendation.setting.values["sharding"] == "root"
    assert "within the tolerance of the highest perf/samples_per_s of 2 settings" in recommendation.sentence
    both = answer(sweep([trial(0), trial(1, small)], objectives=[("val/loss", "min"), (SPEED, "max")]))
    assert both.front == ["sharding=ddp precision=fp32"] and "within the tolerances of the best" in both.sentence


def test_what_broke_a_tie_is_what_did():
    def one(number: int, lr: str, memory: float, loss: float) -> TrialRow:
        figures = {**trial(0).figures, "val/loss": loss, "memory/peak_bytes": memory}
        return TrialRow(number, {"optimizer.lr": lr}, TrialStatus.finished, figures)

    # the learning rate changes no memory: a byte more or less of its peak is no reason to take a worse loss
    recommendation = answer(sweep([one(0, "0.1", 99e6, 1.019), one(1, "0.001", 100e6, 1.0)], axes=["optimizer.lr"]))
    assert recommendation.setting is not None and recommendation.setting.values == {"optimizer.lr": "0.001"}
    assert "the lowest val/loss decided among those within 3 % of the fastest" in recommendation.sentence


def test_noise_ties_that_are_smaller_are_not_reported_as_larger():
    rows = [*rounds(0, 1000.0, 900.0, 1100.0), *rounds(2, 990.0, 905.0, 1080.0), *rounds(5, 800.0, 1000.0, 850.0)]
    recommendation = answer(sweep(rows, axes=["sharding", "precision", "repeat"]))
    assert recommendation.setting is not None and recommendation.setting.values["sharding"] == "root"
    assert "the smallest peak memory decided among those within 3 % of the fastest." in recommendation.sentence


def test_where_no_repeat_counts_it_does_not_state_that_each_setting_ran_once():
    again = [on_cpu(0, 0, 0.1, 1000.0), on_cpu(1, 2, 0.1, 900.0), on_cpu(2, 0, 0.5, 1.0), on_cpu(3, 2, 0.5, 1.0)]
    assert answer(sweep(again)).notes[-1].startswith("No setting has two runs whose speeds count, so the variation")


def test_two_runs_of_one_setting_that_count_are_not_denied():
    again = [on_cpu(0, 0, 0.1, 1000.0), on_cpu(1, 2, 0.1, 900.0), on_cpu(2, 0, 0.1, 990.0), on_cpu(3, 2, 0.5, 1.0)]
    assert not any(note.startswith("No setting has two runs") for note in answer(sweep(again)).notes)


def test_each_value_of_many_gets_a_line():
    pairs = [(s, p) for s in "abcd" for p in "xy"] + [("a", "z")]  # z with a alone
    rows = [
        TrialRow(n, {"sharding": s, "precision": p}, TrialStatus.finished, {**trial(0).figures, SPEED: 100.0 + n})
        for n, (s, p) in enumerate(pairs)
    ]
    recommendation = answer(sweep([*rows[:8], dataclasses.replace(rows[8], figures={**rows[8].figures, SPEED: 1.0})]))
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=d precision=y"
    assert recommendation.described == [
        "sharding=a precision=y", "sharding=b precision=y", "sharding=c precision=y", "sharding=d precision=x",
        "sharding=a precision=z",
    ]  # fmt: skip


def test_speeds_that_are_hardly_known_have_no_absurd_limits():
    axes = ["sharding", "precision", "repeat"]
    rows = [*rounds(0, 1000.0, 2000.0), *rounds(2, 1200.0, 700.0)]
    recommendation = answer(sweep(rows, axes=axes, repeat_max=500))
    assert "(not known to within a factor of 100)" in recommendation.lines[0] and "(tied)" in recommendation.lines[0]


def test_why_auto_stopped_is_true_of_a_sweep_that_was_killed_between_rounds():
    rows = [*rounds(0, 1000.0), *rounds(2, 900.0)]
    axes = ["sharding", "precision", "repeat"]
    (_, note) = answer(sweep(rows, axes=axes, repeat_max=4)).notes
    assert "before it was settled; resume the sweep" in note
    assert answer(sweep(rows[:1], axes=axes, repeat_max=4)).notes == [], "a single setting has nothing to settle"
    loss = answer(sweep(rows, axes=axes, repeat_max=4, objectives=[("val/loss", "min")])).notes
    assert loss == ["repeat=auto repeated nothing: it compares speeds, and no objective is a speed."]


def test_a_terminal_shows_some_lines_and_says_where_the_others_are():
    rows = [
        TrialRow(n, {"model.width": str(n)}, TrialStatus.finished, {**trial(0).figures, SPEED: 100.0 + 9 * n})
        for n in range(30)
    ]
    recommendation = answer(sweep(rows, axes=["model.width"]))
    lines = plain_text(recommendation)
    assert len(recommendation.lines) == 29 and len([line for line in lines if line.startswith("  model.width=")]) == 8
    assert "  and 21 more settings: see report.html" in lines
    assert lines[1] == "Compared with it, changing only:"


@pytest.mark.parametrize(
    ("predicted", "figures", "objectives", "expected"),
    [
        (800.0, {}, [], "Only 1.25× that speed would change the answer."),
        (1250.0, {}, [], "That is faster than the recommended setting: try it, too."),
        (1250.0, {"forecast/needed_bytes": 9.0, "forecast/capacity_bytes": 1.0}, [], None),  # it cannot fit
        (1250.0, {}, [("val/loss", "min")], None),  # speed decides nothing
    ],
)
def test_what_a_prediction_left_out_is_reported_with_how_wrong_it_would_have_to_be(
    predicted: float, figures: dict[str, float], objectives: list[tuple[str, str]], expected: str | None
):
    ran = dataclasses.replace(trial(0, **{SPEED: 1000.0}), setting={"sharding": "root"})
    left = TrialRow(1, {"sharding": "ddp"}, TrialStatus.skipped, {"forecast/samples_per_s": predicted, **figures})
    text = [
        note for note in answer(sweep([ran, left], axes=["sharding"], objectives=objectives)).notes if "keep" in note
    ]
    assert [note.endswith(expected or "") for note in text] == ([True] if expected else [])


@pytest.mark.parametrize(
    ("speeds", "basis", "facts"),
    [  # predicted and measured
        ([(1000.0, 900.0), (800.0, 760.0), (500.0, 570.0)], "calibration",
         ("calibration of this machine", "20 %", "3 trials", "off by 10 % (largest 14 %)", "was the fastest measured")),
        ([(1000.0, 900.0), (800.0, 1000.0)], "data sheet",
         ("data sheet", "2 trials", "off by 18 % (largest 25 %)", "10 % slower than the fastest measured")),
        ([(1000.0, 960.0)], "fitted", ("published steps on this device", "measured trial was off by 4 %")),
        ([(1000.0, 900.0), (1000.0, 1000.0)], "",
         ("Speeds were predicted (", "2 trials", "off by 5 % (largest 10 %)", "was the fastest measured")),
    ],
)  # fmt: skip
def test_by_what_speeds_were_predicted_and_how_well(
    speeds: list[tuple[float, float]], basis: str, facts: tuple[str, ...]
):
    trials = []
    for number, (predicted, measured) in enumerate(speeds):
        figures = {"forecast/samples_per_s": predicted, "forecast/samples_per_s_low": predicted * 0.8, SPEED: measured}
        one = trial(number, **figures)
        words = {"predicted_by": basis}
        trials.append(dataclasses.replace(one, setting={"sharding": f"s{number}"}, forecast_words=words))
    result = sweep(trials, axes=["sharding"])
    sentence, recommendation = predictions_sentence(result), answer(result)
    has(sentence, *facts)
    assert sentence in recommendation.notes and sentence in to_markdown(result, recommendation)
    assert html.escape(sentence) in to_html(result, recommendation)


def test_beside_speeds_that_do_not_count_the_predicted_fastest_is_one_of_those_that_do():
    rows = [on_cpu(0, 0, 0.1, 1000.0), on_cpu(1, 2, 0.1, 900.0), on_cpu(2, 3, 0.9, 500.0)]
    rows = [dataclasses.replace(row, figures={**row.figures, "forecast/samples_per_s": 1000.0 - 50 * i})
            for i, row in enumerate(rows)]  # fmt: skip
    assert "predicted fastest of the 2 whose speed counts was the fastest" in predictions_sentence(sweep(rows))
    assert "whose speed counts" not in predictions_sentence(sweep(rows[:2]))


def test_a_speed_that_does_not_count_is_not_compared_and_without_predictions_nothing_is_reported():
    assert predictions_sentence(sweep()) == ""
    figures = {"forecast/samples_per_s": 900.0, SPEED: 100.0, OTHERS_CPU: 0.9}
    words = {"predicted_by": "calibration"}
    shared = dataclasses.replace(trial(0, **figures), facts={"device": "cpu"}, forecast_words=words)
    has(predictions_sentence(sweep([shared])), "no measured speed counts", "report sweep=last report.others_cpu=1")


def test_speeds_that_do_not_count_state_nothing_of_how_far_predictions_were_off():
    """Two trials were quiet and as predicted, two were disturbed and half as fast."""
    trials = []
    for number, others in enumerate((0.0, 0.0, 0.9, 0.9)):
        figures = {SPEED: 500.0 if others else 1000.0, "forecast/samples_per_s": 1000.0, OTHERS_CPU: others}
        one = dataclasses.replace(trial(number, **figures), facts={"device": "cpu"})
        trials.append(dataclasses.replace(one, setting={"sharding": f"s{number}"}))
    trials.append(TrialRow(4, {"sharding": "ddp"}, TrialStatus.skipped, {"forecast/samples_per_s": 800.0}))
    (text,) = [note for note in answer(sweep(trials, axes=["sharding"])).notes if "keep" in note]
    assert "predicted 800 samples/s. Only 1.25× that speed" in text


def left_out_note(*rows: tuple[str, str, float, float | None]) -> str:
    """The note on what `forecast.keep` left out, of trials with a predicted and a measured speed (None: left out)."""
    trials = []
    for number, (sharding, precision, predicted, measured) in enumerate(rows):
        setting, figures = {"sharding": sharding, "precision": precision}, {"forecast/samples_per_s": predicted}
        ran = dataclasses.replace(trial(number, **figures, **{SPEED: measured or 0.0}), setting=setting)
        trials.append(TrialRow(number, setting, TrialStatus.skipped, figures) if measured is None else ran)
    (text,) = [note for note in answer(sweep(trials)).notes if "keep" in note]
    return text


def test_what_was_left_out_may_be_as_far_off_as_what_was_faster_than_predicted_in_its_precision():
    """fp32 was slower than predicted, bf16 a third faster: nothing says that another bf16 is not."""
    text = left_out_note(
        ("ddp", "fp32", 844, 728.0),
        ("root", "fp32", 749, 601.0),
        ("ddp", "bf16", 417, 557.0),
        ("root", "bf16", 400, None),
    )
    has(
        text,
        "skipped 1 trial", "`trial 3: sharding=root precision=bf16`", "400 samples/s, or 534",
        "`trial 2: sharding=ddp precision=bf16`", "34 % faster than predicted", "1.36×",
    )  # fmt: skip
    text = left_out_note(("ddp", "fp32", 500, 728.0), ("root", "bf16", 400, None), ("root", "fp32", 390, None))
    assert "sharding=root precision=bf16`, predicted 400 samples/s, or 582 if " in text, "of all, where none is alike"


def test_that_others_were_slower_than_predicted_lowers_no_prediction():
    text = left_out_note(("ddp", "fp32", 2000.0, 1000.0), ("root", "fp32", 1600.0, None))
    assert text.endswith("predicted 1,600 samples/s. That is faster than the recommended setting: try it, too.")
