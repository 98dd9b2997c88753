"""A sweep from its first trial to its last: an executor runs the trials, the outputs show them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.config.wording import count
from fsdp_lab.sweep.outputs.outputs import Outputs
from fsdp_lab.sweep.shutdown import interruptible
from fsdp_lab.sweep.sweep import Sweep


class Executor(Protocol):
    """Runs the trials that `Sweep.next` gives; `start` prepares what they need, and `stop` ends that.

    Attributes:
        interrupted_by: the executor's server that ended and so interrupted the sweep; None: none did.
    """

    interrupted_by: str | None

    def start(self, sweep: Sweep) -> None: ...
    def run(self, sweep: Sweep) -> None: ...
    def stop(self) -> None: ...


def run_sweep(sweep: Sweep, executor: Executor, outputs: Outputs) -> ExitCode:
    """Run the trials of a sweep, as many side by side as the executor holds. The folder is locked by the caller.

    Raises:
        UserError: MLflow or Ray cannot be reached, or a trial needs more than the cluster has.
    """
    sweep.outputs = outputs
    with ExitStack() as stack:
        stack.enter_context(interruptible(sweep))
        stack.enter_context(outputs)
        error: BaseException | None = None
        interrupted = False
        try:
            sweep.open()
            if not sweep.has_more():
                sweep.log(f"nothing to do: {_all_ended(sweep)}")
            else:
                executor.start(sweep)
                outputs.ready()
                if sweep.has_more():
                    executor.run(sweep)
                    outputs.ran()
        except KeyboardInterrupt:
            interrupted = True
            lost = executor.interrupted_by
            sweep.log(f"{lost} has ended: it was killed" if lost else "interrupted")
        except BaseException as caught:
            error = caught
            raise
        finally:
            # before the executor stops: that takes seconds, and people press Ctrl-C twice
            try:
                code = sweep.close(interrupted, error)
            finally:
                executor.stop()
    return code


def _all_ended(sweep: Sweep) -> str:
    failed = sum(state.status is TrialStatus.failed for state in sweep.trials)
    if failed:
        return f"{failed} of {count(len(sweep.trials), 'trial')} failed; add resume_failed=true to train again"
    if len(sweep.trials) == 1:
        return "the trial has a result"
    return f"all {len(sweep.trials)} trials have a result"
