"""One trial after the other, in this process."""

from __future__ import annotations

from functools import partial

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.engine.inline import run_inline
from fsdp_lab.sweep.sweep import Sweep


class InlineExecutor:
    """The executor of `engine=inline`: it starts nothing, so there is nothing to end."""

    interrupted_by: str | None = None

    def start(self, sweep: Sweep) -> None: ...

    def run(self, sweep: Sweep) -> None:
        while (number := sweep.next()) is not None:
            sweep.prepare(number)
            sweep.begin(number)
            config = part(sweep.config_of(number), TrialConfig)
            run_inline(config, sweep.folder_of(number), partial(sweep.epoch, number), sweep.address_of(number))
            sweep.end(number)

    def stop(self) -> None: ...
