"""A predicted step as a Chrome trace: which operator runs when on which stream, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from fsdp_lab.files import whole
from fsdp_lab.speed.predict import bound_of
from fsdp_lab.speed.program import Stream
from fsdp_lab.speed.streams import Schedule


def streams_file(page: Path) -> Path:
    """Return the path for the trace of a step, in the folder of its memory timeline."""
    return page.with_name(page.name.replace("timeline", "streams")).with_suffix(".json.gz")


def write_streams(path: Path, schedule: Schedule) -> None:
    """Write a step: a thread for each stream, with its operators in microseconds, as PyTorch's profiler does."""
    threads = {stream: number for number, stream in enumerate(Stream)}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": threads[stream], "args": {"name": stream.value}}
        for stream in dict.fromkeys(slot.operator.stream for slot in schedule.slots)
    ]
    for slot in schedule.slots:
        one = slot.operator
        args = {"module": one.module, "phase": one.phase, "bound": bound_of(one)}
        times = {"ts": slot.begin * 1e6, "dur": (slot.end - slot.begin) * 1e6}
        events.append({"ph": "X", "name": one.name, "pid": 0, "tid": threads[one.stream], **times, "args": args})
    with whole(path) as making, gzip.open(making, "wt", encoding="utf-8") as out:
        out.write(json.dumps({"traceEvents": events}))
