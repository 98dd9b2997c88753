"""Real sweeps, made by the command line, in real servers of MLflow: what a browser shows of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mlflow.entities import Run

from fsdp_lab.tracking.tags import TRIAL_TAG
from tests.conftest import PLAIN, ROOT, STORE, run_cli
from tests.servers import mlflow_server
from tests.sweep.conftest import runs

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# A trial takes 0.1 s: two steps in the driver's own process.
INSTANT = (
    "engine=inline", "model=mlp", "data=synthetic", "data.num_train=8", "data.num_val=8", "training.max_steps=2",
    "training.global_batch_size=8", "checkpoint.mode=off", "export=false", "memory_profile=off",
    "forecast.enabled=false", "hydra.sweep.dir=out", "training.timing_warmup_steps=0", *PLAIN,
)  # fmt: skip
_LIMIT_S = 900  # of a sweep, on a machine that others use
README_SWEEP = (
    "sharding=root,per_block", "precision=fp32", "offload=none", "reshard_after_forward=always,never", "-m",
)  # fmt: skip


@dataclass
class Lab:
    """A sweep and the address of a server that has it."""

    address: str
    folder: Path
    parent: Run
    trials: list[Run]

    @property
    def names(self) -> list[str]:
        return [trial.info.run_name for trial in self.trials]

    @property
    def experiment(self) -> str:
        # A browser that is new to MLflow shows the side for language models, where no run is, until it is told.
        return f"{self.address}/#/experiments/{self.parent.info.experiment_id}/runs?workflowType=machine_learning"

    def artifact(self, run: Run, path: str) -> str:
        return self.experiment.replace("/runs?", f"/runs/{run.info.run_id}/artifacts/{path}?")


def _lab(folder: Path, address: str) -> Lab:
    (parent,), trials = runs(folder)
    trials.sort(key=lambda run: int(run.data.tags[TRIAL_TAG]))
    return Lab(address, folder, parent, trials)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The sweep that the README begins with, and the page of each rank's memory on top."""
    folder = tmp_path_factory.mktemp("readme", numbered=False)
    made = run_cli(
        folder, *README_SWEEP, "memory_profile=timeline", "hydra.sweep.dir=out", STORE, timeout=_LIMIT_S
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with mlflow_server(folder) as (address, _):
        yield _lab(folder, address)


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A sweep of 200 trials."""
    folder = tmp_path_factory.mktemp("crowd", numbered=False)
    rates = "optimizer.lr=" + ",".join(f"{i}e-4" for i in range(1, 11))
    made = run_cli(folder, *INSTANT, STORE, "training.seed=range(20)", rates, "-m", timeout=_LIMIT_S)
    assert made.returncode == 0, made.stderr
    with mlflow_server(folder) as (address, _):
        yield _lab(folder, address)


@pytest.fixture
def errors(page: Page) -> list[str]:
    """What the page and its frames complain of."""
    collected: list[str] = []
    page.on("pageerror", lambda error: collected.append(str(error)))
    # A server without accounts does not know who asks, and MLflow asks it on every page.
    page.on(
        "console",
        lambda message: (
            collected.append(f"{message.location['url']}: {message.text}")
            if message.type == "error" and not message.location["url"].endswith("/users/current")
            else None
        ),
    )
    return collected


@pytest.fixture(autouse=True)
def quiet(page: Page) -> None:
    """MLflow's assistant opens by itself in a browser that is new to it, over a quarter of the page."""
    page.add_init_script(
        "if (self === top) localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
    )


@pytest.fixture
def shoot(page: Page) -> Callable[[str], None]:
    """`shoot(name)` keeps a picture of the page where FSDP_LAB_SCREENSHOTS names a folder."""

    def shoot(name: str) -> None:
        if folder := os.environ.get("FSDP_LAB_SCREENSHOTS"):
            # The folder of the tests is nobody's business.
            page.screenshot(
                path=ROOT / folder / f"{name}.png", mask=[page.get_by_text("Path: file:")], mask_color="white"
            )

    return shoot


def row(page: Page, name: str) -> Locator:
    """The part of a run's row that has its name."""
    return page.locator(".ag-row", has=page.get_by_role("link", name=name, exact=True))


def unfold(page: Page, lab: Lab) -> None:
    page.goto(lab.experiment)
    row(page, lab.parent.info.run_name).get_by_role("button").first.click()
    row(page, lab.trials[-1].info.run_name).wait_for()
