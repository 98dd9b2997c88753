"""A probe of this CPU: what it times runs, it writes a file that forecasts use, and its order of steps is right."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import barrier

from fsdp_lab.config import UserError
from fsdp_lab.config.options import PROBE, is_device, use_devices_of
from fsdp_lab.engine import everywhere
from fsdp_lab.forecast.devices import file_here, no_file_note, words_for
from fsdp_lab.forecast.speed.device import DeviceKind, load_device
from fsdp_lab.machine.hardware import cpu_name
from fsdp_lab.probe.cases import attention_cases, memory_cases, product_cases
from fsdp_lab.probe.collectives import collective_cases
from fsdp_lab.probe.figures import Measurement, blank
from fsdp_lab.probe.timer import Case, Timer
from fsdp_lab.training.distributed import setup_distributed
from tests.conftest import ROOT
from tests.ranks import config, run_ranks

CPU = torch.device("cpu")
APART = 1.3  # how far two measured steps are apart whose order a forecast has to know
_STEP = re.compile(r"^(.+?microbatch \d) +([\d.]+) +([\d.]+) +[+-]\d+%$", re.MULTILINE)


def test_what_is_timed_on_a_cpu_runs(rank_alone: None):
    """But for what is compiled."""
    measured = Measurement(blank("a CPU", DeviceKind.cpu, 8.0, 1, 4096), None, Timer(CPU).time)
    measured.products(product_cases(CPU))
    copies, eager, _ = memory_cases(CPU)
    measured.rate("memory_bandwidth", copies)
    measured.share("efficiency.memory", [eager])
    measured.share("reached.attention", attention_cases(CPU)["reached.attention"])
    assert not measured.left and all(figure.value > 0 for figure in measured.figures)
    assert set(measured.device.peak_flops) == {"bfloat16", "float32"}


def sends() -> list[float]:
    ranks = setup_distributed()
    cases = [case for case in collective_cases(CPU, range(ranks.world_size), None) if case.program[0].num_bytes < 2**21]
    return [Timer(CPU).time(case).seconds for case in cases]


def lacks_memory() -> str:
    ranks = setup_distributed(timeout=timedelta(seconds=20))
    measured = Measurement(blank("a CPU", DeviceKind.cpu, 8.0, 1, 4096), None, Timer(CPU).time)

    def make() -> Callable[[int], object]:
        if ranks.is_first:
            raise torch.OutOfMemoryError("out of memory")
        return lambda n: barrier()

    measured.timed("collectives", [Case([], make)])
    return measured.left["collectives"]


def test_no_rank_waits_for_one_without_memory():
    assert run_ranks(2, lacks_memory) == ["out of memory"] * 2


def test_collectives_of_two_ranks_are_timed():
    (first, second) = run_ranks(2, sends)
    assert len(first) == len(second) == 3 and min(*first, *second) > 0


def test_a_machine_without_a_file_is_told_of_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    asked = config("forecast.device=auto")
    assert file_here() is None and no_file_note(asked) == [
        f"this machine has no device file, so speeds are not predicted: {PROBE} measures one in a minute"
    ]
    assert no_file_note(config("forecast.device=h100_sxm")) == no_file_note(config("forecast.enabled=false")) == []
    own = tmp_path / "conf_of_mine" / "device" / "mine.yaml"
    own.parent.mkdir(parents=True)
    text = (ROOT / "conf/device/l40s.yaml").read_text()
    own.write_text(re.sub(r"(?m)^name: .*", f'name: "{cpu_name()}"', text))
    (own.parent / "broken.yaml").write_text("name: [")
    found = file_here()
    assert (
        found is not None
        and found.name == "mine.yaml"
        and no_file_note(asked)
        == [
            "forecast.device=auto does not use this machine's device file: use it with --config-dir conf_of_mine "
            "forecast.device=mine"
        ]
    )
    assert words_for(tmp_path / "mine.yaml") == f"forecast.device={tmp_path / 'mine.yaml'}"


def test_a_cluster_in_use_is_refused_and_ray_ends(monkeypatch: pytest.MonkeyPatch):
    ended = list[bool]()
    monkeypatch.setattr(everywhere, "start_ray", lambda cluster: None)
    monkeypatch.setattr(everywhere, "stop_ray", lambda: ended.append(True))
    importlib.import_module("ray.train.torch")  # which makes actors of its own
    monkeypatch.setattr("ray.remote", Mock(side_effect=AssertionError("began")))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 8.0})
    monkeypatch.setattr("ray.available_resources", lambda: {"GPU": 6.0})
    with pytest.raises(UserError, match="6 of its 8 GPUs are free"):
        everywhere.on_all_ranks("10.0.0.1:6379", lambda: None)
    monkeypatch.setattr(everywhere, "start_ray", Mock(side_effect=UserError("no Ray")))
    with pytest.raises(UserError, match="no Ray"):
        everywhere.on_all_ranks("10.0.0.1:6379", lambda: None)
    assert ended == [True, True]


def test_a_device_of_the_users_folder_has_a_name_in_every_process(tmp_path: Path):
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "mine.yaml").write_text((ROOT / "conf/device/l40s.yaml").read_text())
    ask = "from fsdp_lab.config.options import device_file, is_device; print(is_device('mine'), device_file('mine'))"
    try:
        use_devices_of(str(tmp_path))
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, cwd=ROOT)
        assert done.stdout.split() == ["None", str(tmp_path / "device" / "mine.yaml")]
        assert "Did you mean mine?" in str(is_device("mines"))
    finally:
        use_devices_of(None)
    assert is_device("mine") is not None


@pytest.mark.full
def test_a_probed_cpu_knows_the_order_of_steps(tmp_path: Path):
    """Two gloo ranks, whose cores others may use: of two steps that took 1.3 times as long as each other, four in five
    are in the right order."""
    out = tmp_path / "own" / "device" / "mine.yaml"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*launch, "-m", "fsdp_lab.probe", "--steps", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and f"written: {out}" in done.stdout, done.stdout + done.stderr[-3000:]
    steps = [(float(forecast), float(measured)) for _, forecast, measured in _STEP.findall(done.stdout)]
    assert len(steps) == 8, done.stdout
    pairs = [(a, b) for a, b in combinations(steps, 2) if not 1 / APART < a[1] / b[1] < APART]
    right = [(a, b) for a, b in pairs if (a[0] < b[0]) == (a[1] < b[1])]
    assert pairs and len(right) >= 0.8 * len(pairs), done.stdout
    device = load_device(out)
    assert device.knows_host or "without launches" in done.stdout  # of cores in use
    assert device.errors.probed is not None and device.kind is DeviceKind.cpu
    ask = [sys.executable, "-m", "fsdp_lab.forecast", "--config-dir", "own", "forecast.device=mine", "precision=fp32"]
    forecast = subprocess.run(
        [*ask, "sharding=per_block", "cluster.num_workers=2"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    told = " ".join(forecast.stdout.split())
    assert "with the figures that a probe measured on it: nine of ten steps" in told, forecast.stdout + forecast.stderr
