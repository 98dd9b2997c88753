"""Whatever is typed ends with a result or with one message: never with a traceback. Every key, both commands.

In this process, for the sake of time: the commands' own `main`, in which only the training and the forecasting that
would follow are left out.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from fsdp_lab.commands import forecast as forecast_command
from fsdp_lab.commands import main as trial_command
from fsdp_lab.config import all_keys
from fsdp_lab.config.conf import groups
from fsdp_lab.sweep import start

VALUES = (
    "", "null", "true", "off", "-1", "0", "1", "3", "1.5", "1e400", "-inf", "nan", "abc", "'a b'", "é", "[]", "[1,2]",
    "[a:min]", "{}", "{a:1}", "9223372036854775808", "-9223372036854775809", "4611686018427387904", "1,2", "a,b",
    "choice(1,x)", "range(1,4)", "range(0,1,0.3)", "interval(0,1)", "glob(*)", "tag(a,1)", "shuffle(1,2)", "int(2.5)",
    "${per_worker:8}", "${per_worker:x}", "${oc.env:NO_SUCH_NAME}", "${nothing.here}", "???", "..", "/proc/x",
    "http://user:word@127.0.0.1:1/x", "$(x)", "a=b", "a:b", "(", "]", "\\", "--x",
)  # fmt: skip
PARTS = 16  # of the commands: one runs in `make test`, three in `make ci`, and the others in `make test-all`
# One cell: a grid over the default axes is the same, 36 times.
ONE_CELL = ("sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=always")


def commands() -> list[list[str]]:
    """Each key and group with a value drawn at random; some added or taken away, half of them in a sweep."""
    rng = random.Random(20261121)
    made = []
    for key in [*all_keys(), *groups(), "nonsense", "model._target_", "hydra.run.dir"]:
        for value in rng.sample(VALUES, 1):
            sign = rng.choice(["", "", "", "+", "++", "~"])
            word = f"{sign}{key}={value}" if sign != "~" or rng.random() < 0.5 else f"~{key}"
            sweep = rng.random() < 0.5
            fixed = [w for w in ONE_CELL if w.partition("=")[0] != key] if sweep else []
            made.append([*fixed, word, *(["-m"] if sweep else [])])
    return made


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "start_sweep", lambda plan: 0)
    monkeypatch.setattr(forecast_command, "run", lambda plan, swept, as_code: 0)


def status_of(main: Callable[[], int | None], words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["fsdp_lab", *words])
    try:
        return main() or 0
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(n, marks=pytest.mark.ci if n < 4 else pytest.mark.full) for n in range(1, PARTS))],
)
@pytest.mark.parametrize("main", [trial_command.main, forecast_command.main], ids=["fsdp_lab", "forecast"])
@pytest.mark.usefixtures("nothing_runs")
def test_whatever_is_typed_ends_with_a_message(
    main: Callable[[], int | None], part: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    typed = commands()[part::PARTS]
    result, observed = [], 0
    for words in typed:
        try:
            status = status_of(main, words, monkeypatch)
        except Exception as error:  # noqa: BLE001 - every one is a finding
            result.append(f"{' '.join(words)}: {type(error).__name__}: {error}")
            continue
        out, err = capsys.readouterr()
        if "Traceback" in out + err or status not in (0, 2) or (status == 2 and len(err.splitlines()) != 1):
            result.append(f"{' '.join(words)}: status {status}: {err[-300:]}")
        observed += status == 2
    assert not result, "\n".join(result)
    assert observed > len(typed) / 2, "most of these are mistakes"
