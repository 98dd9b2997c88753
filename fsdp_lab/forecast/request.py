"""One trial to forecast. Imports no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_lab.config import SweepConfig, forecast_settings
from fsdp_lab.config.axes.offload import OffloadConfig
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.forecast.capacity import Forecast, Host, on_capacity, on_host
from fsdp_lab.forecast.devices import capacity_bytes, data_sheet, for_cuda, host_of, is_here, refined
from fsdp_lab.forecast.speed.device import Device


@dataclass(frozen=True)
class Request:
    """One trial to forecast.

    Attributes:
        capacity_bytes: of one device; None: not known.
        page: where to write its timeline; None: nowhere.
        sheet: the device whose speed to forecast; None: only the memory.
        host: of the device.
        per_worker: the user typed the samples of a worker (`${per_worker:N}`), not the global batch size.
    """

    config: SweepConfig
    num_workers: int
    cuda: bool
    capacity_bytes: int | None
    page: Path | None = None
    sheet: Device | None = None
    host: Host = field(default_factory=Host)
    per_worker: bool = False

    @staticmethod
    def of(config: SweepConfig, num_workers: int, page: Path | None = None, per_worker: bool = False) -> Request:
        """Return a request outside of a sweep. Finished trials correct its device."""
        cuda = for_cuda(config)
        sheet = refined(data_sheet(config), config, num_workers)
        host = host_of(num_workers, sheet, cuda and is_here(config))
        return Request(config, num_workers, cuda, capacity_bytes(config, cuda), page, sheet, host, per_worker)

    @property
    def node_size(self) -> int:
        """The devices of a node; all devices if that is not known."""
        return self.sheet.node_size if self.sheet else self.config.cluster.gpus_per_node or sys.maxsize

    @property
    def samples_per_worker(self) -> int:
        """The samples of a worker in a step, which tensor-parallel workers share."""
        return self.config.training.global_batch_size // Ranks.of(self.config.sharding, self.num_workers).dp

    def weigh(self, forecast: Forecast) -> Forecast:
        """Return a forecast, which other requests may share, for this request's own device."""
        return on_capacity(on_host(forecast, self.config), self.capacity_bytes, self.host)

    @property
    def step(self) -> str:
        """An identifier of the step; devices with the same kernels share it."""
        config = self.config if self.cuda else replace(self.config, offload=OffloadConfig())
        kernels = self.sheet.kernels if self.sheet else None
        return json.dumps([forecast_settings(config, self.num_workers), self.cuda, kernels], sort_keys=True)

    @property
    def key(self) -> str:
        """An identifier of the answer. On a CPU, offloading makes no difference."""
        asks = self.config.forecast.solve
        solves = [asks.name, self.capacity_bytes, self.per_worker] if asks else []
        return json.dumps([self.step, solves, repr(self.sheet)])
