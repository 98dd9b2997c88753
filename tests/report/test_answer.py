"""The recommended setting, against rows of which it can be said by eye."""

from __future__ import annotations

import dataclasses
import math
import shlex

import pytest

from fsdp_lab.report.answer import answer
from fsdp_lab.report.data import Trial
from fsdp_lab.report.effects import Effect, effects
from fsdp_lab.status import TrialStatus
from tests.report.sweeps import ROWS, sweep, trial


def test_the_fastest_that_fits_and_learned_is_taken_and_ties_go_to_the_smaller():
    found = answer(sweep())
    assert found.setting is not None and found.setting.values == {"sharding": "per_block", "precision": "bf16"}
    # 1950 / 1000, 40 / 100, and 1.012 against the baseline's 1.000
    assert "1.95× the samples/s of `sharding=ddp precision=fp32` at 40 % of its peak memory" in found.sentence
    assert "loss within 1.2 % of the unsharded baseline" in found.sentence
    assert shlex.split(found.command) == [
        "python", "-m", "fsdp_lab", "sharding=per_block", "precision=bf16", "training.epochs=2",
    ]  # fmt: skip
    assert found.why_not["sharding=per_block precision=fp32"] == "ran out of memory"
    assert found.why_not["sharding=ddp precision=bf16"] == "learned less: val/loss 1.1000, 10.0 % above the best"
    assert len(found.why_not) == 2
    # by hand: 40 MiB/1950, 50/1980; 60/900, 80/1500, 100/1000 are beaten by both
    assert found.front == ["sharding=root precision=bf16", "sharding=per_block precision=bf16"]


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
    found = answer(sweep(**changed))
    assert found.setting is not None and found.setting.values == expected


def test_of_two_as_fast_and_as_large_the_plainer_is_taken_though_it_is_a_little_slower():
    rows = [
        Trial(0, {"offload": "none"}, TrialStatus.finished, trial(0).figures),
        Trial(1, {"offload": "cpu"}, TrialStatus.finished),
    ]
    rows[1] = dataclasses.replace(rows[1], figures={**trial(0).figures, "perf/samples_per_s": 1010.0})
    found = answer(sweep(rows, axes=["offload"]))
    assert found.setting is not None and found.setting.name == "offload=none"


def test_on_a_cpu_offload_is_another_name_and_its_trials_are_repeats():
    rows = [
        dataclasses.replace(
            trial(n, **{"perf/samples_per_s": speed}),
            setting={"offload": offload, "sharding": "root"}, overrides=[f"offload={offload}"], device=device,
        )
        for device in ("cpu", "NVIDIA H200")
        for n, (offload, speed) in enumerate((("cpu", 300.0), ("none", 200.0)))
    ]  # fmt: skip
    found = answer(sweep(rows[:2], axes=["offload", "sharding"]))
    assert found.setting is not None and found.setting.values == {"sharding": "root"}
    assert "250 samples/s (median of 2, 200 to 300)" in found.sentence and found.command.endswith("offload=none")
    assert found.rules[-1] == "On a CPU offload changes nothing: its values count as repeats of a setting."
    on_gpu = answer(sweep(rows[2:], axes=["offload", "sharding"]))
    assert on_gpu.setting is not None and on_gpu.setting.values["offload"] == "cpu"


def test_a_sweep_that_is_not_over_says_so_first():
    rows = [*sweep().trials, Trial(6, {"sharding": "ddp", "precision": "fp16"}, TrialStatus.waiting)]
    assert answer(sweep(rows)).sentence.startswith("So far, with 6 of 7 results: `sharding=per_block precision=bf16`: ")
    assert answer(sweep([rows[0], rows[6]])).sentence.endswith("no other has a result yet.")


def test_plainness_is_worth_no_more_speed_than_the_tolerance():
    rows = [
        Trial(n, {"sharding": sharding}, TrialStatus.finished, {**trial(0).figures, "perf/samples_per_s": speed})
        for n, (sharding, speed) in enumerate(
            (("root", 2000.0), ("root", 1500.0), ("root", 1900.0), ("ddp", 1200.0), ("ddp", 1000.0), ("ddp", 1600.0))
        )
    ]
    found = answer(sweep(rows, axes=["sharding"]))  # their repeats overlap, and their peaks are equal
    assert found.setting is not None and found.setting.name == "sharding=root"


