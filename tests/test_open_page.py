"""`make ui` opens the runs in the browser that the user has; here it is a script that writes down the address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fsdp_lab.open_page import open_page
from tests.conftest import ROOT


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_page_is_opened_once_its_server_listens(tmp_path: Path):
    browser, seen, port = tmp_path / "browser", tmp_path / "seen", free_port()
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    browser.chmod(0o700)
    address = f"http://127.0.0.1:{port}/#/experiments?workflowType=machine_learning"
    command = [sys.executable, "-m", "fsdp_lab.open_page", address]
    opener = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "BROWSER": str(browser)})
    try:
        time.sleep(2)
        assert opener.poll() is None and not seen.exists()
        with socket.create_server(("127.0.0.1", port)):
            assert opener.wait(timeout=30) == 0
        assert seen.read_text().strip() == address
    finally:
        opener.kill()
        opener.wait()


def test_nothing_is_opened_without_a_desktop(monkeypatch: pytest.MonkeyPatch):
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        assert not open_page(f"http://127.0.0.1:{server.getsockname()[1]}", patience_s=1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROWSER", "true")
    asked: list[bool] = []
    waits = threading.Thread(target=lambda: asked.append(open_page(f"http://127.0.0.1:{free_port()}", patience_s=0.5)))
    waits.start()
    waits.join(timeout=20)
    assert asked == [False]


def test_make_ui_opens_the_view_of_training_runs():
    typed = subprocess.run(["make", "-n", "ui", "PORT=5012"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    (line,) = (line for line in typed.stdout.splitlines() if "fsdp_lab.open_page" in line)
    assert "http://127.0.0.1:5012/#/experiments?workflowType=machine_learning" in line and "mlflow ui" in line
