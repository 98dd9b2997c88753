"""Every command on every page is run by a test, or marked on the page with the reason why none runs it."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.conftest import ROOT, STORE, run_cli
from tests.pages import Command, all_commands, is_in, lay_project, marks
from tests.workloads.hf.cases import plain_model

HERE = "tests/test_commands.py"
_JOBS, _NIGHTS = "tests/cluster/test_jobs.py", "tests/nightly/test_night.py"
_TRACKING, _SLURM = "tests/cluster/test_tracking.py", "tests/cluster/test_slurm.py"
# What a test here appends to a command, in the place of the page's own values: one worker in this process, one step.
QUICK = {
    "engine": "inline", "cluster.num_workers": "1", "training.max_steps": "1", "training.epochs": "1",
    "training.timing_warmup_steps": "0", "data.num_train": "128", "data.num_val": "32",
    "training.global_batch_size": "32",
}  # fmt: skip
OUT = ("hydra.run.dir=out", "hydra.sweep.dir=out")
# What makes commands small that are too large for a test, by what they contain.
SMALLER = {
    "search.num_trials=20": {"search.num_trials": "3"},
    "fsdp_lab.forecast -m model=llama3": {"model.num_layers": "2"},
    "fsdp_lab.forecast model=llama3": {"model.num_layers": "2"},
    "fsdp_lab.forecast -m model=vit_l_16": {"model.num_layers": "2", "forecast.largest_microbatch": "false"},
    "model=vit_h_14": {"model.num_layers": "2", "cluster.num_workers": "8", "precision": "bf16_mixed"},
    "model=hf_causal_lm": {"data.seq_len": "16"},
    "python -m fsdp_lab -m sharding=ddp,per_block": {"precision": "fp32", "offload": "none"},
    "python -m fsdp_lab -m task=language": {"offload": "none", "reshard_after_forward": "always"},
    "experiment=precision_and_offload": {"precision": "fp32,bf16"},
}

_REFERENCE, _REPORT = "tests/test_reference.py", "tests/report/test_command.py"
_COMPLETION = "tests/test_cli.py::test_a_shell_completes_groups_and_options"
_ACCEPTED = "tests/nightly/test_planted.py::test_a_slower_setting_is_reported_everywhere_until_it_is_accepted"
_STOPPED = f"{_JOBS}::test_a_job_that_is_stopped_leaves_a_sweep_that_another_job_resumes"
_SUMMARIES = "tests/workloads/seq2seq/test_preset.py::test_it_trains_keeps_the_best_epoch_and_summarises"
_TWO_NODES = "tests/cluster/test_nodes.py::test_two_nodes_give_the_losses_of_one"
_CANCELLED = f"{_SLURM}::test_scancel_ends_a_sweep_cleanly_and_its_script_resumes_it"
# The tests that run the commands which no rule below is for: in folders of their own, with small settings, on the
# servers and clusters that they start. A command is here by its whole text: one that changes is looked at again.
RUN = {
    "make sweep": f"{HERE}::test_make_sweep_types_what_the_page_says",
    'eval "$(fsdp-lab -sc install=bash)"': _COMPLETION,
    "fsdp-lab sharding=<Tab>": _COMPLETION,
    "python -m fsdp_lab doctor": "tests/test_doctor.py::test_the_command_has_the_status_of_what_it_found",
    "python -m fsdp_lab --keys": f"{_REFERENCE}::test_a_reader_may_close_the_pipe_before_the_last_key",
    "python -m fsdp_lab --keys cluster": f"{_REFERENCE}::test_keys_are_shown_with_their_meanings",
    "python -m fsdp_lab --cfg job": f"{_REFERENCE}::test_defaults_are_those_of_a_trial_that_names_nothing",
    "python -m fsdp_lab resume=last": "tests/sweep/test_resume.py::test_nothing_left_says_so_and_trains_nothing",
    "python -m fsdp_lab.report sweep=last": f"{_REPORT}::test_it_is_written_again_from_the_folder_by_any_name_it_has",
    "python -m fsdp_lab.report sweep=last use=pytorch": f"{_REPORT}::test_the_setting_can_be_taken_home",
    # with Ray, which a scheduler and forecasts of trials need
    "python -m fsdp_lab -m optimizer.lr='tag(log,interval(1e-4,1e-2))' search=optuna search.num_trials=20 "
    "scheduler=asha sharding=per_block precision=fp32 offload=none reshard_after_forward=always training.epochs=9":
        "tests/sweep/test_outcomes.py::test_more_trials_than_places_half_of_them_stopped_ends_and_frees_what_they_held",
    "python -m fsdp_lab -m sharding=ddp,per_block precision=fp32,bf16_mixed offload=none reshard_after_forward=always "
    "forecast.prune=true forecast.capacity_gib=0.008":
        "tests/sweep/test_forecasts.py::test_what_cannot_fit_is_recorded_and_never_started",
    "torchrun --nproc-per-node 2 -m fsdp_lab.training sharding=root":
        "tests/training/test_isolation.py::test_torchrun_end_to_end",
    # nights
    "python -m fsdp_lab.nightly": f"{_NIGHTS}::test_sigterm_between_nights_is_a_clean_end",
    "python -m fsdp_lab.nightly --once": f"{_NIGHTS}::test_a_slower_setting_is_named_and_its_address_is_secret",
    "python -m fsdp_lab.nightly --check": _ACCEPTED,
    'python -m fsdp_lab.nightly --accept "reason"': _ACCEPTED,
    # a Ray cluster
    "ray start --head": _TWO_NODES,
    "ray start --address=<head>:6379": _TWO_NODES,
    "python -m fsdp_lab -m sharding=ddp,per_block cluster.address=<head>:6379 cluster.storage_path=/shared/fsdp_lab":
        _TWO_NODES,
    "ray job submit --address=http://<head>:8265 --working-dir=. --runtime-env-json='{\"env_vars\": "
    "{\"RAY_JOB_STOP_WAIT_TIME_S\": \"20\"}}' -- python -m fsdp_lab -m sharding=ddp,per_block cluster.address=auto "
    "cluster.storage_path=/shared/fsdp_lab hydra.sweep.dir=/shared/fsdp_lab/monday "
    "tracking.uri=sqlite:////shared/fsdp_lab/mlflow.db": _STOPPED,
    "ray job logs --address=http://<head>:8265 <job>": _STOPPED,
    "ray job stop --address=http://<head>:8265 <job>": _STOPPED,
    "ray job submit --address=http://<head>:8265 --working-dir=. -- python -m fsdp_lab resume=/shared/fsdp_lab/monday":
        _STOPPED,
    # Slurm
    "sbatch slurm.sbatch": _CANCELLED,
    "scancel <job>": _CANCELLED,
    # a shared store
    "mlflow server --host 127.0.0.1 --port 5000 --backend-store-uri "
    "postgresql+psycopg://mlflow:<password>@127.0.0.1/mlflow --artifacts-destination s3://bucket/mlflow":
        f"{_TRACKING}::test_two_nodes_write_into_one_experiment_at_the_same_time",
    "python -m fsdp_lab -m sharding=ddp,per_block tracking.uri=https://mlflow.example.org tracking.experiment=team":
        f"{_TRACKING}::test_two_nodes_write_into_one_experiment_at_the_same_time",
    "python -m fsdp_lab.nightly --once tracking.uri=https://mlflow.example.org":
        f"{_TRACKING}::test_a_night_is_compared_with_the_last_one_and_reported_to_the_store",
    # presets and what is made of their models
    "python -m fsdp_lab experiment=t5_wikihow": _SUMMARIES,
    "python -m fsdp_lab.predict run=<run_id in results.csv>": _SUMMARIES,
    "python -m fsdp_lab experiment=ray_template data.root=<folder that holds FashionMNIST/raw> data.download=false":
        "tests/test_presets.py::test_every_option_trains_for_two_steps",
    "python -m fsdp_lab.predict run=<its MLflow run id> data.root=<the same folder>":
        "tests/sweep/test_outcomes.py::test_a_trial_alone_is_a_plain_run_whose_model_predicts_what_it_measured",
}  # fmt: skip


def owner(command: Command) -> str:
    """Return the test that runs a command; "" where none does."""
    if command.text in RUN:
        return RUN[command.text]
    if command.page == "docs/settings.md" and command.text.startswith("python -c "):
        return f"{HERE}::test_the_entropy_is_that_of_the_page"
    if command.text.startswith("python -m fsdp_lab.forecast "):
        return f"{HERE}::test_a_forecast_of_a_page_runs"
    if f"{command.text} ".startswith("python -m fsdp_lab ") and "<" not in command.text:
        return f"{HERE}::test_a_trial_or_sweep_of_a_page_runs"
    return ""


def run_by(test: str) -> list[Any]:
    """Return a parameter for each different command that a test here runs, as its first page has it."""
    found: dict[str, Command] = {}
    for command in all_commands():
        if not command.reason and owner(command) == f"{HERE}::{test}":
            found.setdefault(command.text, command)
    return [pytest.param(command, id=f"{command.page}: {text[:80]}") for text, command in found.items()]


def test_every_command_is_run_by_a_test_or_marked():
    missing = [command.place for command in all_commands() if not owner(command) and not command.reason]
    told = "name its test in RUN, or mark its block by a line before it, `<!-- not run by a test: reason -->`:"
    assert not missing, "\n".join([told, *missing])


def test_no_command_is_marked_that_a_test_runs():
    both = [f"{command.place}: {owner(command)}" for command in all_commands() if owner(command) and command.reason]
    idle = [f"{page}:{line}: {mark}" for page, line, mark, typed in marks() if not any(map(mark.is_for, typed))]
    assert not both + idle, "\n".join(both + idle)


def test_every_test_that_is_named_exists():
    gone = []
    for test in {owner(command) for command in all_commands()} - {""} | set(RUN.values()):
        file, _, function = test.partition("::")
        if not ((ROOT / file).exists() and re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE)):
            gone.append(test)
    assert not gone, "\n".join(
        [f"name in RUN or owner(), in {HERE}, the tests that run these commands now, instead of:", *sorted(gone)]
    )


def test_no_test_is_named_for_a_command_that_is_on_no_page():
    assert set(RUN) - {command.text for command in all_commands()} == set(), (
        "remove these lines of RUN, or correct them"
    )


def replaced(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the words with other values of some keys, in the place of those that are typed."""
    kept = [word for word in words if word.partition("=")[0] not in values]
    return [*kept, *(f"{key}={value}" for key, value in values.items())]


