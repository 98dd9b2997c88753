"""The pages: their commands run, the site builds, the notebook runs. tests/test_reference.py has the reference.

Each command is run by a test with the mark `@pytest.mark.documents("command")`, or its page says why none runs it.
A mark has the whole command, or `...` for a part of a long one. Commands of trials, sweeps and forecasts need none:
they are run here.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import forked
from tests.conftest import ROOT, STORE, python_blocks, run_cli
from tests.workloads.hf.cases import plain_model

# Every page of the site and of the repository.
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md", "benchmarks/README.md", "docs/*.md",
         "docs/reference/*.md", "experiments/*/README.md")  # fmt: skip
# The programs that a command begins with, after the variables that it sets.
_PROGRAM = re.compile(
    r"([A-Z_]+=\S+ )*(\S*python3?|make|torchrun|pytest|fsdp-lab|eval|ray|kubectl|docker|sbatch|squeue|scancel|mlflow|hf"
    r"|pip|git|sudo|mkdir|systemctl|\(?s?crontab|\.ci/\w+) "
)
_BLOCK = re.compile(r"((?:^<!-- not run by a test[^\n]*-->\n)*)^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- not run by a test(?:, `([^`]+)`)?: ([^\n]+) -->")
# What is appended to a command here, in the place of the page's own values: one worker in this process, one step.
QUICK = {
    "engine": "inline", "cluster.num_workers": "1", "training.max_steps": "1", "training.epochs": "1",
    "training.timing_warmup_steps": "0", "data.num_train": "128", "data.num_val": "32",
    "training.global_batch_size": "32",
}  # fmt: skip
# Of these, a trial in this process has neither.
NEEDS_RAY = ("scheduler=", "forecast.prune=")
# What makes commands small that are too large for a test, by what they contain.
SMALLER = {
    "search.num_trials=20": {"search.num_trials": "3"},
    "fsdp_lab.forecast -m model=llama3": {"model.num_layers": "2"},
    "fsdp_lab.forecast model=llama3": {"model.num_layers": "2"},
    "model=vit_h_14": {"model.num_layers": "2", "cluster.num_workers": "8", "precision": "bf16_mixed"},
    "model=hf_causal_lm": {"data.seq_len": "16"},
    "python -m fsdp_lab -m sharding=ddp,per_block": {"precision": "fp32", "offload": "none"},
    "python -m fsdp_lab -m task=language": {"offload": "none", "reshard_after_forward": "always"},
    "experiment=precision_and_offload": {"precision": "fp32,bf16"},
}


@dataclass(frozen=True)
class Command:
    """A command in a block of a page.

    Why no test runs it stands before its block: `<!-- not run by a test: reason -->`, or, for those that begin so,
    `<!-- not run by a test, `command`: reason -->`.
    """

    place: str  # its file and the line of its block
    text: str  # in one line, without a comment
    reason: str
    output: str  # the lines that the page shows of it

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


@cache
def read_pages() -> tuple[list[Command], list[str]]:
    """Return every command on every page, in the order of the pages, and the reasons that are given for no command."""
    commands, idle = [], []
    for file in sorted(file for pattern in PAGES for file in ROOT.glob(pattern)):
        text = file.read_text()
        blocks = list(_BLOCK.finditer(text))
        for block, following in zip_longest(blocks, blocks[1:]):
            if block[2] not in ("", "sh"):
                continue
            place = f"{file.relative_to(ROOT)}:{text[: block.start(2)].count(chr(10)) + 1}"
            typed = read_block(block[3])
            reasons = _REASON.findall(block[1])
            idle += [f"{place}: {why}" for to, why in reasons if not any(one.startswith(to) for one in typed)]
            below = ""
            if following and following[2] == "text" and "\n#" not in text[block.end() : following.start()]:
                below = following[3]
            for one in typed:
                reason = next((why for to, why in reasons if one.startswith(to)), "")
                commands.append(Command(place, one, reason, below if len(typed) == 1 else ""))
    return commands, idle


def read_block(block: str) -> list[str]:
    """Return the commands of a block, each in one line, without its comment."""
    lines = [line for line in re.sub(r" *\\\n *", " ", block).splitlines() if not line.startswith(" ")]
    typed = [re.split(r" +# | {3,}", line)[0].strip() for line in lines]
    return [one for one in typed if _PROGRAM.match(f"{one} ")]


@cache
def marked() -> dict[str, str]:
    """Return each command for which a test has a mark, as the mark has it, with the test."""
    found = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.documents":
                    found |= {ast.literal_eval(word): f"{file.name}::{function.name}" for word in call.args}
    return found


def is_for(mark: str, command: Command) -> bool:
    return re.fullmatch(".*".join(map(re.escape, mark.split("..."))), command.text) is not None


def runs_here(command: Command, start: str) -> bool:
    """Return whether a command needs no mark: it begins so, can be typed as it is, and its page gives no reason."""
    return (
        f"{command.text} ".startswith(f"{start} ")
        and "<" not in command.text
        and not command.reason
        and not any(is_for(mark, command) for mark in marked())
    )


def run_here(start: str) -> list[Any]:
    """Return a parameter for each different command that begins so and needs no mark."""
    first = {command.text: command for command in reversed(read_pages()[0]) if runs_here(command, start)}
    return [pytest.param(command, id=f"{command.place}: {text[:80]}") for text, command in first.items()]


TRIALS, FORECASTS = run_here("python -m fsdp_lab"), run_here("python -m fsdp_lab.forecast")


def test_each_command_is_run_by_a_test_or_says_why_not():
    commands, wrong = read_pages()
    here = {each.values[0].text for each in (*TRIALS, *FORECASTS)}
    for command in commands:
        is_run = command.text in here or any(is_for(mark, command) for mark in marked())
        if is_run == bool(command.reason):
            wrong = [*wrong, f"{command.place}: {command.text}: {'a test runs it' if is_run else 'no test runs it'}"]
    gone = [f"{test}: {mark}" for mark, test in marked().items() if not any(is_for(mark, each) for each in commands)]
    assert not wrong + gone, "\n".join([*wrong, "On no page:", *gone])


def replaced(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the words with other values of some keys, in the place of those that are typed."""
    kept = [word for word in words if word.partition("=")[0] not in values]
    return [*kept, *(f"{key}={value}" for key, value in values.items())]


