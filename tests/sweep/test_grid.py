"""Overrides -> trials. What is expected is written out, or comes from Hydra's own sweeper."""

from __future__ import annotations

import itertools
import shlex
import subprocess

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.sweep.grid import enumerate_grid, swept_keys, unescaped


def cells(*axes: str) -> list[list[str]]:
    """`cells("a=1,2", "b=3")` -> [["a=1", "b=3"], ["a=2", "b=3"]]; values are parted by `|` or a comma."""
    split = []
    for axis in axes:
        key, _, values = axis.partition("=")
        split.append([f"{key}={value}" for value in values.split("|" if "|" in values else ",")])
    return [list(cell) for cell in itertools.product(*split)]


PRINTED = {
    r"s3\://bucket/prefix": "s3://bucket/prefix",
    r"127.0.0.1\:6379": "127.0.0.1:6379",
    r"sqlite\:////srv/my\ runs/a.db": "sqlite:////srv/my runs/a.db",
    r"$\{per_worker\:64\}": "${per_worker:64}",
    r"a\=b\:c": r"a\=b\:c",  # Hydra takes no bare `=`
    r"a\,b": r"a\,b",  # would be two values
    r"C\:\\x": r"C:\x",
    "'a, b'": "'a, b'",
    "fp32": "fp32",
}


def test_an_override_is_printed_as_hydra_and_a_shell_read_it():
    assert [unescaped(f"key={value}") for value in PRINTED] == [f"key={plain}" for plain in PRINTED.values()]
    words = shlex.join(f"key={plain}" for plain in PRINTED.values())
    command = ["bash", "-c", f"printf '%s\\n' {words}"]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    parser = OverridesParser.create()
    assert [parser.parse_override(word).value() for word in read] == [
        parser.parse_override(f"key={value}").value() for value in PRINTED
    ]


TABLE = {
    "list": (["training.epochs=1,2"], cells("training.epochs=1,2")),
    "choice": (["training.seed=choice(3,1,2)"], cells("training.seed=3,1,2")),
    "range": (["training.epochs=range(1,4)"], cells("training.epochs=1,2,3")),
    "range with step": (["training.epochs=range(1,6,2)"], cells("training.epochs=1,3,5")),
    "group": (["sharding=root,per_block"], cells("sharding=root,per_block")),
    "glob": (["sharding=glob(per_*)"], cells("sharding=per_block,per_layer")),
    "glob without": (["precision=glob(*,exclude=*16*)"], cells("precision=float8,fp32,tf32")),
    "sort": (["training.seed=sort(3,1,2)"], cells("training.seed=1,2,3")),
    "sort reversed": (["training.seed=sort(3,1,2,reverse=true)"], cells("training.seed=3,2,1")),
    "fixed": (["optimizer.lr=1e-3", "sharding=root"], [["optimizer.lr=0.001", "sharding=root"]]),
    "lists of numbers": (["optimizer.lr=1e-3,1e-2"], [["optimizer.lr=0.001"], ["optimizer.lr=0.01"]]),
    "two axes, the last fastest": (
        ["sharding=root,per_block", "training.seed=1,2"],
        cells("sharding=root,per_block", "training.seed=1,2"),
    ),
    "fixed among axes": (
        ["training.seed=1,2", "offload=cpu", "training.epochs=3,4"],
        cells("training.seed=1,2", "offload=cpu", "training.epochs=3,4"),
    ),
    "added key": (["+hydra.x=1,2"], cells("+hydra.x=1,2")),
    "taken out": (["~experiment", "training.seed=1,2"], [["~experiment", f"training.seed={n}"] for n in (1, 2)]),
    "quoted": (["tracking.experiment='a,b'"], [["tracking.experiment='a,b'"]]),
    "nothing": ([], [[]]),
}


