"""`python -m fsdp_lab.forecast` as people type it, mostly in this process, and the processes that forecast for it."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path
from unittest import mock

import pytest

from fsdp_lab.forecast import run
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.forecast.pool import NoAnswerError, Pool
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.run import Forecaster
from fsdp_lab.forecast.words import no_forecast_text
from tests.forecast.command import answer, forecast_here
from tests.processes import called, still_running
from tests.ranks import config


def written(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("forecast.csv")
    with file.open() as lines:
        return list(csv.DictReader(lines))


def test_a_grid_is_sorted_by_peak_and_says_what_fits(tmp_path: Path):
    """Without speeds, as here, forecast.keep is no error."""
    done = forecast_here(
        tmp_path, "sharding=ddp,per_block", "precision=fp32", "model=mlp", "optimizer.lr=0.1,0.2", "-m",
        "forecast.device=cuda", "forecast.capacity_gib=1.533", "forecast.folder=here", "forecast.keep=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "for GPUs" in done.stdout and "left out" in done.stdout
    assert "varied because no value was named: offload, reshard_after_forward." in done.stdout
    rows = written(tmp_path / "here")
    assert len(rows) == 2 * 2 * 2 + 2 * 2  # per_block: offload x reshard x lr; ddp: reshard x lr
    peaks = [int(row["peak_bytes"]) for row in rows]
    assert peaks == sorted(peaks) and {row["fits"] for row in rows} == {"true", "unsure"}
    for row in rows:
        assert (row["fits"] == "true") == (int(row["least_bytes"]) <= 0.9 * int(row["capacity_bytes"]))
        assert int(row["needed_bytes"]) < int(row["capacity_bytes"])
    offloaded = [row for row in rows if row["offload"] == "cpu"]
    assert all(int(row["host_param_bytes"]) > 0 and int(row["param_bytes"]) == 0 for row in offloaded)
    pages = {row["timeline"] for row in rows}
    assert len(pages) == 2 * 2 + 1, "one learning rate is as good as another, and DDP reshards nothing"
    assert all((tmp_path / page).is_file() for page in pages)


def test_the_fastest_is_recommended_though_a_plainer_is_near(tmp_path: Path):
    """Two settings 0.6 % apart, which need the same memory of a GPU that is almost empty."""
    done = forecast_here(
        tmp_path, "-m", "model=mlp", "model.hidden_dim=2048", "model.num_layers=8", "sharding=per_block",
        "reshard_after_forward=always,never", "precision=bf16_mixed", "training.global_batch_size=524288",
        "cluster.num_workers=8", "offload=none", "forecast.device=h100_sxm",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = {row["reshard_after_forward"]: float(row["step_s"]) for row in written(tmp_path)}
    fastest, slower = sorted(steps, key=steps.__getitem__)
    assert 1.0005 < steps[slower] / steps[fastest] < 1.03, "within report.speed_tolerance, and not the same"
    text = " ".join(done.stdout.split())
    assert f"Recommended: reshard_after_forward={fastest}: " in text
    assert f"May be as fast: reshard_after_forward={slower}; this one is predicted fastest." in text


def test_the_command_names_the_network_that_it_assumed(tmp_path: Path):
    """Of two nodes of 800 Gbit/s, for whose network a step with gathers of 537 MB waits. An assumed network may be half
    or twice as fast: the range ends where that of 400 and of 1,600 Gbit/s does."""
    words = ["model=mlp", "model.hidden_dim=16384", "model.num_layers=4", "precision=bf16_mixed"]
    words += ["cluster.num_workers=16"]
    lines, out = {}, {}
    for gbit in (None, 400, 800, 1600):
        key = [] if gbit is None else [f"forecast.network_gbit={gbit}"]
        done = forecast_here(tmp_path, *words, "forecast.device=a100_80gb", *key, f"forecast.folder={gbit}")
        assert done.returncode == 0, done.stderr
        (lines[gbit],), out[gbit] = written(tmp_path / f"{gbit}"), done.stdout
    assert [gbit for gbit, text in out.items() if "No network was given: " in text] == [None]
    assert " on 2 nodes of 8, " in out[None] and "reach 75 %, and all-reduces 100 %, of the 800 Gbit/s" in out[None]
    assert out[None].index("sharding.dp_replicate=2 would shard within") < out[None].index("forecast peak of")
    assumed = {gbit: (line["network_gbit"], line["network_assumed"]) for gbit, line in lines.items()}
    assert assumed[None] == ("800.0", "true") and assumed[400] == ("400.0", "false")
    low, middle, high = (float(lines[None][name]) for name in ("step_low_s", "step_s", "step_high_s"))
    assert middle == float(lines[800]["step_s"])
    assert (low, high) == (float(lines[1600]["step_low_s"]), float(lines[400]["step_high_s"]))


@pytest.mark.parametrize("word", ["--capacity=3", "forecast.folder=/proc/x", "dry_run=true", "cluster.address=h:6379"])
def test_what_only_forecasts_are_asked_is_refused_in_one_line(tmp_path: Path, word: str):
    done = forecast_here(tmp_path, word)
    assert done.returncode == 2 and word in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_an_interrupt_keeps_the_forecasts_that_are_made(tmp_path: Path):
    words = ("-m", "model=mlp", "sharding=ddp,root,per_block", "precision=fp32", "reshard_after_forward=always")
    done = forecast_here(tmp_path, *words, "offload=none", interrupt_after=2)
    assert done.returncode == 130 and len(written(tmp_path)) == 2
    assert "Interrupted after 2 of 3 settings: what follows" in done.stdout
    assert "interrupted after 2 of 3 settings" in done.stderr and "forecast peak of" in done.stdout
    done = forecast_here(tmp_path, *words, "offload=none", interrupt_after=0)
    assert done.returncode == 130 and "interrupted before a forecast was made" in done.stderr


@pytest.mark.ci
def test_a_search_loses_a_forecast_with_its_process_and_no_other():
    small, heavy = (Request.of(config(f"model={model}"), 2) for model in ("mlp", "vit_l_16"))
    peaks = forecast_profile(small.config, 2, cuda=False).peaks
    with Forecaster() as forecaster:
        assert forecaster.result(forecaster.submit(small), small).peaks == peaks
        lost, after = forecaster.submit(heavy), forecaster.submit(small)
        (process,) = called("pool import serve")
        process.kill()
        error = forecaster.result(lost, heavy).error
        assert error and error.code == "lost" and "its process was killed" in str(no_forecast_text(error))
        assert forecaster.result(after, small).peaks == peaks
        unwanted = forecaster.submit(heavy)
    error = forecaster.result(unwanted, heavy).error
    assert error and "not made" in str(no_forecast_text(error)), "nobody waits for it any more"


def test_a_late_forecast_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "LIMIT_S", 0.1)
    with mock.patch.object(run, "Pool", wraps=Pool) as pools:
        (made,) = run.forecast_all([Request.of(config("model=mlp"), 2)])
    assert pools.call_count == 1
    assert made.error and "did not answer within 0.1 s; forecast fewer" in str(no_forecast_text(made.error))


def test_a_process_that_dies_or_is_late_costs_one_answer():
    """Ctrl-C is the parent's; what is waited for at the end of a pool is not answered."""
    with Pool(answer, 1, 60.0) as pool:
        pid, same, other = (pool.submit(question).result() for question in ("", "", f"signal {signal.SIGINT:d}"))
        assert pid == same == other != os.getpid()
        for question, limit_s, message in (
            (f"signal {signal.SIGKILL:d}", 60.0, "was killed, most likely because memory ran out"),
            (f"signal {signal.SIGSEGV:d}", 60.0, "ended by SIGSEGV"),
            ("leave 3", 60.0, "ended with exit code 3"),
            ("sleep 60", 0.1, r"did not answer within 0\.1 s"),
        ):
            pool._limit_s = limit_s
            with pytest.raises(NoAnswerError, match=f"^{message}$"):
                pool.submit(question).result()
            pool._limit_s = 60.0
            pid, before = pool.submit("").result(), pid
            assert pid != before
        begun, waiting = pool.submit("sleep 60"), pool.submit("")
        while not begun.running():
            time.sleep(0.01)
    assert called("pool import serve") == []
    for future, error in ((begun, NoAnswerError), (waiting, CancelledError)):
        with pytest.raises(error):
            future.result(timeout=0)


def test_processes_of_a_pool_end_with_a_parent_that_is_killed():
    code = (
        "from fsdp_lab.forecast.pool import Pool; from tests.forecast.command import answer\n"
        "with Pool(answer, 1, 60) as pool:\n"
        "    pool.submit('').result(); print('answered', flush=True); pool.submit('sleep 60').result()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout and parent.stdout.readline() == "answered\n"
        children = called("pool import serve", parent.pid)
        parent.kill()
    assert len(children) == 1 and still_running(children, 10) == []
