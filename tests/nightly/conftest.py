"""Nights in this process, whose sweep is a copy of one that has trained, with planted speeds."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.commands import nightly as main_module
from fsdp_lab.commands.nightly import read_study
from fsdp_lab.config.metrics import FORECAST_ERROR, MEMORY, MIB, SPEED
from fsdp_lab.nightly import night
from fsdp_lab.nightly.gate import LOSS, STATUS, Finding, Night, Outcome, Verdict
from fsdp_lab.nightly.night import Study, night_id, read_nights
from fsdp_lab.nightly.texts import WEBHOOK
from tests import trained
from tests.conftest import INLINE, without

# No schedule is to start a night in a test.
IN_TWELVE_HOURS = (f"nightly.cron='0 {(datetime.now(UTC).hour + 12) % 24} * * *'", "nightly.timezone=UTC")
WORDS = (
    *without(INLINE, "precision=", "hydra."), *trained.AXES, "nightly.repeats=1",
    "nightly.folder=nights", *IN_TWELVE_HOURS,
)  # fmt: skip
SPEEDS = {"fp32": 1000.0, "bf16": 2000.0}


class PlantedNights:
    """Runs `python -m fsdp_lab.nightly` in this process, each night a minute after the one before.

    Attributes:
        speeds: precision -> samples/s of the next nights.
        now: the time of the nights, in seconds since 1970.
        sweep: replaces a night's sweep, given its folder; returns its exit status.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.speeds, self.now, self.sweep = dict(SPEEDS), time.time() - 86400.0, self._copy
        self.cwd, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)
        monkeypatch.delenv(WEBHOOK, raising=False)
        monkeypatch.setattr(main_module.signal, "signal", lambda *arguments: None)
        monkeypatch.setattr(main_module, "run_night", lambda study: night.run_night(study, lambda: self.now))
        monkeypatch.setattr(night, "run_sweep", lambda arguments, folder: self.sweep(folder))

    def _copy(self, folder: Path) -> int:
        trained.copy_sweep(folder, self.speeds)
        return 0

    @property
    def folder(self) -> Path:
        """That of the study."""
        return self.cwd / "nights" / "nightly"

    @property
    def all(self) -> list[Night]:
        return read_nights(self.folder)

    @property
    def last(self) -> Night:
        return self.all[-1]

    def study(self) -> Study:
        """The study of the nights."""
        return read_study(list(WORDS))

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.now += 60.0
        self._monkeypatch.setattr("sys.argv", ["nightly", *words])
        status = main_module.main()
        out, err = self._capsys.readouterr()
        return subprocess.CompletedProcess(words, status, out, err)


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> PlantedNights:
    """No night yet, in a folder with the store of the sweep that is copied."""
    return PlantedNights(trained.copy_trained(tmp_path), monkeypatch, capsys)


@contextmanager
def webhook(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server on this machine that takes JSON; `(address, what it got)`."""
    got: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook/t0psecret", got
    finally:
        server.shutdown()


def made_up_nights(count: int = 34) -> list[Night]:
    """One a day; the tenth is a regression, the eleventh accepted; a new commit every week, torch anew at the 20th."""
    nights = []
    for number in range(count):
        moment = 1.78e9 + number * 86400
        trials = [
            {"setting": setting, STATUS: "finished", SPEED: speed + place,
             MEMORY: (4.0 + place) * MIB, LOSS: 1.2, FORECAST_ERROR: 0.0}
            for place, setting in enumerate(("sharding=ddp", "sharding=per_block")) for speed in (500.0, 510.0, 520.0)
        ]  # fmt: skip
        bad = Finding("sharding=ddp", SPEED, Outcome.regression, "x", 510.0, 306.0, -0.4)
        night = Night(
            night_id(moment), moment, {10: Verdict.regression, 11: Verdict.accepted}.get(number, Verdict.good),
            trials=trials,
            findings=[bad] if number == 10 else [], accepted={"reason": "<new> model"} if number == 11 else None,
            origin={"commit": f"commit{number // 7}", "library torch": "2.15.0" if number < 20 else "2.16.0"},
        )  # fmt: skip
        nights.append(night)
    return nights
