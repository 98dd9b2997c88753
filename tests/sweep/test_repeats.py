"""`repeat=auto`: what is repeated, in which order, and when it ends; with planted speeds, then as a command."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig

from fsdp_lab.compose import Trial
from fsdp_lab.config import ConfigError, SweepConfig
from fsdp_lab.config.key_value_args import check_repeat
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report import data
from fsdp_lab.report.answer import answer
from fsdp_lab.report.speed import level_of
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.repeats import AutoRepeat, check_auto
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.training.__main__ import read_config
from tests.conftest import run_cli
from tests.sweep.conftest import PLAIN, TINY, results
from tests.sweep.test_resume import forget, output_of
from tests.trained import INLINE


def compose(overrides: Sequence[str], number: int) -> Trial:
    repeat = next(int(word.partition("=")[2]) for word in overrides if word.startswith("repeat="))
    return Trial(number, SweepConfig(repeat=repeat), {}, list(overrides), Path(), DictConfig({}))


class Planted:
    """A sweep whose trials end at once, with planted speeds.

    Args:
        speeds: of each setting, in an ordinary run. noise: the standard deviation of a run's logarithm.
    """

    def __init__(self, speeds: Sequence[float], memory: Sequence[float], noise: float = 0.0, most: int = 4) -> None:
        self.speeds, self.memory, self.noise, self.most = speeds, memory, noise, most
        self.rng = np.random.default_rng(7)
        self.measured: dict[int, float] = {}
        first = [compose([f"sharding={i}", "repeat=0"], i) for i in range(len(speeds))]
        self.state = SweepState([TrialState(trial) for trial in first], [("val/loss", "min")])
        self.begun: list[str] = []
        self.others_cpu = 0.0  # the share of the cores that others have, all the time
        self.timed = True

    def end(self, number: int) -> None:
        trial = self.state.trials[number].trial
        which = int(trial.overrides[0].partition("=")[2])
        self.measured[number] = self.speeds[which] * float(np.exp(self.rng.normal(0, self.noise)))
        self.state.trials[number].status = TrialStatus.finished
        self.begun.append(" ".join(word.partition("=")[2] for word in trial.overrides))

    def read_sweep(self) -> data.SweepData:
        trials = [
            TrialRecord(
                number, dict(word.split("=") for word in state.trial.overrides), state.status,  # type: ignore[arg-type]
                {} if number not in self.measured else {
                    **({"perf/samples_per_s": self.measured[number]} if self.timed else {}),
                    "val/loss": 1.0, "perf/speed_error": self.noise / 2,
                    "memory/peak_bytes": self.memory[int(state.trial.overrides[0].partition("=")[2])],
                    "perf/others_cpu": self.others_cpu,
                },
                facts={"device": "cpu"},
            )
            for number, state in enumerate(self.state.trials)
        ]  # fmt: skip
        read = data.SweepData("s", "", ["sharding", "repeat"], trials, 0.02, 0.03, repeat_max=self.most)
        return read.judged_by(0.25)  # as the driver judges a trial that ends

    def search(self) -> AutoRepeat:
        return AutoRepeat(self.state, self.read_sweep, compose, self.most)

    def run(self, search: AutoRepeat, most: int = 99) -> None:
        while len(self.begun) < most:
            number = self.state.next_waiting()
            if number is None:
                trial = search.next()
                if trial is None:
                    assert not search.has_more()
                    return
                number = self.state.add(trial)
            self.end(number)


def test_what_cannot_be_the_answer_is_not_repeated():
    # 500 is out after the second round; 1000 and 990 are within the tolerance: either will do
    sweep = Planted([1000.0, 500.0, 990.0], [3.0, 1.0, 2.0], noise=0.001)
    search = sweep.search()
    sweep.run(search)
    assert sweep.begun == ["0 0", "1 0", "2 0", "2 1", "1 1", "0 1"], "the second round backwards, then it is settled"
    assert search.notes() == ["repeat=auto: round 2 of at most 4 repeats all settings"]
    recommendation = answer(sweep.read_sweep())
    assert recommendation.setting is not None and recommendation.setting.name == "sharding=0"
    assert recommendation.notes == ["repeat=auto stopped after 2 rounds (6 runs): the answer is settled."]


def test_one_round_rules_out_what_is_three_times_as_slow_and_nothing_else():
    sweep = Planted([1000.0, 320.0, 400.0], [1.0, 1.0, 1.0], noise=0.001)
    sweep.run(sweep.search())
    assert sorted(name for name in sweep.begun if name.endswith(" 1")) == ["0 1", "2 1"]


def test_settings_that_noise_hides_are_repeated_to_the_last_round():
    sweep = Planted([1000.0, 500.0, 1040.0], [2.0, 1.0, 2.0], noise=0.05)
    sweep.run(sweep.search())
    rounds = [[name.partition(" ")[0] for name in sweep.begun if name.endswith(f" {r}")] for r in range(4)]
    assert rounds == [["0", "1", "2"], ["2", "1", "0"], ["0", "2"], ["2", "0"]], "500 is out after two rounds"
    recommendation = answer(sweep.read_sweep())
    assert recommendation.notes == [
        "repeat=auto stopped after 4 rounds (10 runs): more runs could still tell `sharding=0`, `sharding=2` apart."
    ]


def test_a_resume_repeats_what_an_uninterrupted_sweep_does():
    whole = Planted([1000.0, 500.0, 1040.0], [2.0, 1.0, 2.0], noise=0.05)
    whole.run(whole.search())
    for after in range(3, 10):
        cut = Planted([1000.0, 500.0, 1040.0], [2.0, 1.0, 2.0], noise=0.05)
        cut.run(cut.search(), most=after)
        cut.run(cut.search())  # it knows the trials that there are, and nothing else
        assert cut.begun == whole.begun, after


def test_where_others_use_the_cores_all_the_time_it_gives_up_after_two_rounds():
    sweep = Planted([1000.0, 500.0], [1.0, 1.0], noise=0.001)
    sweep.others_cpu = 0.6
    sweep.run(sweep.search())
    assert sorted(sweep.begun) == ["0 0", "0 1", "1 0", "1 1"]
    recommendation = answer(sweep.read_sweep())
    assert recommendation.sentence.startswith("No setting is recommended, because other processes used up")
    assert [note.partition(":")[0] for note in recommendation.notes] == ["Timings excluded"]


def test_where_no_step_is_timed_it_repeats_nothing():
    sweep = Planted([1000.0, 500.0], [1.0, 1.0])
    sweep.timed = False
    search = sweep.search()
    sweep.run(search)
    assert sweep.begun == ["0 0", "1 0"] and search.notes() == []
    recommendation = answer(sweep.read_sweep())
    assert "No step was timed" in " ".join(recommendation.details)
    assert recommendation.notes == []


def test_nothing_is_decided_while_a_round_runs():
    sweep = Planted([1000.0, 1100.0], [1.0, 1.0])
    search = sweep.search()
    sweep.end(0)
    sweep.state.trials[1].status = TrialStatus.running
    assert search.next() is None and search.has_more(), "it waits"
    sweep.end(1)
    assert search.next() is not None


def test_a_setting_that_did_not_qualify_is_not_repeated():
    sweep = Planted([1000.0, 1100.0, 1050.0], [1.0, 1.0, 1.0], noise=0.05)
    search = sweep.search()
    for number in range(3):
        sweep.end(number)
    sweep.state.trials[1].status = TrialStatus.oom
    sweep.run(search)
    assert not any(name.startswith("1 ") for name in sweep.begun[3:]) and len(sweep.begun) > 3


def test_looks_share_the_error_of_one():
    # Pocock's published levels for 2 to 5 looks
    assert [level_of(looks) for looks in (1, 2, 3, 4, 5)] == [0.05, 0.0294, 0.0221, 0.0182, 0.0158]
    assert level_of(10) == pytest.approx(0.005)


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 5])
def test_auto_calls_an_equal_setting_faster_in_at_most_five_of_a_hundred(count: int):
    """Whenever it stops: of 300 sweeps, with an allowance of two standard errors of that count."""
    wrong = 0
    for seed in range(300):
        sweep = Planted([1000.0] * count, list(range(1, count + 1)), noise=0.04)
        sweep.rng = np.random.default_rng(seed)
        sweep.run(sweep.search())
        lines = answer(sweep.read_sweep()).lines
        wrong += any("(tied)" not in line for line in lines)
    assert wrong / 300 <= 0.05 + 2 * (0.05 * 0.95 / 300) ** 0.5


def test_repeats_run_round_by_round_whatever_the_order_of_the_axes():
    """`sharding=a,b repeat=0,1,2` as typed would run all of a before any of b."""
    cells = [(sharding, repeat) for sharding in "ab" for repeat in range(3)]
    trials = [TrialState(compose([f"sharding={s}", f"repeat={r}"], n)) for n, (s, r) in enumerate(cells)]
    assert order(SweepState(trials, [])) == ["a 0", "b 0", "b 1", "a 1", "a 2", "b 2"]
    seeded = [TrialState(replace(t.trial, config=with_seed(t.trial.config.repeat))) for t in trials]
    assert order(SweepState(seeded, [])) == ["a 0", "b 0", "b 1", "a 1", "a 2", "b 2"], "seeds are repeats too"


def with_seed(seed: int) -> SweepConfig:
    return SweepConfig(training=TrainingConfig(seed=seed))


def order(state: SweepState) -> list[str]:
    collected = []
    while (number := state.next_waiting()) is not None:
        state.trials[number].status = TrialStatus.starting
        collected.append(" ".join(word.partition("=")[2] for word in state.trials[number].trial.overrides))
    return collected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, True, []), "repeat=auto needs a grid"),
        ((1, False, []), "repeat_max=1 leaves nothing to repeat; use 2 or more."),
        ((4, False, ["sharding", "training.seed"]), "leave one out"),
    ],
)
def test_what_auto_has_no_meaning_with(arguments: tuple[int, bool, list[str]], message: str):
    with pytest.raises(ConfigError, match=message):
        check_auto(*arguments)


@pytest.mark.ci
def test_a_sweep_repeats_by_itself_and_a_resume_goes_on(tmp_path: Path):
    """Two batch sizes, of which nobody knows which is faster here: two rounds at least, three at most."""
    words = ["-m", *INLINE, "training.grad_accum_steps=1,2", "repeat=auto", "repeat_max=3", "report.others_cpu=1"]
    done = run_cli(tmp_path, *words)
    assert done.returncode == 0, output_of(done)
    assert "repeat=auto: round 2 of at most 3 repeats all settings" in done.stdout
    trials = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    rounds = [next(word for word in trial["overrides"] if word.startswith("repeat=")) for trial in trials]
    assert rounds in (["repeat=0"] * 2 + ["repeat=1"] * 2, ["repeat=0"] * 2 + ["repeat=1"] * 2 + ["repeat=2"] * 2)
    stopped = f"repeat=auto stopped after {len(trials) // 2} rounds"
    assert stopped in done.stdout
    assert "repeat=auto stopped" in (tmp_path / "out" / "report.md").read_text()

    forget(tmp_path, len(trials) - 1)
    again = run_cli(tmp_path, "resume=last")
    assert again.returncode == 0, output_of(again)
    assert (
        f"resumes: 1 of {len(trials)} trials left, then repeats of undecided settings, up to 3 rounds: " in again.stdout
    )
    assert again.stdout.count(" starts") == 1 or len(trials) == 4, "the last, and what its new speed asks for"
    assert "repeat=auto stopped" in again.stdout
    nothing = run_cli(tmp_path, "resume=last")
    assert "nothing is left to do" in nothing.stdout, output_of(nothing)


@pytest.mark.full
def test_under_ray_a_round_waits_for_the_one_before_and_the_sweep_ends(tmp_path: Path):
    """Tune asks for the next trial while one runs: it is told to wait, and at last that there are no more."""
    plain = [word for word in PLAIN if not word.startswith("sharding")]
    words = ["-m", *TINY, *plain, "model=mlp", "sharding=root,per_block", "repeat=auto", "repeat_max=2"]
    done = run_cli(tmp_path, *words)
    assert done.returncode == 0, output_of(done)
    trials = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    rounds = [next(word for word in trial["overrides"] if word.startswith("repeat=")) for trial in trials]
    assert rounds == ["repeat=0"] * 2 + ["repeat=1"] * 2
    begun = [line.split("starts: ")[1] for line in done.stdout.splitlines() if " starts: " in line]
    first, second, third, fourth = (line.split()[0] for line in begun)
    assert (first, second) == (fourth, third), "the second round backwards"
    for number, trial in enumerate(trials[2:], start=2):
        facts = json.loads((tmp_path / "out" / str(number) / "metrics.jsonl").read_text().splitlines()[-1])
        assert 0 <= facts["perf/others_cpu"] <= 1, trial


@pytest.mark.full
@pytest.mark.timeout(800)
def test_what_the_forecast_prunes_is_not_repeated(tmp_path: Path):
    """A device with room for two of three shardings."""
    plain = [word for word in PLAIN if not word.startswith("sharding")]
    words = [word for word in (*TINY, *plain) if not word.startswith(("hydra.", "tracking."))] + ["model=mlp"]
    peaks = {
        name: forecast_profile(read_config(None, [*words, f"sharding={name}"]), 2, cuda=False).peaks["device"]["total"]
        for name in ("ddp", "root", "per_block")
    }
    assert peaks["ddp"] > max(peaks["root"], peaks["per_block"])
    room = (peaks["ddp"] + max(peaks["root"], peaks["per_block"])) / 2 / 2**30
    prune = ("forecast.prune=true", f"forecast.capacity_gib={room}", "sharding=ddp,root,per_block", "training.epochs=1")
    auto = ("repeat=auto", "repeat_max=2", "report.others_cpu=1", "checkpoint.mode=off", "export=false")
    done = run_cli(tmp_path, "-m", *TINY, *plain, "model=mlp", *prune, *auto, timeout=700)
    assert done.returncode == 0, output_of(done)
    assert "repeat=auto: round 2 of at most 2 repeats 2 settings" in done.stdout
    trials = [(row["sharding"], row["repeat"], row["status"]) for row in results(tmp_path)]
    assert sorted(trials) == [
        ("ddp", "0", "skipped"),
        ("per_block", "0", "finished"), ("per_block", "1", "finished"),
        ("root", "0", "finished"), ("root", "1", "finished"),
    ]  # fmt: skip
    assert "repeat=auto stopped after 2 rounds (5 runs): " in " ".join(done.stdout.split())


@pytest.mark.full
def test_under_ray_a_search_that_has_tried_everything_ends(tmp_path: Path):
    words = ["-m", *TINY, *PLAIN, "model=mlp", "search=random", "search.num_trials=6", "optimizer.lr=1e-3,1e-2"]
    done = run_cli(tmp_path, *words)
    assert done.returncode == 0, output_of(done)
    assert done.stdout.count("the search ends after 2 of search.num_trials=6") == 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("repeat=3", "for three runs of each setting use repeat=0,1,2,"),
        ("++repeat=1", "for two runs of each setting use repeat=0,1,"),
        ("repeat=20", "for 20 runs of each setting use repeat='range(20)',"),
    ],
)
def test_the_number_of_a_run_is_not_taken_for_how_many_there_are(word: str, message: str):
    with pytest.raises(ConfigError, match=r"names one run, not a number of runs; ") as refused:
        check_repeat(["sharding=ddp", word])
    assert message in str(refused.value)


def test_the_first_run_and_several_are_no_mistake():
    check_repeat(["repeat=0", "repeat=0,1,2", "repeat='range(20)'", "repeat=auto", "repeat_max=3"])


@pytest.mark.ci
def test_a_trial_alone_may_be_any_repeat(tmp_path: Path):
    alone = run_cli(tmp_path, "repeat=3", "--cfg", "job")
    assert alone.returncode == 0 and re.search(r"^repeat: 3 ", alone.stdout, re.MULTILINE), output_of(alone)


def test_one_trial_has_nothing_to_repeat(tmp_path: Path):
    done = run_cli(tmp_path, *INLINE, "repeat=auto")
    assert done.returncode == 2
    assert "repeat=auto" in done.stderr and "-m" in done.stderr
