"""`make ui` opens the runs in the browser that the user has; here it is a script that writes down the address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from fsdp_lab.open_page import open_page
from tests.conftest import ROOT
from tests.servers import free_port


def test_the_page_is_opened_once_its_server_listens(monkeypatch: pytest.MonkeyPatch):
    happened: list[str] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        happened.append(f"asked {address[1]}")
        if len(happened) < 3:
            raise ConnectionRefusedError
        return socket.socket()

    monkeypatch.setenv("BROWSER", "true")
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(webbrowser, "open", lambda address: happened.append(f"opened {address}") or True)
    assert open_page("http://127.0.0.1:5012/#/runs")
    assert happened == ["asked 5012"] * 3 + ["opened http://127.0.0.1:5012/#/runs"]


def test_the_browser_gets_the_whole_address(tmp_path: Path):
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    browser.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/#/experiments?workflowType=machine_learning"
        command = [sys.executable, "-m", "fsdp_lab.open_page", address]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "BROWSER": str(browser)}, timeout=60, check=True)
    assert seen.read_text().strip() == address


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
    assert not open_page(f"http://127.0.0.1:{free_port()}", patience_s=0.01)


def test_make_ui_opens_the_view_of_training_runs():
    typed = subprocess.run(["make", "-n", "ui", "PORT=5012"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    (line,) = (line for line in typed.stdout.splitlines() if "fsdp_lab.open_page" in line)
    assert "http://127.0.0.1:5012/#/experiments?workflowType=machine_learning" in line and "mlflow ui" in line
