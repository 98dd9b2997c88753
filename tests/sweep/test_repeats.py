"""`repeats` and `repeat`: how many runs each setting gets, in which order, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from fsdp_lab.config import SweepConfig
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.sweep.grid import repeat_axis
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.sweep import Sweep
from tests.conftest import INLINE, PLAIN, TINY, run_cli
from tests.sweep.planted import sweep_of
from tests.sweep.test_resume import forget, output_of


def compose(overrides: Sequence[str], number: int) -> Trial:
    repeat = next(int(word.partition("=")[2]) for word in overrides if word.startswith("repeat="))
    return Trial(number, SweepConfig(repeat=repeat), {}, list(overrides), Path(), DictConfig({}))


def test_repeats_run_round_by_round_whatever_the_order_of_the_axes():
    """`sharding=a,b repeat=0,1,2` as typed would run all of a before any of b."""
    cells = [(sharding, repeat) for sharding in "ab" for repeat in range(3)]
    trials = [TrialState(compose([f"sharding={s}", f"repeat={r}"], n)) for n, (s, r) in enumerate(cells)]
    assert order(sweep_of(trials)) == ["a 0", "b 0", "b 1", "a 1", "a 2", "b 2"]
    seeded = [TrialState(replace(t.trial, config=with_seed(t.trial.config.repeat))) for t in trials]
    assert order(sweep_of(seeded)) == ["a 0", "b 0", "b 1", "a 1", "a 2", "b 2"], "seeds are repeats too"


def with_seed(seed: int) -> SweepConfig:
    return SweepConfig(training=TrainingConfig(seed=seed))


def order(state: Sweep) -> list[str]:
    collected = []
    while (number := state.next_waiting()) is not None:
        state.trials[number].status = TrialStatus.starting
        collected.append(" ".join(word.partition("=")[2] for word in state.trials[number].trial.overrides))
    return collected


def test_a_number_of_repeats_is_an_axis_of_the_grid():
    assert repeat_axis(OverridesParser.create(), SweepConfig(), ["repeat=0,1"]) == []
    assert repeat_axis(OverridesParser.create(), SweepConfig(repeats=3), ["sharding=ddp,root"]) == ["repeat=range(3)"]


@pytest.mark.ci
def test_each_setting_is_trained_so_often_round_by_round_and_a_resume_goes_on(tmp_path: Path):
    done = run_cli(tmp_path, "-m", *INLINE, "training.grad_accum_steps=1,2", "repeats=2")
    assert done.returncode == 0, output_of(done)
    assert "4 trials: training.grad_accum_steps × repeat" in done.stdout
    trials = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    cells = [[word for word in trial["overrides"] if word.startswith(("training.grad", "repeat="))] for trial in trials]
    assert sorted(cells) == [[f"training.grad_accum_steps={s}", f"repeat={r}"] for s in (1, 2) for r in (0, 1)]
    begun = [int(n) for n in re.findall(r"trial (\d+) starts", done.stdout)]
    assert [cells[n][1] for n in begun] == ["repeat=0", "repeat=0", "repeat=1", "repeat=1"]
    assert "95 % interval of its speed, from repeats" in done.stdout

    forget(tmp_path, 3)
    again = run_cli(tmp_path, "resume=last")
    assert again.returncode == 0, output_of(again)
    assert "the sweep resumes: 1 of 4 trials left" in again.stdout and again.stdout.count(" starts") == 1


@pytest.mark.full
def test_under_ray_a_search_that_has_tried_everything_ends(tmp_path: Path):
    words = ["-m", *TINY, *PLAIN, "model=mlp", "search=random", "search.num_trials=6", "optimizer.lr=1e-3,1e-2"]
    done = run_cli(tmp_path, *words)
    assert done.returncode == 0, output_of(done)
    assert done.stdout.count("the search ends after 2 of search.num_trials=6") == 1


def test_the_first_run_and_several_are_no_mistake(parser: OverridesParser):
    for word in ("repeat=0", "repeat=0,1,2", "repeat=range(20)"):
        assert repeat_axis(parser, SweepConfig(), [word]) == []


@pytest.mark.ci
def test_a_trial_alone_may_be_any_repeat(tmp_path: Path):
    alone = run_cli(tmp_path, "repeat=3", "--cfg", "job")
    assert alone.returncode == 0 and re.search(r"^repeat: 3$", alone.stdout, re.MULTILINE), output_of(alone)
