"""Ray's private names are those that we know, each as we use it; and without them trials still train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_lab.engine.cluster import set_environment
from fsdp_lab.engine.ray_private import CONTROLLER, OTHERS, Name, missing, slower
from tests.conftest import ROOT
from tests.sweep.conftest import PLAIN, TINY, results, started

set_environment()  # the second Ray Train is the one that is asked


@pytest.mark.parametrize("name", [*CONTROLLER, *OTHERS], ids=lambda name: f"{name.module}.{name.name}")
def test_ray_has_the_name_as_we_use_it(name: Name):
    assert name.lacks() is None, f"this Ray lacks {name.lacks()}: see fsdp_lab/engine/ray_private.py"


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        (Name("ray.not_there", "Anything"), "ray.not_there.Anything"),
        (Name("ray.train", "NotThere.run"), "ray.train.NotThere.run"),
        (Name("ray.train", "RunConfig", ("name", "colour")), "ray.train.RunConfig(colour)"),
    ],
)
def test_what_is_missing_is_named(name: Name, lacking: str):
    assert missing([name, *CONTROLLER]) == [lacking]
    line = slower([lacking])
    assert line.startswith("Ray 2.") and line.endswith(f" lacks {lacking}; trials start a few seconds slower")


def test_no_other_file_knows_private_names_of_ray_or_hydra():
    owners = {"fsdp_lab/engine/ray_private.py"}
    for file in (*(ROOT / "fsdp_lab").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")):
        text = file.read_text()
        private = [word for word in ("ray._", "ray.train.v2", "hydra._internal", "omegaconf._") if word in text]
        assert not private or str(file.relative_to(ROOT)) in owners, f"{file}: {private}"


# Adds a name that no Ray has, in every process of the sweep.
_HIDE = """
import importlib.abc, importlib.machinery, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "fsdp_lab.engine.ray_private":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.CONTROLLER += (module.Name("ray.train", "hidden"),)
            module.missing.__defaults__ = (module.CONTROLLER,)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hide())
"""


@pytest.fixture
def a_name_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(_HIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hide"), prepend=os.pathsep)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("a_name_is_hidden")
def test_without_a_name_a_sweep_stops_fails_and_retries_as_with_it(tmp_path: Path):
    """One trial finishes, one is stopped by the scheduler, one has an error of the user's. Two workers are all that the
    machine holds, so that what one trial left behind would keep the next from starting."""
    words = ("optimizer.lr=1e-3,1e-9", "training.global_batch_size=32,2000", "training.epochs=6", "scheduler=asha",
             "scheduler.grace_epochs=1", "scheduler.reduction_factor=2", "forecast.enabled=false", "-m")  # fmt: skip
    tiny = [word for word in TINY if not word.startswith("training.global")]
    with started(tmp_path, *PLAIN, *tiny, "model=mlp", *words) as process:
        stdout, stderr = process.communicate(timeout=450)
    assert process.returncode == 1, stdout + stderr
    (line,) = [line for line in stdout.splitlines() if "lacks" in line]
    assert line.endswith("lacks ray.train.hidden; trials start a few seconds slower")
    good, first_bad, stopped, second_bad = results(tmp_path)
    assert (good["status"], good["epoch"]) == ("finished", "6")
    assert stopped["status"] == "stopped" and 1 <= int(stopped["epoch"]) < 6
    for bad in (first_bad, second_bad):
        assert bad["status"] == "failed" and "2000" in bad["error"]
        log = (Path(bad["folder"]) / "logs" / "rank0.log").read_text()
        assert log.count("ConfigError: training.global_batch_size=2000 is more") == 1  # and no second attempt
