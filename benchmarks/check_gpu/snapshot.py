"""`memory_profile=timeline` leaves the page, and on CUDA a snapshot of the allocator that can be read."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.run import run_trial
from benchmarks.check_gpu.settings import Setting

_SETTING: Setting = {"precision": "bf16_mixed", "memory_profile": "timeline", "training.max_steps": 3}


def lines(bench: Bench) -> list[Line]:
    expected = "a page; a snapshot with segments and device_traces" if bench.cuda else "a page"
    return [Line("snapshot", "memory_profile=timeline", bench.workers, expected)]


def measure(line: Line, bench: Bench) -> Measured:
    batch = 8 * line.workers
    sizes: Setting = {"training.global_batch_size": batch, "data.num_train": 4 * batch, "data.num_val": batch}
    with tempfile.TemporaryDirectory() as name:  # each rank its own: it looks at its own files
        run_trial({**sizes, **_SETTING}, Path(name))
        pages = [path.stat().st_size for path in Path(name).glob("memory_timeline_rank*.html")]
        text = f"{len(pages)} page of {sum(pages) / 1000:.0f} kB"
        if not bench.cuda:
            return Measured(sum(pages) > 0, text)
        (path,) = Path(name).glob("memory_snapshot_rank*.pickle")
        content = pickle.loads(path.read_bytes())  # of this very process
        text += f", snapshot of {path.stat().st_size / 1000:.0f} kB with {len(content.get('segments', []))} segments"
        events = sum(len(trace) for trace in content.get("device_traces", []))
    return Measured(sum(pages) > 0 and bool(content.get("segments")) and events > 0, f"{text}, {events} events")
