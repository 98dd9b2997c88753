"""Ray's private names are those that we know, each as we use it; a Ray without them is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsdp_lab.config import UserError
from fsdp_lab.engine import ray_private
from fsdp_lab.engine.attempts import failed_to_start
from fsdp_lab.engine.cluster import set_environment
from fsdp_lab.engine.ray_private import (
    NAMES,
    SUPPORTED,
    check_version,
    failure_policy,
)
from fsdp_lab.private import Name

set_environment()  # the second Ray Train is the one that is asked


def test_ray_has_each_name_as_we_use_it():
    lacking = [lacks for name in NAMES if (lacks := name.lacks()) is not None]
    assert lacking == [], "see fsdp_lab/engine/ray_private.py"


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        (Name("ray.not_there", "Anything"), "ray.not_there.Anything"),
        (Name("ray.train", "NotThere.run"), "ray.train.NotThere.run"),
        (Name("ray.train", "RunConfig", ("name", "colour")), "ray.train.RunConfig(colour)"),
    ],
)
def test_a_ray_without_a_name_is_refused_with_the_supported_versions(
    name: Name, lacking: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_private, "NAMES", (*NAMES, name))
    with pytest.raises(UserError) as refused:
        check_version()
    for words in (f"lacks {lacking},", f"install a Ray from {SUPPORTED}", "engine=inline"):
        assert words in str(refused.value)


# An actor that Ray kills while a task of Tune's manager waits for it: at a limit far below what is in use.
_KILLED_FOR_MEMORY = """
import os, sys, time

os.environ |= {"RAY_memory_usage_threshold": "0.0", "RAY_memory_monitor_refresh_ms": "2000"}

import ray
from ray.air.execution import FixedResourceManager, ResourceRequest
from ray.air.execution._internal import RayActorManager

from fsdp_lab.engine.ray_private import survive_memory_kills

survive_memory_kills()
ray.init(address="local", num_cpus=1, include_dashboard=False)


class Waits:
    def wait(self):
        time.sleep(60)


errors, started = [], []
until = time.monotonic() + 90
while not errors and time.monotonic() < until:  # one that is killed as it starts tells nothing
    manager = RayActorManager(FixedResourceManager({"CPU": 1}))
    ended = []
    manager.add_actor(Waits, {}, ResourceRequest([{"CPU": 1}]), on_start=started.append,
                      on_error=lambda _, error: ended.append(error))
    while not ended and time.monotonic() < until:
        manager.next(1)
        while started:
            manager.schedule_actor_task(started.pop(), "wait")
    errors += [error for error in ended if error.__cause__ is not None]
print(*(type(at).__name__ for error in errors for at in (error, error.__cause__)))
"""


class NoRules:
    """Rules for attempts that leave all to Ray."""

    def __init__(self) -> None:
        self.retries, self.group = 0, lambda: None

    def begin(self) -> None:
        """Do nothing."""

    def is_final(self, error: Exception, poll: object) -> bool:
        """Leave it to Ray."""
        return False

    def retry(self) -> None:
        """Count."""
        self.retries += 1


def test_a_worker_that_is_killed_while_its_trial_starts_is_tried_again():
    """Ray's controller wraps the death of an actor that was asked something, and by itself gives up."""
    from ray.exceptions import RayActorError
    from ray.train import ControllerError, FailureConfig

    rules = NoRules()
    policy = failure_policy(rules)(FailureConfig(max_failures=1, controller_failure_limit=1))
    killed = ControllerError(RayActorError())
    decisions = [policy.make_decision(training_failed_error=error).value for error in (killed, killed)]
    assert (decisions, rules.retries) == (["RETRY", "RAISE"], 1)
    assert failed_to_start(killed)
    other = failure_policy(rules)(FailureConfig(max_failures=1, controller_failure_limit=1))
    assert other.make_decision(training_failed_error=ControllerError(OSError())).value == "RAISE"


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_process_of_tunes_that_ray_kills_for_want_of_memory_is_an_actor_that_died():
    """And not an exception that ends the sweep, as Tune has it."""
    done = subprocess.run([sys.executable, "-c", _KILLED_FOR_MEMORY], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["RayActorError", "OutOfMemoryError"], done.stdout + done.stderr
