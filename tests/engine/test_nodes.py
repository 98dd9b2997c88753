"""What a sweep makes of the nodes of its cluster: pure, but for one socket. Real nodes are in `tests/cluster`."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from fsdp_lab.engine.nodes import Node, NodeWatch, answers, groups_that_fit, lost
from fsdp_lab.engine.rendezvous import gpu_index
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.reason_texts import reason_text
from tests.trained import PLAIN, TINY

A = Node("a", "10.0.0.1", 1, "head", True, {"CPU": 4.0, "memory": 1e9})
B = Node("b", "10.0.0.2", 1, "other", True, {"CPU": 96.0, "GPU": 8.0})
GONE = replace(B, alive=False, resources={})
BACK = replace(B, id="c")
EACH = {"CPU": 1.0, "GPU": 1.0}


def test_a_node_is_lost_until_its_address_is_back():
    assert lost({"a", "b"}, [A, B]) == []
    assert lost({"a", "b"}, [A, GONE]) == [GONE]
    assert lost({"a", "b"}, [A, GONE, BACK]) == []
    assert lost({"a"}, [A, GONE]) == [], "it went before the sweep began"


def test_changes_are_reported_once():
    watch = NodeWatch([A])
    assert watch.changes([A]) == []
    assert watch.changes([A, B]) == ["node 10.0.0.2 (other) joined with 96 CPU and 8 GPU; the next trials use it"]
    (gone,) = watch.changes([A, GONE])
    assert gone.startswith("node 10.0.0.2 (other) went down with 96 CPU and 8 GPU")
    assert watch.changes([A, GONE]) == [] and watch.known == {"a", "b"}


def test_a_node_that_takes_no_connection_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        node = replace(A, address="127.0.0.1", port=raylet.getsockname()[1])
        assert answers(node)
    assert not answers(node)


@pytest.mark.parametrize(
    ("group", "count"),
    [({"CPU": 1.0, "GPU": 4.0}, 4), ({"GPU": 8.0}, 2), ({"GPU": 9.0}, 0), ({"CPU": 3.0}, 65)],
)
def test_groups_of_workers_are_counted_by_node(group: dict[str, float], count: int):
    assert groups_that_fit(group, [A, B, BACK, GONE]) == count


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ([GONE], "node 10.0.0.2 (other) went down and has not come back; start Ray there again, or use fewer workers"),
        ([GONE, A], "node 10.0.0.2 (other) and node 10.0.0.1 (head) went down and have not come back"),
        ([], "3 of 4 CPU and 0 of 8 GPU free; wait until others free resources, or raise cluster.wait_timeout_s"),
    ],
)
def test_workers_without_a_place_are_explained(gone: list[Node], message: str):
    nodes, total, free = [str(node) for node in gone], {"CPU": 4.0, "GPU": 8.0}, {"CPU": 3.0}
    reason = Reason.of(
        Code.no_place, num_workers=8, each=EACH, wait_timeout_s=600.0, total=total, free=free, nodes=nodes
    )
    text = reason_text(reason)
    assert text.startswith("cannot place 8 workers with 1 CPU and 1 GPU each within cluster.wait_timeout_s=600 s: ")
    assert message in text


@pytest.mark.parametrize(
    ("own", "visible", "index"),
    [(3, "2,3", 1), ("GPU-b", "GPU-a,GPU-b", 1), (0, "0", 0), (2, None, 2), (5, "2,3", None)],
)
def test_the_index_of_a_workers_gpu(
    own: int | str, visible: str | None, index: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Ray's answer stands in: there is no GPU here."""
    monkeypatch.setattr("ray.get_gpu_ids", lambda: [own])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if index is None:
        with pytest.raises(RuntimeError, match=r"GPU 5 .* not in CUDA_VISIBLE_DEVICES=2,3"):
            gpu_index()
    else:
        assert gpu_index() == index


def test_on_rocm_the_index_is_among_the_gpus_that_ray_left_visible(monkeypatch: pytest.MonkeyPatch):
    """Ray shows a worker its own GPU by HIP_VISIBLE_DEVICES, which goes before Ray Train's CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr("ray.get_gpu_ids", lambda: [3])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert gpu_index() == 0


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
