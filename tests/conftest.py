"""The command line as people use it: a process of its own, in a folder of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hydra.core.global_hydra import GlobalHydra

from fsdp_lab.machine import hardware
from tests import forked
from tests.servers import lay_store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
forked.shared_folder()  # made here, before pytest's workers start, so that they share it
# A terminal's width is for the tests that set one: readline sets 80 columns, which pytest's workers inherit.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

STORE = "tracking.uri=sqlite:///mlflow.db"  # in the test's own folder
# The words of small trials. One setting:
PLAIN = ("sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=always")
# Four steps an epoch, and no other process for a plain loop.
SIZES = (
    *("data.num_train=128", "data.num_val=32", "training.global_batch_size=32", "training.timing_warmup_steps=1"),
    "check=off",
)
# Everything in the test's own folder.
HERE = (STORE, "hydra.run.dir=out", "hydra.sweep.dir=out")
TINY = (*SIZES, "cluster.num_workers=2", *HERE)
# In the sweep's own process, without Ray.
INLINE = ("engine=inline", "model=mlp", *SIZES, *PLAIN, "forecast.enabled=false", *HERE)

FakeGpus = Callable[..., None]  # the fixture `fake_gpus`
FASHION_MNIST = ROOT.parent / "shared" / "data"


def without(words: Iterable[str], *starts: str) -> tuple[str, ...]:
    """Return the words that begin with none of these."""
    return tuple(word for word in words if not word.startswith(starts))


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fsdp_lab", *arguments]


def run_cli(cwd: Path, *arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """Run `python -m fsdp_lab <arguments>` in `cwd`, to its end, in a fork of the server."""
    if STORE in arguments:
        lay_store(cwd)
    return forked.run(cwd, "fsdp_lab", *arguments, seconds=timeout)


def python_blocks(page: str, folder: str) -> list[str]:
    """Return the blocks of Python on a page, with the folder of a trial in place of `outputs/<date>/<time>`."""
    text = (ROOT / page).read_text().replace("outputs/<date>/<time>", folder)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def status_of(main: Callable[[], int | None], words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a command's `main` in this process; return its exit status."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["fsdp_lab", *words])
    try:
        return main() or 0
    except SystemExit as end:
        return end.code


@pytest.fixture(autouse=True)
def no_cluster_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ran in this process has said that clusters are asked: not so in the next test."""
    monkeypatch.setattr("fsdp_lab.config.machine._asks", [])


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`cli(*arguments)` in the test's own folder."""
    return lambda *arguments, **options: run_cli(tmp_path, *arguments, **options)


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """`fake_gpus(8)`: from now on PyTorch answers this process that there are so many GPUs."""

    def answer(count: int, *mib: int, capability: tuple[int, int] = (9, 0)) -> None:
        gpus = tuple(hardware.Gpu("NVIDIA H200", each * 2**20, capability) for each in mib or [143771] * count)
        monkeypatch.setattr(hardware, "_ask_pytorch", lambda visible: (gpus, ""))

    return answer


# The files that take longest start first, so that no worker of pytest waits for one at the end.
LONGEST = (
    "sweep/test_fates.py", "nightly/test_night.py", "test_packages.py", "sweep/test_plain_loops.py",
    "sweep/test_outcomes.py", "training/test_parity.py", "sweep/test_kills.py", "test_presets.py",
    "engine/test_cluster.py", "test_docs.py", "test_refusals.py",
    "forecast/test_memory.py", "report/test_pytorch.py", "sweep/test_resume.py",
    "training/test_checkpoint.py", "workloads/test_user_commands.py",
)  # fmt: skip


def _no_browser() -> str:
    """Why the tests in a browser are left out; "" where they run."""
    has_it = importlib.util.find_spec("playwright") and shutil.which("chromium")
    return "" if has_it and os.environ.get("FSDP_LAB_UI") == "1" else "in a browser: make test-all"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))
    for item in items:
        if item.get_closest_marker("ui") and (reason := _no_browser()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The Chromium of the Debian package, without a window."""
    from playwright.sync_api import sync_playwright

    # Chromium refuses to be sandboxed as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a browser that has seen nothing yet."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()
