"""`make ui` opens the runs in the browser that the user has; here it is a script that writes down the address."""

from __future__ import annotations

import socket
import subprocess
import webbrowser

import pytest

from fsdp_lab.open_page import open_page
from tests.conftest import ROOT


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


def test_make_ui_opens_the_view_of_training_runs():
    typed = subprocess.run(["make", "-n", "ui", "PORT=5012"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    (line,) = (line for line in typed.stdout.splitlines() if "fsdp_lab.open_page" in line)
    assert "http://127.0.0.1:5012/#/experiments?workflowType=machine_learning" in line and "mlflow ui" in line