def made_small(command: Command) -> list[str]:
    """Return the words after `-m` of a command, with what makes it small where it is too large for a test."""
    values = {key: value for part, smaller in SMALLER.items() if part in command.text for key, value in smaller.items()}
    return replaced(command.words[2:], values)


# For docs/clusters.md, in which it is the reader's own.
_GPT = """
from torch import nn


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50304, 16), nn.Linear(16, 50304)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files of two pages, where their first lines say, and tiny models for docs/hugging-face.md."""
    text = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("your-model", "optimizer"))
    for language, block in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if language in ("python", "yaml"):
            name = next(line for line in block.splitlines() if not line.startswith("# @")).removeprefix("# ")
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(block)
    (tmp_path / "my_gpt").mkdir()
    (tmp_path / "my_gpt" / "model.py").write_text(_GPT)
    for name in ("gpt2", "llama", "vit"):
        plain_model(name).save_pretrained(tmp_path / "my_models" / name)  # type: ignore[operator]
    return tmp_path


def is_in(shown: str, printed: str, *, numbers: bool = True) -> bool:
    """Return whether a command printed what a page shows, where `...` stands for any lines, or any part of a line.

    Without `numbers`, figures may differ, and spaces and rules in their length.
    """

    def pattern(line: str) -> str:
        if line == "...":
            return r"(?:.*\n)*?"
        escaped = re.escape(line.rstrip()).replace(r"\.\.\.", ".*")
        if not numbers:
            escaped = re.sub(r"\d+(?:(?:\\\.|,)\d+)*", lambda _: r"\d[\d.,]*", escaped)
            escaped = re.sub(r"(?:\\ )+", lambda _: r" +", re.sub("─+", "─+", escaped))
        return rf"{escaped} *\n"

    return re.search("^" + "".join(map(pattern, shown.splitlines())), printed, re.MULTILINE) is not None


