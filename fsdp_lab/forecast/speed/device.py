"""Data sheets of devices: `conf/device/*.yaml`, one file for each device."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fsdp_lab.config import ConfigError


class DeviceKind(StrEnum):
    """Which library runs the collectives: NCCL on `cuda`, gloo on `cpu`."""

    cuda = "cuda"
    cpu = "cpu"


class Basis(StrEnum):
    """Where a device's efficiencies come from.

    - `data sheet`: from another device, because none were measured on this one
    - `fitted`: from published steps of this device
    - `probed`: measured on this machine by `python -m fsdp_lab.probe`
    - `trials`: one of these, corrected by trials that ran on the device
    """

    data_sheet = "data sheet"
    fitted = "fitted"
    probed = "probed"
    trials = "trials"


@dataclass(frozen=True)
class Reached:
    """The shares of a data sheet's peaks that microbenchmarks reach.

    Attributes:
        matmul: of arithmetic, by large matrix products.
        attention: of arithmetic, by FlashAttention-2.
        memory: of bandwidth, by copies.
        cudnn_attention: of arithmetic, by cuDNN's attention, if PyTorch prefers that; None: it uses FlashAttention-2.
    """

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    cudnn_attention: float | None = None


@dataclass(frozen=True)
class Efficiency:
    """The shares of microbenchmarks' rates that a training step reaches; fitted on one device, used for all.

    Attributes:
        matmul: by matrix products whose tiles fill the device.
        float8: by matrix products in float8.
        attention: by fused attention, forward; backward reaches three quarters of this.
        memory: by everything else that a step runs operator by operator.
        fused: by kernels that the compiler generated.
        link: of the links' bandwidth within a node, by collectives.
        network: by gathers between nodes, of what its adapters reach (`costs.network_alone`).
        overlap: of the time in which collectives and other work overlap; the rest is lost, because they share cores and
            memory.
    """

    matmul: float
    float8: float
    attention: float
    memory: float
    fused: float
    link: float
    network: float
    overlap: float


@dataclass(frozen=True)
class KnownError:
    """Relative errors of predicted step times, for sources that the figures were not fitted to.

    Attributes:
        median: of their absolute values; each source counts once.
        p90: nine of ten do not exceed it.
        sources: the number of sources, each left out in turn; 0: not known.
    """

    median: float
    p90: float
    sources: int = 0


@dataclass(frozen=True)
class Errors:
    """The errors of a device's predictions by the kind of step. All kinds shard blocks and compute in bfloat16.

    Attributes:
        other: of any other step, and of a kind without an error of its own.
        eager: neither compiled nor in float8.
        compiled: not in float8.
        float8: compiled or not.
        several_nodes: of any of these kinds over several nodes.
        probed: of any step on a device that a probe measured; None: not known.
    """

    other: KnownError
    eager: KnownError | None = None
    compiled: KnownError | None = None
    float8: KnownError | None = None
    several_nodes: KnownError | None = None
    probed: KnownError | None = None

    def of(self, kinds: Iterable[str]) -> KnownError:
        """Return the largest error of a step's kinds (names of attributes); of equal ones, that of fewer sources."""
        return max((getattr(self, kind) or self.other for kind in kinds), key=lambda one: (one.p90, -one.sources))


@dataclass(frozen=True)
class Factors:
    """Corrections of predictions by finished trials.

    Attributes:
        compute: factor of the seconds of everything but collectives, including launches.
        communication: factor of the seconds of collectives.
        overlap: of the time that the streams could hide, the share that was hidden.
        settings: the number of settings that have run.
        alike: they are in the group of the predicted step (`fsdp_lab.forecast.keep.ratio_group`).
        agree: there are several, and the corrected predictions are right to 10 %.
    """

    compute: float = 1.0
    communication: float = 1.0
    overlap: float = 1.0
    settings: int = 0
    alike: bool = False
    agree: bool = False

    @property
    def know_errors(self) -> bool:
        """Whether enough settings of the group have run to use their errors for its predictions."""
        return self.alike and self.settings >= SETTINGS_FOR_ERRORS


