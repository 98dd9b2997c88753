"""Data sheets of devices: `conf/device/*.yaml`, one file a device."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdp_lab.config import ConfigError
from fsdp_lab.speed.measured import Measured, read_measured


class DeviceKind(StrEnum):
    """Which collectives send: NCCL's or gloo's."""

    cuda = "cuda"
    cpu = "cpu"


class Basis(StrEnum):
    """Where a device's efficiencies are from. `data sheet`: from another device, as none were measured on this one;
    `fitted`: to published steps of this one; `calibration`: measured on it; `trials`: any of these, corrected by
    trials that ran on it."""

    data_sheet = "data sheet"
    fitted = "fitted"
    calibration = "calibration"
    trials = "trials"


@dataclass(frozen=True)
class Reached:
    """Which share of a data sheet's peaks microbenchmarks reach: of arithmetic by large matrix products and by fused
    attention, of bandwidth by copies."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True)
class Efficiency:
    """Which share of what microbenchmarks reach a training step does: learned on one device, and used for others, too.

    Attributes:
        matmul: by matrix products whose tiles fill the device.
        attention: by fused attention, forwards; backwards it reaches three quarters of this.
        memory: by everything else.
        link: of the links' bandwidth within a node, by collectives.
        network: of a node's network bandwidth, by collectives between nodes.
    """

    matmul: float
    attention: float
    memory: float
    link: float
    network: float


@dataclass(frozen=True)
class KnownError:
    """Relative errors of step times that were predicted on this basis, of steps that it was not fitted to.

    Attributes:
        median: of their absolute values.
        p90: what nine of ten do not exceed.
    """

    median: float
    p90: float


@dataclass(frozen=True)
class Factors:
    """What finished trials have taken of what was predicted.

    Attributes:
        compute: factor of the seconds of everything but collectives.
        communication: factor of the seconds of collectives.
        overlap: the share that was hidden of what the streams could hide.
        settings: how many of them have run.
    """

    compute: float = 1.0
    communication: float = 1.0
    overlap: float = 1.0
    settings: int = 0


@dataclass(frozen=True)
class Device:
    """One kind of device, and the nodes that it stands in.

    Attributes:
        memory_gib: GiB, as CUDA tells it.
        peak_flops: dtype -> dense peak in FLOP/s.
        memory_bandwidth: bytes/s.
        num_cores: what the tiles of a matrix product are divided among: streaming multiprocessors, compute units.
        link_bandwidth: bytes/s that one device sends to those of its node.
        node_size: devices of a node.
        network_bandwidth: bytes/s that one node sends to others.
        host_bandwidth: bytes/s between the device and its host, one way.
        host_memory_bandwidth: bytes/s of the host's memory, a device's share.
        launch_s: seconds from one launch of an operator to the next.
        latency_s: seconds that a collective takes before it sends.
        link_latency_s: seconds of a message from device to device within a node.
        network_latency_s: the same between nodes.
        error: of predictions for this device on this basis, of the steps that were looked at: sharded in blocks, in
            bfloat16, on one node.
        error_elsewhere: of predictions of any other step.
        relative: of the ratio of two predictions of the steps that were looked at, for one model on this device:
            what is common to all of them, as the level of a machine, is not in it. None: not known.
        source: where the figures are from.
        measured: by a calibration, in place of what the peaks and efficiencies say; None: there was none.
        factors: by which trials that ran on it correct the rest; in no file.
    """

    name: str
    kind: DeviceKind
    basis: Basis
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
    link_latency_s: float
    network_latency_s: float
    reached: Reached
    efficiency: Efficiency
    error: KnownError
    error_elsewhere: KnownError
    relative: KnownError | None = None
    source: str = field(default="", compare=False)
    measured: Measured | None = None
    factors: Factors = Factors()

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


SETTINGS_FOR_ERRORS = 8  # that have run, from which their own errors are known
_OPTIONAL = {"measured", "relative"}
_ERRORS = ("error", "error_elsewhere", "relative")
_FIELDS = {each.name: each.type for each in fields(Device) if each.name != "factors"}


def load_device(path: Path) -> Device:
    """Read a data sheet.

    Raises:
        ConfigError: a key is missing or unknown, or a value is not one of its key's.
    """
    import yaml  # forecasts of memory need only PyTorch and torchvision

    try:
        read = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read as YAML: {' '.join(str(error).split())}") from error
    content = _checked(read, set(_FIELDS), path.name, _OPTIONAL)
    content = {key: value for key, value in content.items() if key not in _OPTIONAL or value is not None}
    parts = {"reached": Reached, "efficiency": Efficiency} | {key: KnownError for key in _ERRORS if key in content}
    for key, of in parts.items():
        content[key] = of(**_checked(content[key], {each.name for each in fields(of)}, f"{path.name}: {key}"))
    for key, choices in (("kind", DeviceKind), ("basis", Basis)):
        try:
            content[key] = choices(content[key])
        except ValueError:
            known = ", ".join(choices)
            raise ConfigError(f"{path.name}: {key}={content[key]} is none of {known}; use one of these.") from None
    _check_numbers(content, path.name)
    if "measured" in content:
        content["measured"] = read_measured(content["measured"], path.name)
    return Device(**content)


def _check_numbers(content: Mapping[str, Any], where: str) -> None:
    for key in ("name", "source"):
        if not isinstance(content[key], str):
            raise ConfigError(f"{where}: {key}={content[key]} is no text.")
    if not isinstance(content["peak_flops"], dict) or not content["peak_flops"]:
        raise ConfigError(f"{where}: peak_flops={content['peak_flops']} is no mapping of dtypes to FLOP/s.")
    numbers = {key: value for key, value in content.items() if _FIELDS[key] in ("float", "int")}
    numbers |= {f"peak_flops.{dtype}": peak for dtype, peak in dict(content["peak_flops"]).items()}
    errors = [key for key in _ERRORS if key in content]
    for key in ("reached", "efficiency", *errors):
        numbers |= {f"{key}.{name}": value for name, value in vars(content[key]).items()}
    for group in errors:
        for key, value in vars(content[group]).items():
            if isinstance(value, int | float) and value >= 1:
                raise ConfigError(f"{where}: {group}.{key}={value} is a share of a step's time; use a number below 1.")
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(
                f"{where}: {key}={value} is no positive number; YAML writes 1.0e+12, with a point and a sign."
            )


def _checked(content: Any, expected: set[str], where: str, optional: Collection[str] = ()) -> dict[str, Any]:
    found = set(content) if isinstance(content, dict) else set()
    missing, unknown = sorted(expected - found - set(optional)), sorted(map(str, found - expected))
    if missing or unknown:
        raise ConfigError(f"{where} is no data sheet of a device: missing {missing}, unknown {unknown}.")
    return dict(content)
