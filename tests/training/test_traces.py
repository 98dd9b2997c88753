"""Pages and files to look into a step: the timeline of its memory, read back, and the trace of `profile_trace=true`."""

from __future__ import annotations

import gzip
import html
import json
import re
from pathlib import Path

import pytest

from fsdp_lab.memory.profile import Event, Profile
from fsdp_lab.memory.timeline import COLOURS, HEIGHT, write_timeline
from tests.conftest import INLINE, run_cli
from tests.folders import Store
from tests.ranks import run_ranks, train_leaving

# Two storages from before the step; then one changes its category, one its size.
SMALL = Profile(
    events=[
        Event(9, "host", "optimizer", 50, "", "optimizer"),
        Event(1, "device", "param", 100, "a", "forward"),
        Event(2, "device", "activation", 40, "a", "forward"),
        Event(3, "device", "temp", 30, "a.b", "forward"),
        Event(3, "device", "temp", 0, "a.b", "forward"),
        Event(2, "device", "unsharded_grad", 40, "a", "backward"),
        Event(4, "device", "grad", 70, "b", "backward"),
        Event(2, "device", "unsharded_grad", 0, "", "backward"),
        Event(9, "host", "optimizer", 80, "", "optimizer"),
        Event(5, "host", "grad", 60, "b", "optimizer"),
    ],
    begun=2,
)
# What each place holds before the step and after each of its eight events, worked out by hand.
HELD = [
    ({"param": 100}, {"optimizer": 50}),
    ({"param": 100, "activation": 40}, {"optimizer": 50}),
    ({"param": 100, "activation": 40, "temp": 30}, {"optimizer": 50}),
    ({"param": 100, "activation": 40}, {"optimizer": 50}),
    ({"param": 100, "unsharded_grad": 40}, {"optimizer": 50}),
    ({"param": 100, "unsharded_grad": 40, "grad": 70}, {"optimizer": 50}),
    ({"param": 100, "grad": 70}, {"optimizer": 50}),
    ({"param": 100, "grad": 70}, {"optimizer": 80}),
    ({"param": 100, "grad": 70}, {"optimizer": 80, "grad": 60}),
]


def written(profile: Profile, folder: Path, title: str = "a title", facts: dict[str, str] | None = None) -> str:
    """The text of the page."""
    write_timeline(profile, folder / "timeline.html", title, facts or {})
    assert [path.name for path in folder.iterdir()] == ["timeline.html"]
    return (folder / "timeline.html").read_text(encoding="utf-8")


def tops(page: str, category: str) -> list[float]:
    """The heights that the top of a category's area has, from left to right, as shares of the drawing."""
    (points,) = re.findall(rf'<polygon points="([^"]+)" fill="{COLOURS[category]}"', page)
    return [1 - float(point.split(",")[1]) / HEIGHT for point in points.split()[1:-1:2]]


def test_what_is_held_is_what_was_counted_by_hand(tmp_path: Path) -> None:
    states = [SMALL.states(place) for place in ("device", "host")]
    seen = [[{c: n for c, n in sums.items() if n} for sums, _ in each] for each in states]
    assert list(zip(*seen, strict=True))[SMALL.begun - 1 :] == HELD
    page = written(SMALL, tmp_path)
    assert re.findall('data-peak-bytes="(.*?)"', page) == ["210", "140"]
    assert "backward, b, event 5 of 8" in page
    device = page.partition("<h2>host</h2>")[0]
    assert tops(device, "param") == pytest.approx([100 / 210] * 9, abs=1e-3)
    assert tops(device, "temp") == pytest.approx([sum(held.values()) / 210 for held, _ in HELD], abs=1e-3), "the last"
    cells = re.findall(r"<td[^>]*>(?:<span.*?</span>)?(.*?)</td>", device)
    assert cells == [
        *("temp", "0 bytes", "0.0 %"), *("unsharded_grad", "40 bytes", "19.0 %"), *("activation", "0 bytes", "0.0 %"),
        *("grad", "70 bytes", "33.3 %"), *("param", "100 bytes", "47.6 %"),
        *("param", "a", "100 bytes", "100", "1"), *("grad", "b", "70 bytes", "70", "1"),
        *("unsharded_grad", "a", "40 bytes", "40", "1"),
    ]  # fmt: skip


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    """Names of modules, a title and facts cannot break out of it either."""
    evil = "</title><!--<script>alert(1)</script><img src=http://x onerror=alert(2)>"
    page = written(Profile([Event(1, "device", "param", 8, evil, "forward")]), tmp_path, title=evil, facts={evil: evil})
    assert page.count(html.escape(evil)) == 6
    page = page.replace(html.escape(evil), "")
    assert [word for word in ("http:", "https:", "src=", "href=", "url(", "@import", "<script") if word in page] == []


def names_in(trace: bytes) -> list[str]:
    """What a trace says was computed and sent."""
    return [event["name"] for event in json.loads(gzip.decompress(trace))["traceEvents"] if event.get("ph") == "X"]


def test_three_steps_of_rank_0_are_recorded_and_change_no_loss() -> None:
    """Of eight steps two are followed for memory. A recorded one is not timed, and one more starts the profiler."""
    common = "model=mlp sharding=per_block data.num_train=256 memory_profile=peaks training.timing_warmup_steps=0"
    cases = ["profile_trace=false", "profile_trace=true", "profile_trace=true training.max_steps=4"]  # too short
    words = [f"{common} {case}".split() for case in cases]
    (plain, recorded, short), others = run_ranks(2, train_leaving, "*trace*", words)
    assert plain[0] == recorded[0]
    assert [each[1][-1]["perf/timed_steps"] for each in (plain, recorded)] == [6, 2]
    assert plain[1][-1]["memory/peak_bytes"] == recorded[1][-1]["memory/peak_bytes"]
    assert [set(files) for *_, files in (plain, recorded, short)] == [set(), *[{"trace_rank0.json.gz"}] * 2]
    assert not any(files for *_, files in others), "a trace of each rank would fill the disk"
    names, of_short = (names_in(files["trace_rank0.json.gz"]) for *_, files in (recorded, short))
    steps, some = ({name for name in each if name.startswith("ProfilerStep#")} for each in (names, of_short))
    assert len(steps) == 3 and len(some) in (1, 2)
    assert "aten::addmm" in names and any(name.startswith("autograd::engine") for name in names)
    assert sum("_allgather_base_" in name for name in names) >= 3 * 3, "two blocks and the root gather in each step"
    assert any("adam" in name.lower() for name in names)


@pytest.mark.ci
def test_the_trace_is_an_artifact_of_the_run(tmp_path: Path) -> None:
    done = run_cli(tmp_path, *INLINE, "data.num_train=256", "training.max_steps=6", "profile_trace=true")
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(tmp_path)
    (run,) = store.parents
    assert "trace/trace_rank0.json.gz" in store.artifacts(run)
    assert names_in((tmp_path / "out" / "trace_rank0.json.gz").read_bytes())
