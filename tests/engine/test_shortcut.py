"""The shortcut through Ray's private names: each is as we use it, and without one trials run by the public way.

Sweeps by the public way are in tests/sweep/test_fates.py and tests/cluster/test_nodes.py.
"""

from __future__ import annotations

import pytest

from fsdp_lab.engine import shortcut
from fsdp_lab.engine.cluster import set_environment
from fsdp_lab.machine.private import Name

set_environment()  # the second Ray Train is the one that is asked


def test_ray_has_each_name_as_we_use_it():
    lacking = [lacks for name in shortcut.NAMES if (lacks := name.lacks()) is not None]
    assert lacking == [], "trials run by the public way, which is slower: see fsdp_lab/engine/shortcut.py"
    assert len(shortcut.NAMES) <= 12


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        (Name("ray.not_there", "Anything"), "ray.not_there.Anything"),
        (Name("ray.train", "NotThere.run"), "ray.train.NotThere.run"),
        (Name("ray.train", "RunConfig", ("name", "colour")), "ray.train.RunConfig(colour)"),
    ],
)
def test_a_ray_without_a_name_is_used_by_its_public_ones(name: Name, lacking: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FSDP_LAB_PUBLIC_RAY", raising=False)
    assert shortcut.unusable() is None
    monkeypatch.setattr(shortcut, "NAMES", (*shortcut.NAMES, name))
    assert shortcut.unusable() == f"this Ray lacks {lacking}"


def test_a_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FSDP_LAB_PUBLIC_RAY", "1")
    assert shortcut.unusable() == "FSDP_LAB_PUBLIC_RAY is set"
