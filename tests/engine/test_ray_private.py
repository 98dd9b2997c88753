"""Ray's private names are those that we know, each as we use it; a Ray without them is refused."""

from __future__ import annotations

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
