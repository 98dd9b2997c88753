"""Hydra's own tests of sweepers and launchers, run against the plugin.

They bring applications of their own, whose configuration is not ours: what they see is the plugin as anybody's sweeper.
"""

from __future__ import annotations

import pytest
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite
from hydra.version import _UNSPECIFIED_, VersionBase

pytestmark = pytest.mark.ci


@pytest.fixture(autouse=True)
def as_if_nothing_was_before(hydra_restore_singletons: None) -> None:
    """Hydra's tests expect the version of its behaviour that is in force when nobody has named one."""
    VersionBase.instance().version_base = _UNSPECIFIED_


OURS = ["hydra/sweeper=fsdp_lab"]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("basic", OURS)])
class TestSweeper(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({"defaults": [{"override hydra/launcher": "basic"}, {"override hydra/sweeper": "fsdp_lab"}]}, ["-m"])],
)
class TestIntegration(IntegrationTestSuite):
    pass


@pytest.mark.skip(reason="the plugin has no batches: a sweep of ours is one queue, and a foreign one is one batch")
@pytest.mark.parametrize(("launcher_name", "overrides"), [("basic", OURS)])
class TestBatches(BatchedSweeperTestSuite):
    pass
