"""What a search suggests, from the command line's words to trials; without Ray."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from fsdp_lab.config import ConfigError, SweepConfig
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import SearchConfig
from fsdp_lab.report.choice import pareto_front
from fsdp_lab.sweep.grid import enumerate_grid
from fsdp_lab.sweep.plan import plan_sweep
from fsdp_lab.sweep.search import OptunaSearch, read_space
from tests.sweep.planted import LOSS, Compose

AXES = {
    "sharding": "ddp,root,per_block", "precision": "fp32,bf16_mixed,fp16", "offload": "none,cpu",
    "reshard_after_forward": "always,never",
}  # fmt: skip


def space_of(parser: OverridesParser, *arguments: str, axes: Mapping[str, str] = {}):
    return read_space(parser, axes, ["cluster.num_workers=2", *arguments])


@pytest.mark.parametrize(
    ("argument", "distribution"),
    [
        ("optimizer.lr=interval(0.1,0.5)", FloatDistribution(0.1, 0.5)),
        ("optimizer.lr=tag(log,interval(1e-4,1e-2))", FloatDistribution(1e-4, 1e-2, log=True)),
        ("model.hidden_dim=int(interval(16,64))", IntDistribution(16, 64)),
        ("model.hidden_dim=tag(log,int(interval(16,64)))", IntDistribution(16, 64, log=True)),
        ("precision=fp32,bf16", CategoricalDistribution(["precision=fp32", "precision=bf16"])),
        (
            "training.seed=range(1,4)",
            CategoricalDistribution(["training.seed=1", "training.seed=2", "training.seed=3"]),
        ),
    ],
)
def test_words_become_dimensions(parser: OverridesParser, argument: str, distribution: object):
    space = space_of(parser, argument, "model=mlp")
    assert space.dimensions == {argument.partition("=")[0]: distribution}
    assert space.fixed == ["cluster.num_workers=2", "model=mlp"]


def test_the_code_of_every_trial_that_may_come_is_known_before_the_first(parser: OverridesParser, compose_trial):
    words = ["model=custom", "model._target_=my.A,my.B", "model.width=int(interval(1,9))", "data=custom"]
    search = searching(parser, compose_trial, "random", *words, "data._target_=my.Data", LR)
    assert search.code() == ["my.A", "my.B", "my.Data"]
    assert searching(parser, compose_trial, "random", LR).code() == []


def searching(
    parser: OverridesParser, compose: Compose, name: str, *arguments: str, trials: int = 6, seed: int = 0,
    objectives: Sequence[tuple[str, str]] = LOSS, axes: Mapping[str, str] = {}, **options: object,
) -> OptunaSearch:  # fmt: skip
    settings = SearchConfig(name, trials, seed)
    return OptunaSearch(settings, space_of(parser, *arguments, axes=axes), objectives, compose, **options)  # type: ignore[arg-type]


def all_of(search: OptunaSearch, loss: Callable[[Trial], float] = lambda trial: 1.0) -> list[list[str]]:
    every = []
    while (trial := search.next()) is not None:
        search.report_result(trial, TrialStatus.finished, {"val/loss": loss(trial), "epoch": 1})
        every.append(trial.overrides)
    return every


LR = "optimizer.lr=tag(log,interval(1e-5,1e-1))"


@pytest.mark.parametrize("name", ["random", "optuna"])
def test_the_same_seed_gives_the_same_trials_in_the_same_order(parser, compose_trial, name: str):
    one, again, other = (all_of(searching(parser, compose_trial, name, LR, seed=seed)) for seed in (7, 7, 8))
    assert one == again != other
    assert len(one) == 6 and len({tuple(overrides) for overrides in one}) == 6


def test_what_is_reported_to_optuna_draws_it_to_the_best(parser, compose_trial):
    """Of 30 trials, the last ten lie closer to the best learning rate than those of a random search."""

    def loss(trial: Trial) -> float:
        return abs(trial.config.optimizer.lr - 0.03)

    def distance(name: str) -> float:
        rates = [
            float(o[-1].partition("=")[2]) for o in all_of(searching(parser, compose_trial, name, LR, trials=30), loss)
        ]
        return sum(abs(rate - 0.03) for rate in rates[-10:])

    assert distance("optuna") < distance("random") / 1.5


def test_what_has_no_meaning_costs_no_trial_and_is_reported_once(parser, compose_trial):
    search = searching(parser, compose_trial, "random", "sharding=ddp,per_block", "offload=none,cpu", LR, trials=12)
    suggested = all_of(search)
    assert len(suggested) == 12
    assert not any({"sharding=ddp", "offload=cpu"} <= set(overrides) for overrides in suggested)
    (note,) = search.notes()
    assert "sharding=ddp with offload=cpu" in note


def test_a_misspelt_value_is_refused_before_anything_starts_whatever_is_drawn_first(parser, compose_trial):
    for seed in range(4):
        with pytest.raises(HydraException, match="per_blok"):
            searching(parser, compose_trial, "random", "sharding=root,per_blok,ddp", LR, seed=seed)


def test_a_space_that_is_used_up_ends_the_search_with_each_setting_once(parser, compose_trial):
    search = searching(parser, compose_trial, "random", "precision=fp32,bf16,fp16", trials=20)
    suggested = all_of(search)
    assert sorted(overrides[-1] for overrides in suggested) == ["precision=bf16", "precision=fp16", "precision=fp32"]
    assert "after 3 of search.num_trials=20" in search.notes()[-1]
    assert not search.has_more() and search.next() is None and search.notes() == [], "else Ray would ask for ever"


def loss_of(trial: Trial) -> float:
    """One that grows with each axis, so that a sampler soon knows the best cell."""
    return sum(place * len(word) for place, word in enumerate(trial.overrides)) / 100


@pytest.mark.parametrize(
    ("name", "seed", "beside"), [("optuna", 0, 1), ("optuna", 1, 3), ("optuna", 2, 1), ("random", 0, 3)]
)
def test_a_search_reaches_every_setting_of_the_default_axes(
    parser: OverridesParser, compose_trial: Compose, name: str, seed: int, beside: int
):
    """As many as a grid has. A sampler that knows the best cell suggests little else; results of some come later."""
    grid = plan_sweep(enumerate_grid(parser, AXES, ["cluster.num_workers=2"]), compose_trial).trials
    search = searching(parser, compose_trial, name, trials=100, seed=seed, axes=AXES)
    running: deque[Trial] = deque()
    made = []
    while (trial := search.next()) is not None:
        made.append(trial)
        running.append(trial)
        if len(running) == beside:
            search.report_result(done := running.popleft(), TrialStatus.finished, {"val/loss": loss_of(done)})
    assert len(made) == len(grid) == 27
    assert {plain(trial) for trial in made} == {plain(trial) for trial in grid}
    assert search.notes()[-1].startswith("the search ends after 27 of search.num_trials=100: ")


def plain(trial: Trial) -> frozenset[str]:
    """The trial's overrides; with DDP nothing is resharded."""
    return frozenset(word for word in trial.overrides if trial.choices["sharding"] != "ddp" or "reshard" not in word)


