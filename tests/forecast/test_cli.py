"""`python -m fsdp_lab.forecast` as people type it; but for the last tests, in this process."""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_lab.commands.forecast import print_scope
from fsdp_lab.commands.forecast_cells import plan_forecasts
from fsdp_lab.config import ConfigError
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.forecast.run import Request
from fsdp_lab.training.__main__ import read_config
from tests.forecast.command import forecast_here
from tests.ranks import config
from tests.sweep.conftest import wait_for

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def forecast(tmp_path: Path) -> Command:
    return lambda *words, **options: forecast_here(tmp_path, *words, **options)


def written(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("forecast.csv")
    with file.open() as lines:
        return list(csv.DictReader(lines))


def test_a_forecast_asks_no_cluster_for_its_workers():
    with pytest.raises(
        ConfigError, match=r"cluster\.num_workers=null with cluster\.address=head:6379: .* set cluster\.num"
    ):
        plan_forecasts(["cluster.address=head:6379"], False)
    plan, _ = plan_forecasts(["cluster.address=head:6379", "cluster.num_workers=8"], False)
    assert plan.trials[0].config.cluster.num_workers == 8


def test_one_configuration(forecast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = forecast("sharding=root", "precision=bf16", "cluster.num_workers=4", "forecast.keep=3")
    assert done.returncode == 0, done.stderr
    assert "forecast.keep" not in done.stdout, "which chooses among several"
    assert "for CPUs" in done.stdout and "sharding=root makes the whole model one unit" in done.stdout
    (row,) = written(tmp_path)
    words = ["sharding=root", "precision=bf16", "cluster.num_workers=4", "training.global_batch_size=64"]
    peaks = forecast_profile(read_config(None, words), 4, cuda=False).peaks["device"]
    assert int(row["peak_bytes"]) == peaks["total"]
    assert int(row["activation_bytes"]) == peaks["activation"]
    assert row["cluster.num_workers"] == "4" and row["fits"] == ""
    assert f"{peaks['total'] / 2**20:.2f}" in done.stdout
    page = Path(row["timeline"])
    assert (tmp_path / page).is_file()
    lines = done.stdout[done.stdout.index("4 workers, 16 images per worker") :].splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 80, "broken between words"
    assert "forecast.capacity_gib=<GiB of your GPU> to see what fits." in " ".join(lines)


def test_where_no_bar_is_seen_lines_state_how_far_it_is(forecast: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsdp_lab.commands.forecast.SPEAK_S", 0.0)
    done = forecast(
        "-m", "model=mlp", "sharding=root,ddp", "precision=fp32", "reshard_after_forward=always", "offload=none"
    )
    shown = [line.partition(";")[0] for line in done.stdout.splitlines() if line.startswith("forecasting: ")]
    assert [line[: len("forecasting: 1 of 2 done")] for line in shown] == [
        "forecasting: 1 of 2 done",
        "forecasting: 2 of 2 done",
    ]


@pytest.mark.full
def test_a_setting_fits_where_its_batch_is_no_larger_than_the_largest_microbatch(forecast: Command, tmp_path: Path):
    done = forecast(
        "sharding=ddp,per_block", "precision=fp32", "model=mlp", "offload=none", "reshard_after_forward=always",
        "forecast.device=cuda", "forecast.capacity_gib=1.2", "forecast.largest_microbatch=true", "-m",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fits = {row["fits"]: int(row["largest_microbatch"]) for row in written(tmp_path)}
    assert fits["true"] >= 32 > fits["tight"]


def test_a_grid_is_sorted_by_peak_and_says_what_fits(forecast: Command, tmp_path: Path):
    """Without speeds, as here, forecast.keep is no error."""
    done = forecast(
        "sharding=ddp,per_block", "precision=fp32", "model=mlp", "optimizer.lr=0.1,0.2", "forecast.device=cuda",
        "forecast.capacity_gib=1.2", "forecast.folder=here", "forecast.keep=2", "-m",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "for GPUs" in done.stdout and "left out" in done.stdout
    rows = written(tmp_path / "here")
    assert len(rows) == 2 * 2 * 2 + 2 * 2  # per_block: offload x reshard x lr; ddp: reshard x lr
    peaks = [int(row["peak_bytes"]) for row in rows]
    assert peaks == sorted(peaks)
    assert {row["fits"] for row in rows} == {"true", "tight"}
    assert "varied because no value was named: offload, reshard_after_forward." in done.stdout
    for row in rows:
        assert (row["fits"] == "true") == (int(row["needed_bytes"]) <= int(row["capacity_bytes"]))
    offloaded = [row for row in rows if row["offload"] == "cpu"]
    assert all(int(row["host_param_bytes"]) > 0 and int(row["param_bytes"]) == 0 for row in offloaded)
    pages = {row["timeline"] for row in rows}
    assert len(pages) == 2 * 2 + 1, "one learning rate is as good as another, and DDP reshards nothing"
    assert all((tmp_path / page).is_file() for page in pages)


def test_speeds_of_a_grid(forecast: Command, tmp_path: Path):
    """DDP is shown once, for it gathers nothing again; the CSV has every cell."""
    done = forecast(
        "-m", "model=mlp", "sharding=ddp,root", "reshard_after_forward=always,never", "precision=bf16_mixed",
        "offload=none", "cluster.num_workers=8", "forecast.device=h100_sxm",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = written(tmp_path)
    assert len(rows) == 4 and all(float(row["samples_per_s_per_device"]) > 0 for row in rows)
    shown = [line.split()[:2] for line in done.stdout.splitlines()]
    assert [words for words in shown if words[:1] == ["ddp"]] == [["ddp", "any"]]
    assert "gathers block by block" in " ".join(done.stdout.split())


def test_the_fastest_is_the_fastest_though_a_plainer_setting_is_within_the_tolerance(forecast: Command, tmp_path: Path):
    """Two settings 1.4 % apart, which need the same memory of a GPU that is almost empty."""
    done = forecast(
        "-m", "model=mlp", "model.hidden_dim=2048", "model.num_layers=4", "sharding=per_block",
        "reshard_after_forward=always,never", "precision=bf16_mixed", "training.global_batch_size=65536",
        "cluster.num_workers=8", "offload=none", "forecast.device=h100_sxm",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = {row["reshard_after_forward"]: float(row["step_s"]) for row in written(tmp_path)}
    fastest, slower = sorted(steps, key=steps.__getitem__)
    assert 1.0005 < steps[slower] / steps[fastest] < 1.03, "within report.speed_tolerance, and not the same"
    text = " ".join(done.stdout.split())
    assert f"Recommended: reshard_after_forward={fastest}: " in text
    assert f"May be as fast: reshard_after_forward={slower}; this one is predicted fastest." in text
    assert f" reshard_after_forward={slower}: {steps[fastest] / steps[slower]:.2f}" in text


def test_a_grid_of_devices_says_that_it_is_for_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    logged = []
    plan, swept = plan_forecasts(["model=mlp", "sharding=ddp", "cluster.num_workers=2"], False)
    for devices in (["cpu", "h100_sxm"], ["h100_sxm", "h100_sxm"], ["cpu", "cpu"]):
        shown = io.StringIO()
        requests = [Request.of(config("model=mlp", f"forecast.device={device}"), 2) for device in devices]
        print_scope(Console(file=shown, width=200), plan.trials * 2, requests, swept)
        logged.append(next(line for line in shown.getvalue().splitlines() if line.startswith("for ")).partition(":")[0])
    hint = " (forecast.device=cuda forecasts for GPUs)"
    assert logged == ["for GPUs and CPUs, by forecast.device", "for GPUs", f"for CPUs{hint}"]


PRESET = """# @package _global_
defaults:
  - override /model: mlp
hydra:
  sweeper:
    params: {sharding: "ddp,root", precision: "fp32,bf16", offload: none, reshard_after_forward: always}
"""


def test_a_preset_brings_its_axes(tmp_path: Path):
    """Ours, and one of the user's folder; an axis that is typed too is the typed one."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(PRESET)
    plan, swept = plan_forecasts(["experiment=zero2_zero3"], True)
    assert swept == ["sharding", "reshard_after_forward"] and len(plan.trials) == 4
    plan, swept = plan_forecasts([f"--config-dir={tmp_path}", "experiment=mine", "sharding=per_block"], True)
    assert [trial.choices["precision"] for trial in plan.trials] == ["fp32", "bf16"]
    assert {trial.choices["sharding"] for trial in plan.trials} == {"per_block"} and swept == ["precision"]


def test_a_batch_that_grows_with_the_workers(forecast: Command, tmp_path: Path):
    axes = ("sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=always")
    batch = "training.global_batch_size=${per_worker:8}"
    done = forecast("-m", "model=mlp", "cluster.num_workers=1,64,1024", batch, *axes)
    assert done.returncode == 0, done.stderr
    rows = {row["cluster.num_workers"]: row for row in written(tmp_path)}
    assert set(rows) == {"1", "64", "1024"}
    assert int(rows["1024"]["param_bytes"]) < int(rows["64"]["param_bytes"]) < int(rows["1"]["param_bytes"])
    assert len({row["input_bytes"] for row in rows.values()}) == 1


@pytest.mark.full
def test_the_page_of_a_large_model_is_small(forecast: Command, tmp_path: Path):
    done = forecast("model=vit_l_16", "activation_checkpointing=full", "training.grad_accum_steps=2", "optimizer=adamw")
    assert done.returncode == 0, done.stderr
    (page,) = tmp_path.rglob("timeline_0.html")
    assert page.stat().st_size < 2_000_000


@pytest.mark.parametrize("word", ["--capacity=3", "forecast.folder=/proc/nowhere", "dry_run=true", "resume=last"])
def test_what_only_forecasts_are_asked_is_refused_in_one_line(forecast: Command, word: str):
    """What every command refuses is in `tests/messages.txt`."""
    done = forecast(word)
    assert done.returncode == 2 and word in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_help_names_its_own_keys(forecast: Command):
    done = forecast("--help")
    assert done.returncode == 0
    assert "forecast.capacity_gib" in done.stdout and "-m" in done.stdout


def test_an_interrupt_keeps_the_forecasts_that_are_made(forecast: Command, tmp_path: Path):
    words = ("-m", "model=mlp", "sharding=ddp,root,per_block", "precision=fp32", "reshard_after_forward=always")
    done = forecast(*words, "offload=none", interrupt_after=2)
    assert done.returncode == 130 and len(written(tmp_path)) == 2
    assert "interrupted after 2 of 3 settings" in done.stderr and "forecast peak of" in done.stdout
    done = forecast(*words, "offload=none", interrupt_after=0)
    assert done.returncode == 130 and "interrupted before a forecast was made" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_the_processes_of_a_grid(tmp_path: Path, number: int):
    axes = ["sharding=ddp,root,per_block", "precision=fp32,bf16_mixed", "optimizer=sgd,adam", "model=vit_b_16"]
    command = [sys.executable, "-m", "fsdp_lab.forecast", "-m", *axes, "offload=none", "reshard_after_forward=always"]
    with subprocess.Popen(
        [*command, f"forecast.folder={tmp_path}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        # Of at most three processes one is at its second page: its first forecast has been known since then.
        wait_for(lambda: len(list(tmp_path.glob("timeline_*.html"))) >= 4, process, 200)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    made = len(written(tmp_path))
    assert 1 <= made < 12
    assert f"fsdp_lab.forecast: interrupted after {made} of 12 settings" in err
    assert "forecast peak of" in out and "Traceback" not in err