@dataclass(frozen=True)
class Device:
    """One kind of device, and the nodes that contain it.

    Attributes:
        name: as CUDA or the operating system reports it.
        memory_gib: GiB, as CUDA reports it.
        peak_flops: dtype -> dense peak in FLOP/s.
        memory_bandwidth: bytes/s.
        num_cores: units that share the tiles of a matrix product: streaming multiprocessors, compute units.
        link_bandwidth: bytes/s from one device to others of its node.
        node_size: devices of a node.
        network_bandwidth: bytes/s from one node to others.
        host_bandwidth: bytes/s between the device and its host, one way.
        host_memory_bandwidth: one device's share of the bytes/s of the host's memory.
        launch_s: seconds from one launch of an operator to the next.
        latency_s: seconds before a collective sends.
        link_latency_s: seconds of a message from device to device within a node.
        network_latency_s: the same between nodes.
        compiled_launch_s: seconds from one launch of compiled code to the next, with its wrapper; a probe measures it
            together with `launch_s`. None: it is `launch_s`, and neither was measured on this host.
        pageable_bandwidth: as `host_bandwidth`, of memory that is not pinned; None: not known.
        product_shares: dtype -> the share of its peak that matrix products reach, if it differs from `reached`.
        errors: of its predictions.
        relative: the error of the ratio of two predictions of validated steps, for one model on this device. A common
            error, such as the level of a machine, cancels. None: not known.
        factors: corrections by trials that ran on the device; not in the file.
        network_known: `network_bandwidth` is the user's network, not the file's assumption; not in the file.
    """

    name: str
    kind: DeviceKind
    basis: Basis
    memory_gib: float
    peak_flops: Mapping[str, float] = field(hash=False)
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
    errors: Errors
    relative: KnownError | None = None
    compiled_launch_s: float | None = None
    pageable_bandwidth: float | None = None
    product_shares: Mapping[str, float] | None = field(default=None, hash=False)
    source: str = field(default="", compare=False)
    factors: Factors = Factors()
    network_known: bool = False

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def knows_host(self) -> bool:
        """Whether launches were measured on its own host."""
        return self.compiled_launch_s is not None

    @property
    def kernels(self) -> tuple[int, bool]:
        """The properties that decide which kernels a step calls, and their buffers."""
        return self.num_cores, self.reached.cudnn_attention is not None

    @property
    def network_gbit(self) -> float:
        return self.network_bandwidth / _BYTES_OF_GBIT

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for a dtype.

        Raises:
            ConfigError: the data sheet has none for it.
        """
        try:
            return self.peak_flops[dtype]
        except KeyError:
            known = ", ".join(sorted(self.peak_flops))
            raise ConfigError(
                f"{self.name} has no peak for {dtype}; its data sheet has {known}. Use a precision that computes in "
                "one of these, or add the peak to the device's file."
            ) from None


OTHER, PROBED = "other", "probed"  # of `Errors`
# Errors on steps that were published after the fits, by November 2026: 18 steps of 12 publishers, on A100s and H100s.
# 17 of 40 speeds of 17 publishers were outside of ranges that nine of ten should be in.
UNSEEN = {"eager": 0.13, "compiled": 0.22, "float8": 0.155}
_BYTES_OF_GBIT = 1e9 / 8
SETTINGS_FOR_ERRORS = 8  # finished settings from which on their own errors count
NOT_IN_FILES = ("factors", "network_known")
_NOT_IN_DIGEST = ("basis", "errors", "relative", "network_bandwidth", *NOT_IN_FILES)


def on_network(device: Device, gbit: float) -> Device:
    """Return the device in nodes that send so many Gbit/s to others."""
    return replace(device, network_bandwidth=gbit * _BYTES_OF_GBIT, network_known=True)


def digest(device: Device) -> str:
    """Return a digest of the figures of a file that predict steps on one node, 16 digits.

    Known errors, corrections by trials, and the network between nodes do not change it.
    """
    seen = [f.name for f in fields(Device) if f.compare and getattr(device, f.name) != f.default]
    counted = [name for name in seen if name not in _NOT_IN_DIGEST]
    figures = {name: value for name, value in asdict(device).items() if name in counted}
    return sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:16]


def load_device(path: Path) -> Device:
    """Read a data sheet.

    Raises:
        ConfigError: a key is missing or unknown, or a value is invalid.
    """
    import yaml  # forecasts of memory need only PyTorch and torchvision

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read as YAML: {' '.join(str(error).split())}") from error
    return read_device(content, path.name)


def read_device(content: Any, name: str) -> Device:
    """Return the content of a data sheet as a device; errors show the file's `name`. Raises ConfigError."""
    device: Device = _part(Device, content, f"{name}: ")
    return device


def _part(of: type[Any], content: Any, prefix: str) -> Any:
    """Return a mapping of a data sheet as its dataclass; errors show `prefix`."""
    known = {each.name: each for each in fields(of) if each.name not in NOT_IN_FILES}
    given = content if isinstance(content, dict) else {}
    missing = sorted(name for name, each in known.items() if each.default is MISSING and name not in given)
    unknown = sorted(str(name) for name in given if name not in known)
    if missing or unknown:
        where = prefix.rstrip(".: ")
        raise ConfigError(f"{where} is not a data sheet of a device: missing {missing}, unknown {unknown}.")
    types = get_type_hints(of)
    values = {name: _value(types[name], value, f"{prefix}{name}") for name, value in given.items()}
    for name, value in values.items():
        if of is KnownError and name != "sources" and value >= 1:
            raise ConfigError(f"{prefix}{name}={value} is a share of a step's time; use a number below 1.")
    return of(**values)


def _value(kind: Any, value: Any, key: str) -> Any:
    """Check the type of a data sheet's value, and return it."""
    if isinstance(kind, UnionType):  # an optional type
        return None if value is None else _value(get_args(kind)[0], value, key)
    if is_dataclass(kind):
        return _part(kind, value, f"{key}.")  # type: ignore[arg-type]
    if get_origin(kind) is Mapping:
        if not isinstance(value, dict) or not value:
            raise ConfigError(f"{key}={value} is not a mapping of dtypes to FLOP/s.")
        return {dtype: _value(float, peak, f"{key}.{dtype}") for dtype, peak in value.items()}
    if kind is str:
        if not isinstance(value, str):
            raise ConfigError(f"{key}={value} is not text.")
        return value
    if issubclass(kind, StrEnum):
        if value not in [*kind]:
            raise ConfigError(f"{key}={value} is not one of {', '.join(kind)}; use one of these.")
        return kind(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{key}={value} is not a positive number; YAML writes 1.0e+12, with a point and a sign.")
    if kind is int and not isinstance(value, int):
        raise ConfigError(f"{key}={value} is a count; use a whole number.")
    return value
