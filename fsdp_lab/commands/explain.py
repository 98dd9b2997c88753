"""Why a GPU's memory ran out: which tensor asked, what was held, and the cheapest settings that fit.

python -m fsdp_lab.explain train.log model=llama3_8b sharding=root cluster.num_workers=8    a log with PyTorch's message
python -m fsdp_lab.explain memory_snapshot.pickle model=llama3_8b cluster.num_workers=8     the allocator's snapshot
python -m fsdp_lab.explain outputs/sweep/2026-11-30/10-00-00/3                              the folder of a trial

After a log or a snapshot come the overrides of its setting; overrides after a folder replace its own. With
forecast.device=<a device> the settings that fit have their predicted time, else the memory that they need. A snapshot
is read as numbers and text: a file that would run something is refused.
Exits with 0, 1 if the setting has no forecast, 2 for bad input, 130 if interrupted.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from fsdp_lab.commands.forecast_cells import plan_forecasts
from fsdp_lab.commands.messages import explain
from fsdp_lab.config import UserError, workers_of
from fsdp_lab.config.describe import docstring
from fsdp_lab.config.launcher import leave_launcher
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.words import with_overrides
from fsdp_lab.forecast.capacity import GIB, Forecast, NoForecast
from fsdp_lab.forecast.out_of_memory import WORKING, Shortage, read_message, read_snapshot, smaller_settings, who_asked
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.run import forecast_all
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.machine.signals import on_end
from fsdp_lab.memory.profile import Profile
from fsdp_lab.report.texts import change, memory

_ANSWERS = 3
_CLEARLY = 0.02  # an answer must need less than this share
_OTHER = 0.05  # larger differences mean that another setting ran
_LOGS = ("error.txt", "logs/rank*.log")  # of a trial's folder


def main() -> int:
    """Explain what the command line names, and return the exit status; see the module."""
    outlast_reader()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words) or not words:
        print(docstring(sys.modules[__name__]))
        return ExitCode.finished if words else ExitCode.refused
    on_end(signal.default_int_handler)  # as Ctrl-C
    try:
        leave_launcher()
        if "=" in words[0]:
            raise UserError(f"{words[0]}: first comes a log, a snapshot or the folder of a trial, then the overrides.")
        return run(Path(words[0]), words[1:])
    except KeyboardInterrupt:
        print("fsdp_lab.explain: interrupted", file=sys.stderr)
        return ExitCode.interrupted
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"fsdp_lab.explain: {message}", file=sys.stderr)
        return ExitCode.refused


def run(source: Path, typed: list[str]) -> int:
    """Explain a log, a snapshot or a trial's folder.

    Raises:
        UserError: the source has no failed allocation, or the overrides are refused.
    """
    shortage, known = _read(source)
    overrides = with_overrides(known, typed)
    if not overrides:
        raise UserError(f"{source}: type the overrides of its setting after it, such as model=llama3_8b.")
    if shortage.capacity is not None and not any(word.startswith("forecast.capacity_gib=") for word in overrides):
        overrides.append(f"forecast.capacity_gib={shortage.capacity / GIB:.4g}")
    if not any(word.startswith("forecast.device=") for word in overrides):
        overrides.append("forecast.device=cuda")
    request = _request(overrides)
    print(*_said(shortage), sep="\n")
    from fsdp_lab.forecast.forecast import forecast_profile  # which imports PyTorch: refusals come before

    print(*_asked(shortage, forecast_profile(request.config, request.num_workers, request.cuda)), sep="\n", flush=True)
    return _remedies(request, overrides, shortage)


def _read(source: Path) -> tuple[Shortage, list[str]]:
    """Return the failed allocation in a log, a snapshot or a trial's folder, and the overrides that it has."""
    if source.is_dir():
        overrides = source / ".hydra" / "overrides.yaml"
        try:
            known = [str(word) for word in yaml.safe_load(overrides.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError, yaml.YAMLError):
            raise UserError(
                f"{source} is no trial's folder: {overrides} cannot be read; name a log, and its overrides after it."
            ) from None
        logs = [log for pattern in _LOGS for log in sorted(source.glob(pattern))]
        found = (read_message(log.read_text(encoding="utf-8", errors="replace")) for log in logs)
        shortage, where = next((one for one in found if one is not None), None), f"{source}/{', '.join(_LOGS)}"
    elif source.suffix == ".pickle":
        return read_snapshot(source), []
    else:
        shortage, known, where = read_message(source.read_text(encoding="utf-8", errors="replace")), [], str(source)
    if shortage is None:
        raise UserError(
            f"{where}: no message of a GPU whose memory ran out (out of memory. Tried to allocate ...); name the log "
            "that has it."
        )
    return shortage, known


def _request(overrides: list[str]) -> Request:
    config = plan_forecasts(overrides, multirun=False)[0].trials[0].config
    return Request.of(config, workers_of(config))


def _said(shortage: Shortage) -> Iterator[str]:
    known = {
        "free": shortage.free,
        "in tensors of PyTorch": shortage.allocated,
        "cached by PyTorch": shortage.cached,
        "of others, with the CUDA context": shortage.others,
    }
    held = ", ".join(f"{memory(max(size, 0))} {name}" for name, size in known.items() if size is not None)
    of = f" of {memory(shortage.capacity)}" if shortage.capacity is not None else ""
    yield f"asked for {memory(shortage.asked.num_bytes)}{of}: {held}"
    if shortage.largest:
        yield f"largest tensors: {', '.join(map(memory, shortage.largest))}"
    if shortage.pages_would_do is not None:
        would = "most likely suffices" if shortage.pages_would_do else "does not suffice"
        what = "what is free and cached is" if shortage.pages_would_do else "even what is free and cached is not"
        yield f"PYTORCH_ALLOC_CONF=expandable_segments:True {would}: {what} enough"


def _asked(shortage: Shortage, profile: Profile) -> Iterator[str]:
    if shortage.is_shared:
        yield "tensors below 10 MiB share segments of that size, so the size identifies no tensor"
        return
    asking = who_asked(profile, shortage)
    if asking is None:
        yield (
            "no tensor of the forecast step has this size: another setting ran, or it was asked for outside of a step, "
            "as in a validation or by another library"
        )
        return
    event, alike = asking.event, f", one of {asking.alike} of this size" if asking.alike > 1 else ""
    where = f"{event.phase} of {event.module}" if event.module else f"{event.phase}, outside of all modules"
    owners = ", ".join(profile.owners.get(event.storage, ())[:_ANSWERS])
    for_ = f" for {owners}" if owners else ""
    yield f"by the forecast that is {event.category} of {event.num_bytes:,} bytes{for_} in the {where}{alike}"
    held = sorted(asking.held.items(), key=lambda one: -one[1])
    total = sum(asking.held.values())
    yield f"held then, with it: {memory(total)}: {', '.join(f'{k} {memory(v)}' for k, v in held)}"
    ran = shortage.allocated
    if ran is not None and abs(ran - (total - event.num_bytes)) > _OTHER * ran:
        more = memory(abs(ran - (total - event.num_bytes)))
        yield (
            f"what ran held {more} {'more' if ran > total - event.num_bytes else 'less'} in tensors: it was another "
            "setting or batch, or other code held them"
        )


def _remedies(request: Request, overrides: list[str], shortage: Shortage) -> int:
    """Print the cheapest settings that fit, each after its forecast, and return the exit status."""
    if request.capacity_bytes is None:
        print("what would fit is not known without the GPU's memory: set forecast.capacity_gib")
        return ExitCode.finished
    changes, requests = [list[str]()], [request]
    for typed in smaller_settings(request.config, request.samples_per_worker):
        with suppress(UserError):  # combinations that exclude each other
            requests.append(_request(with_overrides(overrides, typed)))
            changes.append(typed)
    print(f"{WORKING}{len(requests) - 1} settings that need less", flush=True)
    made = forecast_all(requests)
    if made[0].error is not None:
        print(f"fsdp_lab.explain: {made[0].error.text}", file=sys.stderr)
        return ExitCode.failed
    cancelled = sum(one.error == NoForecast("cancelled") for one in made)
    if cancelled:
        print(f"interrupted after {len(made) - cancelled} of {len(made)} settings; the others are missing below")
    # the forecast is too low for what failed here, so an answer must need that much less
    most = made[0].needed_bytes - max(shortage.asked.num_bytes - (shortage.free or 0), _CLEARLY * made[0].needed_bytes)
    fitting = [
        (typed, one)
        for typed, one in zip(changes, made, strict=True)
        if typed and one.fits and one.needed_bytes <= most
    ]
    fitting.sort(key=lambda one: (_seconds(one[1]), len(one[0]), one[1].needed_bytes))
    fitting = [(typed, one) for at, (typed, one) in enumerate(fitting) if not _is_more(typed, fitting[:at])]
    items = f"{request.num_workers} workers with {request.samples_per_worker} samples each"
    print(
        f"by the forecast the setting needs {memory(made[0].needed_bytes)} of {memory(request.capacity_bytes)}: {items}"
    )
    for typed, one in fitting[:_ANSWERS]:
        slower = f", a step {change(_seconds(one) / _seconds(made[0]) - 1)}" if one.speed and made[0].speed else ""
        print(f"fits with {' '.join(typed)}: needs {memory(one.needed_bytes)}{slower}")
    if not fitting:
        least = min(made, key=lambda one: one.needed_bytes if not one.error else sys.maxsize)
        typed = changes[made.index(least)]
        print(f"none of them fits; the least is {memory(least.needed_bytes)} with {' '.join(typed) or 'no change'}")
    return ExitCode.interrupted if cancelled else ExitCode.finished


def _is_more(typed: list[str], cheaper: Sequence[tuple[list[str], Forecast]]) -> bool:
    """Return whether these changes include all of a cheaper answer."""
    return any(set(part) < set(typed) for part, _ in cheaper)


def _seconds(forecast: Forecast) -> float:
    return forecast.speed.step_s if forecast.speed is not None else math.inf
