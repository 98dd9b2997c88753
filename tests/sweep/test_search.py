"""What a search suggests, from the command line's words to trials; a sampler of another package runs a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from fsdp_lab.config import ConfigError
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import SearchConfig
from fsdp_lab.sweep.search import OptunaSearch, read_space
from tests import forked
from tests.conftest import INLINE
from tests.servers import lay_store
from tests.sweep.conftest import results
from tests.sweep.planted import LOSS, Compose, registering, trial_by_hand

LR = "optimizer.lr=tag(log,interval(1e-5,1e-1))"
AXES = {
    "sharding": "ddp,root,per_block", "precision": "fp32,bf16_mixed,fp16", "offload": "none,cpu",
    "reshard_after_forward": "always,never",
}  # fmt: skip


def space_of(parser: OverridesParser, *arguments: str, axes: Mapping[str, str] = {}):
    return read_space(parser, axes, ["cluster.num_workers=2", *arguments])


def searching(
    parser: OverridesParser, compose: Compose, name: str, *arguments: str, trials: int = 6, seed: int = 0,
    objectives: Sequence[tuple[str, str]] = LOSS, axes: Mapping[str, str] = {},
) -> OptunaSearch:  # fmt: skip
    settings = SearchConfig(name, trials, seed)
    return OptunaSearch(settings, space_of(parser, *arguments, axes=axes), objectives, compose)


def all_of(search: OptunaSearch, loss: Callable[[Trial], float] = lambda trial: 1.0) -> list[list[str]]:
    """The overrides of all suggestions, each of which finishes with a loss before the next."""
    every = []
    while (trial := search.next()) is not None:
        search.report_result(trial, TrialStatus.finished, {"val/loss": loss(trial), "epoch": 1})
        every.append(trial.overrides)
    return every


def test_words_become_dimensions(parser: OverridesParser):
    distributions = {
        "optimizer.lr=tag(log,interval(1e-4,1e-2))": FloatDistribution(1e-4, 1e-2, log=True),
        "model.hidden_dim=int(interval(16,64))": IntDistribution(16, 64),
        "training.seed=range(1,3)": CategoricalDistribution(["training.seed=1", "training.seed=2"]),
    }
    space = space_of(parser, *distributions, "model=mlp")
    assert space.dimensions == {word.partition("=")[0]: expected for word, expected in distributions.items()}
    assert space.fixed == ["cluster.num_workers=2", "model=mlp"]


def test_the_code_of_every_trial_is_known_before_the_first(parser: OverridesParser, compose_trial):
    words = ["model=custom", "model._target_=my.A,my.B", "model.width=int(interval(1,9))", "data=custom"]
    search = searching(parser, compose_trial, "random", *words, "data._target_=my.Data", LR)
    assert search.code() == ["my.A", "my.B", "my.Data"]
    composed = Mock(side_effect=compose_trial)
    several = ["data._target_=my.C,my.D,my.E", "task=custom", "task.loss=my.f,my.g,my.h", "optimizer=adam,sgd"]
    search = searching(parser, composed, "random", *words, *several)
    composed.reset_mock()
    assert search.code() == [f"my.{name}" for name in "ABCDEfgh"]
    assert composed.call_count == 1 + 1 + 2 + 2 + 1, "each group by itself, of 36 combinations"


@pytest.mark.parametrize("name", ["random", "optuna"])
def test_the_same_seed_gives_the_same_trials_in_the_same_order(parser, name: str):
    one, again, other = (all_of(searching(parser, trial_by_hand, name, LR, seed=seed)) for seed in (7, 7, 8))
    assert one == again != other
    assert len(one) == 6 and len({tuple(overrides) for overrides in one}) == 6
    assert all(1e-5 <= float(overrides[-1].partition("=")[2]) <= 1e-1 for overrides in one)


def test_what_is_reported_to_optuna_draws_it_to_the_best(parser):
    """Of 30 trials, the last ten lie closer to the best learning rate than those of a random search."""

    def loss(trial: Trial) -> float:
        return abs(trial.config.optimizer.lr - 0.03)

    def distance(name: str) -> float:
        overrides = all_of(searching(parser, trial_by_hand, name, LR, trials=30), loss)
        return sum(abs(float(words[-1].partition("=")[2]) - 0.03) for words in overrides[-10:])

    assert distance("optuna") < distance("random") / 1.5


def test_a_misspelt_value_is_refused_before_anything_starts(parser, compose_trial):
    for seed in range(4):  # whatever would be drawn first
        with pytest.raises(HydraException, match="per_blok"):
            searching(parser, compose_trial, "random", "sharding=root,per_blok,ddp", LR, seed=seed)


def test_values_are_composed_when_they_are_drawn_and_checked_before(parser, compose_trial):
    composed: list[Sequence[str]] = []

    def compose(words: Sequence[str], number: int) -> Trial:
        composed.append(words)
        return compose_trial(words, number)

    words = ["model.mlp_dim=range(64,1064)", "sharding=root,ddp", "optimizer.lr=0.1,x"]
    search = searching(parser, compose, "random", *words, trials=4)
    assert len(composed) == 2, "the options of the group"
    assert all("optimizer.lr=0.1" in overrides for overrides in all_of(search)), (
        "a value that a rule refuses costs none"
    )
    for wrong in ("training.epochs=1,two", "training.seed=1,${nope}", "init=plain,rnak0", "training.epoch=1,2"):
        with pytest.raises((HydraException, OmegaConfBaseException)):
            searching(parser, compose_trial, "random", wrong, LR)


def test_an_invalid_suggestion_costs_no_trial_and_has_its_reason_once(parser, compose_trial):
    """Half of the suggestions, each with a learning rate of its own."""
    search = searching(parser, compose_trial, "random", "sharding=ddp", "offload=cpu,none", LR)
    assert ["offload=none" in overrides for overrides in all_of(search)] == [True] * 6
    (note,) = search.notes()
    assert note.startswith("not tried: ") and "sharding=ddp with offload=cpu: DDP keeps every parameter" in note


def test_a_space_that_is_used_up_ends_the_search(parser, monkeypatch: pytest.MonkeyPatch):
    """Two seeds: of a key that has no effect here, every value is the same setting."""
    monkeypatch.setattr("fsdp_lab.sweep.search._MOST_REFUSED", 20)
    words = ["training.seed=0,1", "activation_checkpointing_every=int(interval(1,1000000))"]
    search = searching(parser, trial_by_hand, "optuna", *words, trials=20)
    assert len({tuple(overrides) for overrides in all_of(search)}) == 2
    assert "after 2 of search.num_trials=20: 20 random suggestions in a row" in search.notes()[-1]
    assert not search.has_more() and search.next() is None and search.notes() == [], "else Ray would ask for ever"


def loss_of(trial: Trial) -> float:
    """One that grows with each axis, so that a sampler soon knows the best cell."""
    return sum(place * len(word) for place, word in enumerate(trial.overrides)) / 100


def effect_of(words: Iterable[str]) -> frozenset[str]:
    """The words of a cell without those that change nothing: with DDP nothing is resharded."""
    return frozenset(word for word in words if "sharding=ddp" not in words or "reshard" not in word)


def test_a_search_reaches_every_setting_of_the_default_axes(parser: OverridesParser, compose_trial: Compose):
    """27: with root or per_block 3 x 2 x 2 each; with DDP, which offloads and reshards nothing, 3.

    A sampler that knows the best cell suggests little else.
    """
    cells = itertools.product(*([f"{key}={value}" for value in values.split(",")] for key, values in AXES.items()))
    valid = {effect_of(cell) for cell in cells if not {"sharding=ddp", "offload=cpu"} <= {*cell}}
    search = searching(parser, compose_trial, "optuna", trials=100, seed=1, axes=AXES)
    made = [effect_of(overrides[1:]) for overrides in all_of(search, loss_of)]  # without the number of workers
    assert len(made) == len(valid) == 27 and {*made} == valid


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optimizer.lr=tag(log,interval(1e-4,inf))", "too wide"),
        ("model.rate=interval(-1e308,1e308)", "too wide"),
        ("optimizer.lr=interval(-1,1)", r"optimizer.lr=-1.0 is not above 0"),
        ("training.global_batch_size=int(interval(-9,-1))", "training.global_batch_size=-9 is below 1"),
        ("training.seed=int(interval(0,9223372036854775807))", "training.seed=9223372036854775808 is too large"),
    ],
)
def test_an_interval_that_cannot_be_drawn_from_is_refused(parser, word: str, says: str):
    """Else each value that is drawn is refused in a line of its own, or ends the command with an OverflowError."""
    with pytest.raises(ConfigError, match=says):
        space_of(parser, word)


def test_a_resumed_search_repeats_none_and_makes_up_the_number(parser):
    """Of eight trials, of nine settings, five are known, of which three have ended."""
    first, resumed = (searching(parser, trial_by_hand, "random", "training.seed=range(9)", trials=8) for _ in "12")
    known = list(itertools.islice(iter(first.next, None), 5))
    ended, waits = TrialStatus.finished, TrialStatus.waiting
    resumed.resume([(trial, ended if n < 3 else waits, {"val/loss": 2.0}) for n, trial in enumerate(known)])
    after = all_of(resumed)
    assert len(after) == 3 and not any(overrides in [trial.overrides for trial in known] for overrides in after)
    values = sorted(t.value for t in resumed._study.get_trials() if t.value is not None)
    assert values == [1.0] * 3 + [2.0] * 3, "the sampler knows the results of before"


@pytest.mark.parametrize(
    ("status", "state"),
    [("failed", "FAIL"), ("interrupted", "FAIL"), ("stopped", "PRUNED"), ("skipped", "PRUNED"), ("oom", "PRUNED")],
)
def test_optuna_learns_what_was_stopped_and_what_did_not_fit(parser, status: str, state: str):
    search = searching(parser, trial_by_hand, "optuna", LR, trials=2)
    search.report_result(search.next(), TrialStatus(status), {"val/loss": 0.0} if status == "stopped" else {})
    assert [told.state.name for told in search._study.get_trials()] == [state]


def test_several_objectives_have_a_front(parser):
    """Of (memory, speed) the third is beaten by the second, and the fourth by the first."""
    memory, speed = "memory/peak_bytes", "perf/samples_per_s"
    search = searching(parser, trial_by_hand, "optuna", LR, objectives=[(memory, "min"), (speed, "max")])
    for figures in [(10, 5), (20, 9), (30, 8), (10, 4)]:
        trial = search.next()
        assert trial is not None
        search.report_result(trial, TrialStatus.finished, dict(zip((memory, speed), figures, strict=True)))
    assert sorted(tuple(t.values) for t in search._study.best_trials) == [(10, 5), (20, 9)]


@pytest.mark.ci
def test_a_sampler_of_another_package_suggests_the_trials(tmp_path: Path):
    """It is registered in the process of the command; another name is refused."""
    code = registering("search.name", "counts")
    lay_store(tmp_path)
    words = ["search.num_trials=6", "optimizer.lr=0.1,0.01,0.001", "training.seed=1,2", "training.epochs=1"]
    done = forked.run(tmp_path, "-c", code, "-m", *INLINE, "search.name=count", *words)
    assert done.returncode == 2
    assert "search.name=count is not an option. Choose one of: grid, random, optuna, counts." in done.stderr
    done = forked.run(tmp_path, "-c", code, "-m", *INLINE, "search.name=counts", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["optimizer.lr"], row["training.seed"]) for row in results(tmp_path)] == [
        (lr, seed) for seed in ("1", "2") for lr in ("0.1", "0.01", "0.001")
    ]
