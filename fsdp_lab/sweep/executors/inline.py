"""One trial after the other, in this process."""

from __future__ import annotations

from functools import partial

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.engine.inline import run_inline
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import Outcome, read_outcome
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.runner import SweepRun


class InlineExecutor:
    """`engine=inline`: starts nothing, so there is nothing to end."""

    interrupted_by = None

    def start(self, sweep: SweepRun) -> None:
        """Do nothing: this process is ready."""

    def run(self, sweep: SweepRun) -> None:
        while (number := sweep.next()) is not None:
            folder = sweep.folder_of(number)
            sweep.prepare(number)
            sweep.begin(number)
            config = sweep.states[number].trial.config
            run_inline(part(config, TrialConfig), folder, partial(sweep.epoch, number), sweep.address_of(number))
            sweep.end(number, read_outcome(folder) or Outcome(TrialStatus.failed, Reason.of(Code.no_outcome)))

    def stop(self) -> None:
        """Do nothing."""