@pytest.mark.parametrize("sampler", ["BruteForceSampler", "GridSampler", "NSGAIISampler", "TPESampler"])
def test_samplers_that_know_their_space_end_no_search(parser, compose_trial, sampler: str):
    """A grid's would stop the loop of `optimize`, which is not used here."""
    words = ["precision=fp32,bf16,fp16", "training.grad_accum_steps=int(interval(1,4))"]
    search = searching(parser, compose_trial, "random", *words, trials=99, check=lambda config: None)
    space = {
        "precision": [f"precision={p}" for p in ("fp32", "bf16", "fp16")],
        words[1].partition("=")[0]: [1, 2, 3, 4],
    }
    search._study.sampler = getattr(optuna.samplers, sampler)(*([space] if sampler == "GridSampler" else []))
    assert len({tuple(overrides) for overrides in all_of(search, loss_of)}) == 12


def test_a_large_space_with_few_settings_ends_too(parser, compose_trial, monkeypatch: pytest.MonkeyPatch):
    """Of a key that has no effect there, every value is the same setting."""
    monkeypatch.setattr("fsdp_lab.sweep.search._MOST_REFUSED", 20)
    words = ["sharding=root,per_block", "activation_checkpointing_every=int(interval(1,1000000))"]
    search = searching(parser, compose_trial, "optuna", *words, trials=9)
    assert len(all_of(search)) == 2
    assert "20 random suggestions in a row were duplicates or invalid" in search.notes()[-1]


@pytest.mark.parametrize("fixed", [[], ["training.epochs=0"]])
def test_a_space_of_wrong_values_only_is_an_error_and_so_is_a_value_beside_it(parser, compose_trial, fixed: list[str]):
    search = searching(parser, compose_trial, "random", "training.global_batch_size=-9,-1", *fixed)
    with pytest.raises(
        ConfigError, match=r"training.epochs=0" if fixed else r"training.global_batch_size=-\d is below"
    ):
        search.next()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optimizer.lr=interval(1e-4,inf)", "too wide"),
        ("optimizer.lr=interval(nan,1)", "too wide"),
        ("optimizer.lr=tag(log,interval(1e-4,inf))", "too wide"),
        ("model.rate=interval(-1e308,1e308)", "too wide"),
        ("optimizer.lr=interval(-1,1)", r"optimizer.lr=-1.0 is not above 0"),
        ("training.global_batch_size=int(interval(-9,-1))", "training.global_batch_size=-9 is below 1"),
        ("training.seed=int(interval(0,9223372036854775807))", "training.seed=9223372036854775808 is too large"),
    ],
)
def test_an_interval_that_cannot_be_drawn_from_is_refused_by_its_ends(parser, word: str, says: str):
    """Else each value that is drawn is refused in a line of its own, or ends the command with an OverflowError."""
    with pytest.raises(ConfigError, match=says):
        space_of(parser, word)


def test_what_this_machine_cannot_hold_costs_no_trial(parser, compose_trial):
    search = searching(parser, compose_trial, "random", "cluster.num_workers=2,4096", LR, trials=8, seed=1)
    suggested = all_of(search)
    assert len(suggested) == 8 and not any("cluster.num_workers=4096" in overrides for overrides in suggested)
    assert "needs 4096 CPUs" in search.notes()[0]