@pytest.mark.parametrize("name", TABLE)
def test_arguments_become_these_trials_in_the_order_of_hydras_own_sweeper(parser: OverridesParser, name: str):
    arguments, expected = TABLE[name]
    assert enumerate_grid(parser, {}, arguments) == expected
    if name not in ("taken out", "nothing"):
        (hydras,) = BasicSweeper.split_arguments(parser.parse_overrides(arguments), max_batch_size=None)
        assert hydras == expected


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("choice('1',1)", ["1", 1]),
        ("'1',1", ["1", 1]),
        ("str(1)", ["1"]),
        ("str(choice(1,2))", ["1", "2"]),
        ("str([1,[2]]),[1,[2]]", [["1", ["2"]], [1, [2]]]),
        ("choice('介绍','a, b','true')", ["介绍", "a, b", "true"]),
        ("choice({a:'1'},{a:1})", [{"a": "1"}, {"a": 1}]),
        ("{a:1},{b:2}", [{"a": 1}, {"b": 2}]),
    ],
)
def test_each_spelling_of_a_value_stays_that_value(parser: OverridesParser, typed: str, values: list[object]):
    """Hydra's own sweeper drops the quotes inside a function."""
    grid = enumerate_grid(parser, {}, [f"model.x={typed}"])
    assert [parser.parse_override(word).value() for (word,) in grid] == values


@pytest.mark.parametrize(
    "typed",
    [
        ["training.seed=1,2", "precision=fp16"],
        ["offload=cpu,cpu_unpinned", "sharding=per_block"],
        ["training.seed=1,2", "offload=none,cpu", "sharding=per_layer,size_based"],
    ],
)
def test_the_order_with_default_axes_is_that_of_hydras_own_sweeper(parser: OverridesParser, typed: list[str]):
    """Hydra's sweeper puts its `params` before the command line, and a param that is typed too keeps its place."""
    params = ["sharding=ddp,root", "offload=none,cpu"]
    (hydras,) = BasicSweeper.split_arguments(parser.parse_overrides(params + typed), max_batch_size=None)
    assert enumerate_grid(parser, dict(p.split("=") for p in params), typed) == hydras


def test_shuffle_gives_every_value_once(parser: OverridesParser):
    grid = enumerate_grid(parser, {}, ["training.seed=shuffle(range(0,20))"])
    assert len(grid) == 20
    assert {tuple(cell) for cell in grid} == {(f"training.seed={n}",) for n in range(20)}


DEFAULTS = {"sharding": "ddp,root", "offload": "none,cpu"}


@pytest.mark.parametrize(
    ("defaults", "arguments", "expected"),
    [
        (DEFAULTS, [], cells("sharding=ddp,root", "offload=none,cpu")),
        (DEFAULTS, ["sharding=per_block"], cells("sharding=per_block", "offload=none,cpu")),
        (DEFAULTS, ["offload=cpu", "sharding=root"], [["sharding=root", "offload=cpu"]]),
        (DEFAULTS, ["sharding=root,per_layer"], cells("sharding=root,per_layer", "offload=none,cpu")),
        ({**DEFAULTS, "offload": None}, [], cells("sharding=ddp,root")),
        ({"sharding": None, "offload": None}, ["training.seed=1"], [["training.seed=1"]]),
        (DEFAULTS, ["~offload"], [["sharding=ddp", "~offload"], ["sharding=root", "~offload"]]),
        (DEFAULTS, ["+offload=cpu"], cells("sharding=ddp,root", "+offload=cpu")),
        (DEFAULTS, ["training.seed=1,2"], cells("sharding=ddp,root", "offload=none,cpu", "training.seed=1,2")),
    ],
)
def test_default_axes_are_swept_until_they_are_named(parser, defaults, arguments, expected):
    grid = enumerate_grid(parser, defaults, arguments)
    assert sorted(map(sorted, grid)) == sorted(map(sorted, expected))


def test_swept_keys_are_those_that_differ():
    grid = [["sharding=root", "+a.b=1", "offload=cpu"], ["sharding=root", "+a.b=2", "offload=none"]]
    assert swept_keys(grid) == ["a.b", "offload"]
    assert swept_keys([]) == []
    assert swept_keys([["sharding=root"]]) == []