@pytest.mark.timeout(1600)
@pytest.mark.full
@pytest.mark.parametrize("command", FORECASTS)
def test_a_forecast_of_a_page_runs(command: Command, project: Path):
    """One whose output the page shows as it is printed: six and twelve large settings take minutes."""
    words = command.words[2:] if command.output else made_small(command)
    done = forked.run(project, *words, seconds=1500, environment={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert (found := list(project.glob("outputs/**/forecast.csv"))), done.stdout
    assert len(found[0].read_text().splitlines()) > 1
    if command.output:
        assert is_in(command.output, done.stdout), f"{command.place} prints:\n{done.stdout}"


@pytest.mark.full
@pytest.mark.parametrize("command", TRIALS)
def test_a_trial_or_sweep_of_a_page_runs(command: Command, project: Path):
    engine = {"engine": "ray"} if any(part in command.text for part in NEEDS_RAY) else {}
    done = run_cli(project, *replaced(made_small(command)[1:], {**QUICK, **engine}), STORE)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = project.glob("outputs/**/results.csv")
    with results.open() as lines:
        assert {row["status"] for row in csv.DictReader(lines)} <= {"finished", "stopped", "skipped"}
    assert is_in(command.output, done.stdout, numbers=False), f"{command.place} prints:\n{done.stdout}"


@pytest.mark.full
def test_the_script_of_your_model_runs(project: Path):
    done = subprocess.run([sys.executable, "train.py"], cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# What depends on the machine is which setting is fastest, by how much, and sentences about noise between these.
_ANSWER = (
    r"Recommended: sharding=\w+ reshard_after_forward=\w+: [\d,.]+ samples/s, [\d.]+ MiB at the peak, ?",
    r"val/loss 1\.608\.",
    r"(?:It|In these it|Tied) .*",
    r"Compared with it, changing:",
    *3 * [r"  .* the speed(?: \(tied\))?, .* the same val/loss"],
    r"4 settings have the losses of a plain loop of your model \(3 steps, (?:to \d+e-\d+|exactly)\)\.",
    r"One run each: the spread between runs is not known; repeats=3 measures it\.",
    r"  python -m fsdp_lab sharding=\w+ precision=fp32 offload=none reshard_after_",
)


def cells(line: str) -> list[str]:
    """Return the cells of a line of the table, without samples/s, the eighth, and without marks of the best."""
    found = line.replace(">", " ").replace("*", " ").split()
    return [*found[:7], *found[8:]]


@pytest.mark.ci
@pytest.mark.documents("make sweep")
def test_make_sweep_types_and_prints_what_the_readme_shows(tmp_path: Path):
    typed = subprocess.run(["make", "-n", "sweep"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    words = next(after for line in typed.stdout.splitlines() if (after := line.partition(" -m fsdp_lab ")[2]))
    readme = (ROOT / "README.md").read_text()
    assert f"`python -m fsdp_lab {words}`" in readme.replace("\n", " ")
    shown = readme.partition("`make sweep` prints:\n\n```\n")[2].partition("\n```")[0]
    environment = {**os.environ, "COLUMNS": "100"}
    done = forked.run(tmp_path, "fsdp_lab", *shlex.split(words), STORE, seconds=400, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout[done.stdout.index("4 of 4 trials") :]
    assert [cells(line) for line in printed.splitlines()[1:9]] == [cells(line) for line in shown.splitlines()[1:9]]
    assert all(re.search("\n(?:.*\n)*?".join(_ANSWER), text) for text in (shown, printed)), printed


def test_the_picture_of_the_readme_shows_its_table():
    """Trial 3 of the table has 648 samples/s: worked from the page by eye."""
    rows = SimpleNamespace(**run_path(str(ROOT / "docs/figures.py"))).readme_rows()
    assert len(rows) == 4 and rows[3] == ("per_block, never", 648.0, 8.39)
    picture = (ROOT / "docs/figures/sweep.svg").read_text()
    assert all(f">{name}: {speed:,.0f}<" in picture for name, speed, _ in rows), "python docs/figures.py sweep"


def lay_fashion_mnist(folder: Path, **sizes: int) -> None:
    """Write random images into the published files' form: 16 bytes before the pixels, 8 before the labels."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    torch.manual_seed(0)
    for stem, count in sizes.items():
        for kind, head, shape_of in (("images-idx3", 0x803, (28, 28)), ("labels-idx1", 0x801, ())):
            values = torch.randint(0, 10, (count, *shape_of), dtype=torch.uint8)
            header = b"".join(number.to_bytes(4, "big") for number in (head, count, *shape_of))
            (raw / f"{stem}-{kind}-ubyte").write_bytes(header + values.numpy().tobytes())


@pytest.mark.ci
@pytest.mark.documents(
    "python -m fsdp_lab experiment=ray_template data.root=<folder that holds FashionMNIST/raw> data.download=false"
)
def test_the_preset_ray_template_trains_and_its_model_predicts(tmp_path: Path):
    """On a few images, by one worker without Ray. One step from a head of zeros would leave equal logits."""
    lay_fashion_mnist(tmp_path, train=256, t10k=64)
    words = replaced(["experiment=ray_template", "data.root=.", "data.download=false"], QUICK)
    words = replaced(words, {"training.max_steps": "4", "data.num_val": "64"})
    done = run_cli(tmp_path, *words, STORE)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = tmp_path.glob("outputs/**/results.csv")
    with results.open() as lines:
        (row,) = csv.DictReader(lines)
    assert row["status"] == "finished"
    code = python_blocks("docs/reference/api.md", str(results.parent))[-1].replace("outputs/data", ".")
    predicted = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    ((accuracy, loss),) = re.findall(r"accuracy ([0-9.]+), loss ([0-9.]+)", predicted.stdout)
    assert float(accuracy) == pytest.approx(float(row["val/accuracy"]), abs=1e-4)
    assert float(loss) == pytest.approx(float(row["val/loss"]), abs=1e-3)  # which was measured in float16


def test_limitations_say_what_committed_runs_on_gpus_have_seen():
    """A run's own rows, and those that were forecast again after it."""
    page = " ".join((ROOT / "docs" / "limitations.md").read_text().split())
    files = [*(ROOT / "experiments" / "gpu" / "results").glob("*.json")]
    assert files
    for file in files:
        table = json.loads(file.read_text())
        losses = sum("test_a_setting_learns" in row["check"] and row["outcome"] == "passed" for row in table["rows"])
        peaks = sum("peak_bytes" in row["figures"] for row in table["rows"]) + len(table.get("recomputed", ()))
        assert f"{table['device'].removeprefix('NVIDIA ')} with PyTorch {table['torch'][:4]}" in page
        assert f"losses of {losses} settings, {peaks} peaks of memory" in page


_BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # read with the site
_LONGEST, _MOST_WORDS = 25, 24_000  # words of a sentence, and of all pages


def _sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page, without its blocks, tables and headings; code and a link count as a word each."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    for part in re.split(r"\n\s*\n|\n *- |\n\d+\. |\n\|[^\n]*|\n#+ [^\n]*", text):
        part = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", " ".join(part.split())))
        yield from re.split(r"(?<=[.!?:;])\s+", part)


def test_pages_are_short_and_so_are_their_sentences():
    """Claims are generated from the tests, and not counted."""
    files = [file for pattern in PAGES for file in ROOT.glob(pattern) if file.name != "claims.md"]
    files.append(ROOT / "CHANGELOG.md")
    sentences = ((file.name, one) for file in files for one in _sentences(file.read_text()))
    assert [(name, one) for name, one in sentences if len(one.split()) > _LONGEST] == []
    site = [file for file in files if file.is_relative_to(ROOT / "docs") or file in [ROOT / name for name in _BESIDE]]
    assert sum(len(file.read_text().split()) for file in site) <= _MOST_WORDS


def test_links_of_pages_beside_the_site_lead_to_files():
    for page in ("README.md", "CONTRIBUTING.md", "tests/README.md"):
        targets = re.findall(r"\]\(([^)#:]+)[)#]", (ROOT / page).read_text())
        assert targets, page
        for target in targets:
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} points at {target}"


@pytest.mark.ci
def test_the_site_builds_and_asks_no_other_server(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="make docs and make ci install it")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))  # raises Abort on a warning
    pages = {file.relative_to(tmp_path).as_posix(): file.read_text() for file in tmp_path.rglob("*.html")}
    assert len(pages) > 20 and "<code>cluster.wait_timeout_s=600.0</code>" in pages["reference/keys.html"]
    asked = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//[^"'> ]+""")
    assert {name: asked.findall(text) for name, text in pages.items() if asked.search(text)} == {}
    styles = {file.name: file.read_text() for file in tmp_path.rglob("*.css")}
    assert [name for name, text in styles.items() if re.search(r"(@import|url\()\s*[\"']?https?:", text)] == []


# Behind the notebook's own cells, in its kernel.
_CHECKS = """
assert [len(trial.epochs) for trial in result.trials] == [2] * 4 and again.trials == result.trials
assert [*frame["status"]] == ["finished"] * 4
assert {*forecasts.frame()["sharding"]} == {"ddp", "per_block"}
assert {*forecasts.frame()["cluster.num_workers"]} == {8}
"""


@pytest.mark.full
def test_the_notebook_of_the_python_api_runs(tmp_path: Path):
    nbclient = pytest.importorskip("nbclient", reason="make docs and make ci install it")
    import nbformat

    notebook = nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_CHECKS))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    kinds = [kind for output in shown for kind in output.get("data", {})]
    assert kinds.count("image/png") == kinds.count("application/vnd.plotly.v1+json") == 1
