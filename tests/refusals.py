"""Every refusal of a command line: `tests/messages.txt` is the table. Its headings say who refuses the words below.

To add one, write `$ <words>` below its heading and let `python -m tests.refusals` write the messages: look at what has
changed. The tests are in `tests/test_refusals.py`.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_lab.config import ConfigError
from fsdp_lab.config.checks import check_keys
from fsdp_lab.machine import hardware

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).with_name("messages.txt")
CONFIGS = ROOT / "tests/workloads/hf/configs"
PASSWORD = "pass4711"  # each one in the table: no message repeats it
SLOW = ("ray", "torch", "mlflow", "transformers")  # no refusal imports them, but for the next two kinds
COMMANDS = TRIAL, FORECAST, SWEEP = "fsdp_lab", "fsdp_lab.forecast", "fsdp_lab -m"
_DATA = "a trial that has read the data"  # the last of a trial's rows: it imports PyTorch
_TRANSFORMERS = "a trial that has read a model of transformers"  # which it imports, too
RULE = "a rule between keys"  # which needs no command
COMBINATION = "a rule by which a grid leaves cells out"
_HEADINGS = {
    "every command": COMMANDS,
    "a trial and a forecast": (TRIAL, FORECAST),
    "a trial and a sweep": (TRIAL, SWEEP),
    "a forecast and a sweep": (FORECAST, SWEEP),
    "a trial": (TRIAL,),
    "a sweep": (SWEEP,),
    _DATA: (TRIAL,),
    _TRANSFORMERS: (TRIAL,),
    RULE: (FORECAST,),
    COMBINATION: (FORECAST,),
}
_ONE_CELL = ("sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=always")
# What is in the folder of each command: a user's options that lack something or would be ignored, a project, data.
_FILES = {
    "mine/task/tab.yaml": "loss: a.b\n\tunit: samples\n",
    "mine/experiment/no_package.yaml": "defaults:\n  - override /model: mine\n",
    "mine/experiment/no_override.yaml": "# @package _global_\nmodel:\n  _target_: fractions.Fraction\n  width: 4\n",
    "mine/experiment/no_head.yaml": "training:\n  epochs: 1\n",
    "mine/experiment/listed.yaml": "# @package _global_\nhydra:\n  sweeper:\n    params: {precision: [fp32, bf16]}\n",
    "mine/experiment/team/small.yaml": "# @package _global_\ntraining:\n  epochs: 1\n",
    "ours/optimizer/adam.yaml": "lr: 0.5\n",
    "ignored/model/mine.yml": "",
    "my_project/__init__.py": "",
    "my_project/broken.py": "def",
    "my_project/needs.py": "import nowhere_to_be_found",
    "my_project/net.py": """
import math as F

a_number = 3

class Block: pass

class Net:
    def __init__(self, width, depth=2): pass

class Wraps:
    def __init__(self, inner, others=()): pass

class Linear:
    def __init__(self, rows, columns): pass

class Summariser:
    def __init__(self, vocab_size=384): pass

class Corpus:
    def __init__(self, split, noise=0.0): pass

class Loss:
    def __init__(self, weight=None): pass

def without_split(noise): pass
def loader(split, batch_size, rank, world_size, seed, rows=9): pass
def without_rank(split, batch_size, world_size, seed): pass
def example(size): pass
def loss(model, batch): pass
def loss_of_the_model_alone(model): pass
""",
    "columns/wikihowAll.csv": "title,summary,text\n",
    "spaces/wikihowAll.csv": "a b\n",
    "words.json": '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}}',
    **{f"{name}.json": (CONFIGS / f"{name}.json").read_text() for name in ("gpt2", "llama", "t5", "vit")},
    "bert.json": '{"model_type": "bert"}',
    "bart.json": '{"model_type": "bart", "vocab_size": 384, "max_position_embeddings": 32}',
    "m2m.json": '{"model_type": "m2m_100", "vocab_size": 384}',
    "kernel.json": '{"model_type": "gpt2", "parts": [{"_attn_implementation_internal": "evil/kernel"}]}',
    "quantized.json": '{"model_type": "gpt2", "quantization_config": {"quant_method": "fp8"}}',
}


@dataclass(frozen=True)
class Refusal:
    """A row of the table."""

    heading: str  # who refuses the words
    words: str  # as they are typed; variables of the environment come first
    message: str  # one line, the same from every command

    @property
    def commands(self) -> tuple[str, ...]:
        return _HEADINGS[self.heading]

    @property
    def imports(self) -> tuple[str, ...]:
        """The slow libraries that reading the data takes, or a model that is a class."""
        if self.heading == COMBINATION and "model=lm_tiny" in self.words:
            return ("torch",)
        return {_DATA: ("torch",), _TRANSFORMERS: ("torch", "transformers")}.get(self.heading, ())


def read_table() -> list[Refusal]:
    """Return every row of `tests/messages.txt`."""
    heading, rows = "", []
    for block in GOLDEN.read_text().strip().split("\n\n"):
        first, _, message = block.partition("\n")
        if first.startswith("# "):
            heading = first[2:]
        else:
            rows.append(Refusal(heading, first.removeprefix("$ "), message))
    return rows


def write_table() -> None:
    """Write each message as the row's first command, or the rule, words it."""
    heading, blocks = "", []
    rows = read_table()
    asked = [(row.words, row.commands[0]) for row in rows if row.heading not in (RULE, COMBINATION)]
    answered = {answer["words"]: answer["message"].strip() for answer in answers(asked)}
    for row in rows:
        if row.heading != heading:
            blocks.append(f"# {(heading := row.heading)}")
        blocks.append(f"$ {row.words}\n{answered.get(row.words) or answer_rule(row)}")
    GOLDEN.write_text("\n\n".join(blocks) + "\n")


