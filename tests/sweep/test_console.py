"""The live table, as a terminal shows it."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console as RichConsole

from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.listeners.table import trial_table
from fsdp_lab.sweep.state import SweepState, TrialState


def test_a_line_said_above_the_table_leaves_its_styles_alone(compose_trial: Callable[..., object]):
    shown = io.StringIO()
    state = SweepState([TrialState(compose_trial([], 0))], [])  # type: ignore[arg-type]
    console = Console(state, [], RichConsole(file=shown, force_terminal=True, width=160))
    with console:
        console.update()
        console.say("a [bold]line[/] of somebody's")
        console.update()
    assert "waiting" in shown.getvalue() and "[dim]" not in shown.getvalue()
    assert "a [bold]line[/] of somebody's" in shown.getvalue()


def test_a_number_that_a_search_has_drawn_has_six_digits(compose_trial: Callable[..., object]):
    words = (["optimizer.lr=0.00123456789"], ["optimizer.lr=1e-05"], ["optimizer.lr=0.1"])
    states = [TrialState(compose_trial(typed, number)) for number, typed in enumerate(words)]  # type: ignore[arg-type]
    table = trial_table(SweepState(states, []), ["optimizer.lr"], list(enumerate(states)))
    assert [*table.columns[1].cells] == ["0.00123457", "1e-05", "0.1"]
    seeds = trial_table(SweepState(states, []), ["model.hidden_dim"], list(enumerate(states)))
    assert {*seeds.columns[1].cells} == {str(states[0].trial.values["model.hidden_dim"])}


def test_the_mark_of_a_speed_is_explained(compose_trial: Callable[..., object]):
    for others, told in ((0.3, True), (0.2, False)):
        state = TrialState(compose_trial([], 0))  # type: ignore[arg-type]
        state.status = TrialStatus.finished
        state.metrics = {"epoch": 1, "perf/samples_per_s": 9.0, "perf/others_cpu": others}
        shown = io.StringIO()
        Console(SweepState([state], []), [], RichConsole(file=shown, width=160)).final()
        note = "† Others used more than 25 % of the cores meanwhile: this speed does not count."
        assert (note in shown.getvalue()) == ("9.0†" in shown.getvalue() or "9†" in shown.getvalue()) == told


def test_the_table_has_no_column_that_no_trial_fills(compose_trial: Callable[..., object]):
    state = TrialState(compose_trial([], 0))  # type: ignore[arg-type]
    state.metrics = {"epoch": 1, "train/loss": 0.5, "perf/samples_per_s": 9.0}
    heads = [column.name for column in trial_table(SweepState([state], []), [], [(0, state)]).columns]
    assert {"epoch", "train loss", "samples/s"} <= {*heads}
    assert not {"tokens/s", "bits/byte"} & {*heads}