def test_a_resumed_search_repeats_nothing_and_makes_up_the_number(parser, compose_trial):
    first = searching(parser, compose_trial, "random", "precision=fp32,bf16,fp16", LR, trials=8)
    before = list(itertools.islice(iter(first.next, None), 5))
    resumed = searching(parser, compose_trial, "random", "precision=fp32,bf16,fp16", LR, trials=8)
    resumed.resume(
        [
            (trial, TrialStatus.finished if i < 3 else TrialStatus.waiting, {"val/loss": 1.0})
            for i, trial in enumerate(before)
        ]
    )
    assert resumed.has_more()
    for trial in before[3:]:
        resumed.report_result(trial, TrialStatus.finished, {"val/loss": 2.0})
    after = all_of(resumed)
    assert len(after) == 3 and not resumed.has_more()
    known = [trial.overrides for trial in before]
    assert not any(overrides in known for overrides in after)
    assert not any(s.startswith("the search ends") for s in resumed.notes()), "it does not suggest the same again"
    values = sorted(t.value for t in resumed._study.get_trials() if t.value is not None)
    assert values == [1.0] * 6 + [2.0] * 2


@pytest.mark.parametrize(
    ("status", "state"),
    [("failed", "FAIL"), ("diverged", "FAIL"), ("interrupted", "FAIL"), ("skipped", "PRUNED"), ("oom", "PRUNED")],
)
def test_only_what_did_not_fit_is_news_for_the_sampler_without_a_value(parser, compose_trial, status: str, state: str):
    search = searching(parser, compose_trial, "optuna", LR, trials=2)
    trial = search.next()
    assert trial is not None
    search.report_result(trial, TrialStatus(status), {"val/loss": 0.0})
    assert [t.state.name for t in search._study.get_trials()] == [state]


@pytest.mark.ci
def test_the_sampler_leaves_settings_that_do_not_fit(parser, compose_trial):
    """The loss falls with the size, and what is above a third of the range needs more than there is."""
    size = "model.hidden_dim=int(interval(1,300))"

    def too_large(end: TrialStatus) -> int:
        return sum(too_large_of(end, seed) for seed in range(3))

    def too_large_of(end: TrialStatus, seed: int) -> int:
        search, result = searching(parser, compose_trial, "optuna", size, "model=mlp", trials=60, seed=seed), 0
        while (trial := search.next()) is not None:
            needed = float(trial.overrides[-1].partition("=")[2])
            fits = needed <= 100
            result += trial.index >= 20 and not fits  # ten at the beginning are drawn at random
            search.report_result(trial, TrialStatus.finished if fits else end, {"val/loss": 1 / needed})
        return result

    assert too_large(TrialStatus.skipped) < too_large(TrialStatus.failed) * 2 / 3


def test_several_objectives(parser, compose_trial):
    wanted = [("memory/peak_bytes", "min"), ("perf/samples_per_s", "max")]
    search = searching(parser, compose_trial, "optuna", LR, trials=4, objectives=wanted)
    figures = [(10, 5), (20, 9), (30, 8), (10, 4)]  # the third is beaten by the second, the fourth by the first
    for memory, speed in figures:
        trial = search.next()
        assert trial is not None
        search.report_result(trial, TrialStatus.finished, {"memory/peak_bytes": memory, "perf/samples_per_s": speed})
    assert sorted(tuple(t.values) for t in search._study.best_trials) == [(10, 5), (20, 9)]
    rows = [{"memory/peak_bytes": float(m), "perf/samples_per_s": float(s)} for m, s in figures]
    assert pareto_front([*rows, {"memory/peak_bytes": 1.0}], wanted) == [0, 1]
    assert pareto_front([rows[1]] * 2, wanted) == [0, 1], "one of two equals does not push the other out"


@pytest.mark.ci
def test_several_objectives_draw_it_too(parser, compose_trial):
    """Both are best at one end of the scale: the last suggestions lie there."""
    wanted = [("memory/peak_bytes", "min"), ("perf/samples_per_s", "max")]

    def mean_of_last(name: str) -> float:
        search = searching(parser, compose_trial, name, "optimizer.lr=interval(1e-9,1)", trials=30, objectives=wanted)
        rates = []
        while (trial := search.next()) is not None:
            rate = trial.config.optimizer.lr
            search.report_result(trial, TrialStatus.finished, {"memory/peak_bytes": rate, "perf/samples_per_s": -rate})
            rates.append(rate)
        return sum(rates[-10:]) / 10

    assert mean_of_last("optuna") < mean_of_last("random") / 1.5


def test_suggestions_are_whole_configurations(parser, compose_trial):
    trial = searching(parser, compose_trial, "random", LR, "model=mlp", "model.hidden_dim=int(interval(16,64))").next()
    assert trial is not None and isinstance(trial.config, SweepConfig)
    assert 1e-5 <= trial.config.optimizer.lr <= 1e-1
    assert 16 <= trial.config.model.arguments["hidden_dim"] <= 64
