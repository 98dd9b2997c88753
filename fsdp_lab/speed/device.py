"""Data sheets of devices: `conf/device/*.yaml`, one file a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from fsdp_lab.config import ConfigError


@dataclass(frozen=True)
class Efficiency:
    """Which share of a data sheet's peaks is reached; measured or fitted, and never above 1.

    Attributes:
        matmul: of the dense peak, by large matrix products.
        attention: of the same, by fused attention.
        memory: of the bandwidth, by everything else.
        link: of the links' bandwidth within a node, by collectives.
        network: of a node's network bandwidth, by collectives between nodes.
    """

    matmul: float
    attention: float
    memory: float
    link: float
    network: float


@dataclass(frozen=True)
class Device:
    """One kind of device, and the nodes that it stands in.

    Attributes:
        peak_flops: dtype -> dense peak in FLOP/s.
        memory_bandwidth: bytes/s.
        num_cores: what the tiles of a matrix product are divided among: streaming multiprocessors, compute units.
        link_bandwidth: bytes/s that one device sends to those of its node.
        node_size: devices of a node.
        network_bandwidth: bytes/s that one node sends to others.
        host_bandwidth: bytes/s between the device and its host, one way.
        host_memory_bandwidth: bytes/s of the host's memory, a device's share.
        launch_s: seconds from one launch of an operator to the next.
        latency_s: seconds of a collective for each rank that it passes.
        source: where the figures are from.
    """

    name: str
    memory_gib: float
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    num_cores: int
    link_bandwidth: float
    node_size: int
    network_bandwidth: float
    host_bandwidth: float
    host_memory_bandwidth: float
    launch_s: float
    latency_s: float
    efficiency: Efficiency
    source: str = field(default="", compare=False)

    def peak(self, dtype: str) -> float:
        """
        Raises:
            ConfigError: the data sheet has none for this dtype.
        """
        try:
            return self.peak_flops[dtype]
        except KeyError:
            known = ", ".join(sorted(self.peak_flops))
            raise ConfigError(
                f"{self.name} has no peak for {dtype}; its data sheet has {known}. Use a precision that computes in "
                "one of these, or add the peak to the device's file."
            ) from None


def load_device(path: Path) -> Device:
    """Read a data sheet.

    Raises:
        ConfigError: a key is missing or unknown.
    """
    content = yaml.safe_load(path.read_text())
    expected = {f.name for f in fields(Device)}
    if not isinstance(content, dict) or set(content) != expected:
        found = set(content) if isinstance(content, dict) else set()
        missing, unknown = sorted(expected - found), sorted(map(str, found - expected))
        raise ConfigError(f"{path.name} is no data sheet of a device: missing {missing}, unknown {unknown}.")
    return Device(**{**content, "efficiency": Efficiency(**content["efficiency"])})