def test_a_setting_above_the_capacity_of_a_device_does_not_fit_though_it_finished():
    rows = list(sweep().trials)
    for number in (3, 5):  # a CPU does not run out where a GPU would
        rows[number] = trial(
            number, ROWS[number], **{"forecast/needed_bytes": 90.0 * 2**20, "forecast/capacity_bytes": 80.0 * 2**20}
        )
    found = answer(sweep(rows))
    assert found.setting is not None and found.setting.name == "sharding=ddp precision=fp32"
    assert found.why_not["sharding=root precision=bf16"] == "needs 90 MiB of 80 MiB a device, by its forecast"


def test_when_nothing_qualifies_it_says_that_and_why():
    rows = [trial(0, ("ddp", "fp32", "oom", 0, 0, 0)), trial(1, ("root", "fp32", "diverged", 0, 0, 0))]
    found = answer(sweep(rows))
    assert found.setting is None and found.command == ""
    assert found.sentence == "Nothing qualifies: of 2 settings 1 ran out of memory, 1 diverged."
    nan = trial(0, ("ddp", "fp32", "finished", 10, 100.0, math.nan))
    assert "has no finite val/loss" in answer(sweep([nan])).why_not["sharding=ddp precision=fp32"]
    assert "no trial was begun" in answer(sweep([])).sentence


def test_repeats_make_one_setting_of_their_medians_and_one_that_failed_spoils_it():
    def repeated(row: int, repeat: int, speed: float) -> Trial:
        one = trial(10 * row + repeat, ROWS[row], **{"perf/samples_per_s": speed})
        setting = {**one.setting, "repeat": str(repeat)}
        return dataclasses.replace(one, setting=setting, overrides=[*one.overrides, f"repeat={repeat}"])

    trials = [repeated(0, r, s) for r, s in enumerate((1000.0, 1020.0, 400.0))]
    trials += [repeated(2, r, s) for r, s in enumerate((1010.0, 600.0, 5000.0))]
    axes = ["sharding", "precision", "repeat"]
    found = answer(sweep(trials, axes=axes, speed_tolerance=0.0))  # type: ignore[arg-type]
    assert [s.median("perf/samples_per_s") for s in sweep(trials, axes=axes).settings] == [1000.0, 1010.0]  # type: ignore[arg-type]
    assert found.setting is not None and found.setting.values == {"sharding": "root", "precision": "fp32"}
    assert "repeat" not in found.command
    trials.append(dataclasses.replace(trial(99, (*ROWS[2][:2], "oom", 0, 0, 0)), setting=trials[-1].setting))  # type: ignore[attr-defined]
    found = answer(sweep(trials, axes=axes))  # type: ignore[arg-type]
    assert found.why_not["sharding=root precision=fp32"] == "ran out of memory in 1 of 4 trials"


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
    def repeated(row: int, speeds: tuple[float, ...]) -> list[Trial]:
        ones = [trial(10 * row + i, ROWS[row], **{"perf/samples_per_s": s}) for i, s in enumerate(speeds)]
        return [dataclasses.replace(one, setting={**one.setting, "repeat": str(i)}) for i, one in enumerate(ones)]

    axes = ["sharding", "precision", "repeat"]
    large, small = (2000.0, 1500.0, 1900.0), (1200.0, 1000.0, 1600.0)  # 1600 is above 1500
    found = answer(sweep([*repeated(3, large), *repeated(5, small)], axes=axes))
    assert found.setting is not None and found.setting.values["sharding"] == "per_block"  # 40 MiB against 50
    assert "1,200 samples/s (median of 3, 1,000 to 1,600)" in found.sentence
    apart = answer(sweep([*repeated(3, large), *repeated(5, (1200.0, 1000.0, 1400.0))], axes=axes))
    assert apart.setting is not None and apart.setting.values["sharding"] == "root"


def test_runs_too_short_to_be_timed_are_compared_by_memory_and_say_what_is_missing():
    rows = [trial(0, ROWS[0]), trial(1, ROWS[2])]
    for row in rows:
        del row.figures["perf/samples_per_s"]
    found = answer(sweep(rows))
    assert found.setting is not None and found.setting.values["sharding"] == "root", "60 MiB against 100"
    assert found.why_not == {}
    assert "60.00 MiB at the peak, the least of 2 settings" in found.sentence
    assert (
        "No step was timed" in found.sentence
        and "The first 5 steps are not timed" in found.sentence
        and "run 6 or more" in found.sentence
    )


def test_one_run_too_short_to_be_timed_does_not_qualify_beside_one_that_was():
    short = trial(1, ROWS[2])
    del short.figures["perf/samples_per_s"]
    found = answer(sweep([trial(0, ROWS[0]), short]))
    assert found.setting is not None and found.setting.values["sharding"] == "ddp"
    assert "ended before a step was timed" in found.why_not["sharding=root precision=fp32"]


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