def made_small(command: Command) -> list[str]:
    """Return the words after `-m` of a command, with what makes it small where it is too large for a test."""
    values = {key: value for part, smaller in SMALLER.items() if part in command.text for key, value in smaller.items()}
    return replaced(command.words[2:], values)


def lay_models(folder: Path) -> None:
    """Write what docs/hugging-face.md has downloaded: tiny models, one with weights."""
    for name in ("gpt2", "llama", "vit"):
        plain_model(name).save_pretrained(folder / "my_models" / name)  # type: ignore[operator]


@pytest.mark.timeout(1600)
@pytest.mark.full
@pytest.mark.parametrize("command", run_by("test_a_forecast_of_a_page_runs"))
def test_a_forecast_of_a_page_runs(command: Command, tmp_path: Path):
    """One whose output the page shows as it is printed: six and twelve large settings take minutes."""
    lay_project(tmp_path)
    if "my_models" in command.text:
        lay_models(tmp_path)
    words = command.words[2:] if command.output else made_small(command)
    done = forked.run(tmp_path, *words, seconds=1500, environment={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert (found := list(tmp_path.glob("outputs/**/forecast.csv"))), done.stdout
    assert len(found[0].read_text().splitlines()) > 1
    if command.output:
        assert is_in(command.output, done.stdout), f"{command.place} prints:\n{done.stdout}"


@pytest.mark.full
@pytest.mark.parametrize("command", run_by("test_a_trial_or_sweep_of_a_page_runs"))
def test_a_trial_or_sweep_of_a_page_runs(command: Command, tmp_path: Path):
    lay_project(tmp_path)
    if "my_models" in command.text:
        lay_models(tmp_path)
    done = run_cli(tmp_path, *replaced(made_small(command)[1:], QUICK), STORE)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = tmp_path.glob("outputs/**/results.csv")
    with results.open() as lines:
        assert {row["status"] for row in csv.DictReader(lines)} <= {"finished", "stopped"}
    assert is_in(command.output, done.stdout, numbers=False), f"{command.place} prints:\n{done.stdout}"


@pytest.mark.ci
def test_make_sweep_types_what_the_page_says(tmp_path: Path):
    typed = subprocess.run(["make", "-n", "sweep"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    words = next(after for line in typed.stdout.splitlines() if (after := line.partition(" -m fsdp_lab ")[2]))
    assert f"`python -m fsdp_lab {words}`" in (ROOT / "README.md").read_text().replace("\n", " ")
    done = run_cli(tmp_path, *replaced(shlex.split(words), QUICK), STORE, *OUT)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out" / "results.csv").open() as lines:
        assert [row["status"] for row in csv.DictReader(lines)] == ["finished"] * 4


def test_make_ui_prints_the_view_of_training_runs():
    typed = subprocess.run(["make", "-n", "ui", "PORT=5012"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert "http://127.0.0.1:5012/#/experiments?workflowType=machine_learning" in typed.stdout
    assert "mlflow ui" in typed.stdout and "--port 5012" in typed.stdout


@pytest.mark.full
def test_the_entropy_is_that_of_the_page(tmp_path: Path):
    (command,) = [each for each in all_commands() if owner(each).endswith("::test_the_entropy_is_that_of_the_page")]
    done = forked.run(tmp_path, "-c", command.words[2])
    assert done.returncode == 0, done.stderr
    if sys.version_info[:2] == (3, 11):  # the help of other versions differs
        assert f"{float(done.stdout):.2f} bits per byte (Python 3.11)" in (ROOT / command.page).read_text()
