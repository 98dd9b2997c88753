"""What a sweep makes of the nodes of its cluster: pure. Real nodes are in `tests/cluster`."""

from __future__ import annotations

import pytest

from fsdp_lab.engine.resources import groups_that_fit
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.render import reason_text
from tests.conftest import PLAIN, TINY

HEAD, OTHER = {"CPU": 4.0, "memory": 1e9}, {"CPU": 96.0, "GPU": 8.0}
EACH = {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("group", "count"),
    [({"CPU": 1.0, "GPU": 4.0}, 4), ({"GPU": 8.0}, 2), ({"GPU": 9.0}, 0), ({"CPU": 3.0}, 65)],
)
def test_groups_of_workers_are_counted_by_node(group: dict[str, float], count: int):
    assert groups_that_fit(group, [HEAD, OTHER, OTHER]) == count


def test_workers_without_a_place_are_explained():
    total, free = {"CPU": 4.0, "GPU": 8.0}, {"CPU": 3.0}
    reason = Reason.of(Code.no_place, num_workers=8, each=EACH, wait_timeout_s=600.0, total=total, free=free)
    assert reason_text(reason) == (
        "cannot place 8 workers with 1 CPU and 1 GPU each within cluster.wait_timeout_s=600 s: 3 of 4 CPU and 0 of 8 "
        "GPU free; wait until others free resources, or raise cluster.wait_timeout_s"
    )


@pytest.mark.full
@pytest.mark.timeout(300)
def test_trials_are_packed_by_their_own_needs(cli):
    """Of four on two cores: those with one worker run side by side, each with two alone."""
    words = ("cluster.num_workers=1,2", "optimizer.lr=1e-3,1e-4", "model=mlp", "forecast.enabled=false")
    done = cli("-m", *PLAIN, *TINY, *words, "cluster.cpus_per_worker=1", timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    order = [done.stdout.index(f"trial {number} {event}") for number, event in _ORDER]
    assert order == sorted(order), done.stdout


_ORDER = [(1, "starts"), (0, "finished"), (2, "starts"), (2, "finished"), (3, "starts")]
