"""What training and forecasts share hands each part the device and the defaults that belong to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_lab.forecast.fake import ACCELERATOR, HOST
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training import build as module
from fsdp_lab.training import data
from tests.ranks import config


@pytest.mark.parametrize(("offload", "expected"), [("none", ACCELERATOR), ("cpu", HOST)])
def test_the_loss_scale_is_made_where_the_gradients_are(
    offload: str, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    build_scaler = module.build_scaler
    monkeypatch.setattr(module, "build_scaler", lambda p, device: made.append(device) or build_scaler(p, device))
    forecast_profile(config("model=mlp", "precision=fp16", f"offload={offload}"), 2, cuda=True)
    assert made == [expected]


@pytest.mark.parametrize(("device", "given", "workers"), [("cuda", None, 3), ("cpu", None, 0), ("cuda", 1, 1)])
def test_a_loader_takes_the_processes_and_the_pinning_of_its_device(
    device: str, given: int | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(data, "DataLoader", lambda source, **options: asked.update(options))
    monkeypatch.setattr(data, "worker_cpus", lambda: 4.0)
    monkeypatch.setattr("fsdp_lab.machine.hardware.shared_memory", lambda: 2**30)
    data.build_loader(None, None, given, torch.device(device))  # type: ignore[arg-type]
    assert asked["num_workers"] == workers and asked["pin_memory"] is (device == "cuda")