def answers(asked: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return what commands answer to the words of rows, one after another in a process that has imported nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.refusals", "--answer"],
        input=json.dumps(asked), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=500, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def _answer_all(asked: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Answer in this process, as on a machine with 64 cores, without GPUs."""
    with ExitStack() as patched:
        patched.enter_context(mock.patch.multiple(hardware, num_cpus=lambda: 64, num_gpus=lambda: 0))
        folder = patched.enter_context(tempfile.TemporaryDirectory())
        patched.enter_context(chdir(folder))
        for name, text in _FILES.items():
            file = Path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        os.environ["PATH"] = folder
        sys.path.insert(0, folder)  # as `python -m` has it
        for words, command in asked:
            yield _answer(words, command)
            shutil.rmtree("outputs", ignore_errors=True)


def _answer(words: str, command: str) -> dict[str, Any]:
    """Let a command run, but for the training and the forecasting that would follow.

    Its message is without the name of the command, and without what differs between machines. `left` is what a sweep
    or a forecast left in its folder; Hydra makes that of a trial.
    """
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra

    from fsdp_lab.commands import forecast as forecast_command
    from fsdp_lab.commands import main as trial_command

    main: Callable[[], int | None] = forecast_command.main if command == FORECAST else trial_command.main
    variables, typed = _typed(words, command)
    GlobalHydra.instance().clear()
    folder, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [command, *typed]),
        mock.patch.dict(os.environ, variables),
        mock.patch("fsdp_lab.sweep.start.start_sweep", return_value=0),
        mock.patch.object(forecast_command, "run", return_value=0),
        mock.patch.object(Hydra, "get_mode", return_value=None),  # it composes all, to see that no row has hydra.mode
        redirect_stdout(out),
        redirect_stderr(err),
        chdir(folder),
    ):
        try:
            status = main() or 0
        except SystemExit as end:
            status = int(end.code or 0)
        except Exception:  # noqa: BLE001 - a bug, which Python would show so
            traceback.print_exc()
            status = 1
    message = err.getvalue().removeprefix(f"{command.removesuffix(' -m')}: ").replace(folder, "<folder>")
    left = [] if command == TRIAL else sorted({*os.listdir()} - {name.partition("/")[0] for name in _FILES})
    imported = [name for name in SLOW if name in sys.modules]
    return {"words": words, "command": command, "status": status, "out": out.getvalue(), "message": message,
            "imported": imported, "left": left}  # fmt: skip


def _typed(words: str, command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the arguments. A sweep is of one cell, instead of the 36 of the default axes."""
    typed = shlex.split(words)
    variables = [word for word in typed if re.match("[A-Z_]+=", word)]
    typed = typed[len(variables) :]
    if command == SWEEP:
        groups = [word.lstrip("+").partition("=")[0].partition(".")[0] for word in typed]
        typed = [*typed, *(word for word in _ONE_CELL if word.partition("=")[0] not in groups), "-m"]
    return dict(variable.split("=", 1) for variable in variables), typed


def answer_rule(row: Refusal) -> ConfigError | None:
    """Return what the rules between the keys have against the words of a row, without a command."""
    from tests.ranks import read_config  # it imports PyTorch

    try:
        config = read_config(None, shlex.split(row.words))
        check_keys(config, 2 if config.cluster.num_workers is None else config.cluster.num_workers)
    except ConfigError as error:
        return error
    return None


if __name__ == "__main__":
    if sys.argv[1:] == ["--answer"]:
        print(json.dumps([*_answer_all(json.load(sys.stdin))]))
    else:
        write_table()
