"""Real sweeps, made by the command line, in real servers of MLflow: what a browser shows of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mlflow.entities import Run

from fsdp_lab.tracking.tags import TRIAL_TAG
from tests.conftest import INLINE, STORE, run_cli
from tests.folders import Store
from tests.servers import mlflow_server

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# A trial takes 0.1 s.
INSTANT = (*INLINE, "training.max_steps=2", "checkpoint.mode=off", "export=false", "memory_profile=off")


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


@contextmanager
def swept(folder: Path, *words: str) -> Iterator[Lab]:
    made = run_cli(folder, *words, "hydra.sweep.dir=out", STORE, "-m", timeout=900)  # on a machine that others use
    assert made.returncode == 0, made.stderr
    with mlflow_server(folder) as (address, _):
        store = Store(folder)
        (parent,) = store.parents
        yield Lab(address, folder, parent, sorted(store.trials, key=lambda run: int(run.data.tags[TRIAL_TAG])))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The sweep that the README begins with, and the page of each rank's memory on top."""
    axes = ("sharding=root,per_block", "precision=fp32", "offload=none", "reshard_after_forward=always,never")
    folder = tmp_path_factory.mktemp("readme", numbered=False)
    with swept(folder, *axes, "memory_profile=timeline") as made:
        yield made


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A sweep of 200 trials."""
    rates = "optimizer.lr=" + ",".join(f"{i}e-4" for i in range(1, 11))
    folder = tmp_path_factory.mktemp("crowd", numbered=False)
    with swept(folder, *INSTANT, "training.seed=range(20)", rates) as made:
        yield made


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


def row(page: Page, name: str) -> Locator:
    """The part of a run's row that has its name."""
    return page.locator(".ag-row", has=page.get_by_role("link", name=name, exact=True))
