"""Which executor and which listeners a sweep has, by its configuration."""

from __future__ import annotations

from fsdp_lab.config import is_address
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.sweep import Engine
from fsdp_lab.engine.ray_job import check_job
from fsdp_lab.report.write import FILES
from fsdp_lab.storage.objects import check_access
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.listeners.forecasts import Forecasts
from fsdp_lab.sweep.listeners.mlflow import MlflowRuns
from fsdp_lab.sweep.listeners.report import Report
from fsdp_lab.sweep.listeners.results_csv import ResultsCsv
from fsdp_lab.sweep.names import folder_key, relative, resume_lines, ui_command
from fsdp_lab.sweep.runner import Executor, SweepPlan, run_sweep


def start_sweep(plan: SweepPlan) -> ExitCode:
    """Run a sweep and print the result.

    Raises:
        UserError: see `run_sweep`; a job of Ray's would lose its results; object storage refuses, or does not answer.
    """
    check_job(plan.config, plan.folder, folder_key(plan.started.multirun))
    if (place := plan.config.cluster.storage_path) is not None and is_address(place):
        check_access(place)
    console = Console(plan.state, plan.swept, ticks=plan.config.engine is not Engine.inline)
    runs = MlflowRuns(plan.config.tracking, console)
    report = Report(runs)
    # In this order: MLflow first, so that the table has the runs' ids; forecasts last, for they may skip a trial.
    listeners = [runs, console, ResultsCsv(runs.run_id), report]
    if plan.config.engine is Engine.ray:
        listeners.append(Forecasts(plan))
    code = run_sweep(plan, build_executor(plan.config.engine), listeners)
    console.final(report.answer)
    where = relative(plan.folder)
    shown = [f"report: {where}/{FILES[0]}"] if report.answer else []
    shown += [f"results: {where}/results.csv", f"compare: {runs.ui_url or ui_command(plan.config.tracking.uri)}"]
    shown += [f"MLflow run: {runs.parent_id}"] if runs.parent_id else []
    shown += resume_lines(plan.folder) if code is ExitCode.interrupted else []
    console.rich.print(*shown, sep="\n", highlight=False, soft_wrap=True)
    return code


def build_executor(engine: Engine) -> Executor:
    """Return the executor. Ray is imported only for a sweep that uses it."""
    if engine is Engine.inline:
        from fsdp_lab.sweep.executors.inline import InlineExecutor

        return InlineExecutor()
    from fsdp_lab.sweep.executors.ray_tune import RayTuneExecutor

    return RayTuneExecutor()
