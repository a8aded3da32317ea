"""``Cluster``: the devices a plan is for, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopipe.ir.artifact import OMIT_DEFAULT

# more than any machine has; the planner builds tables and tuples of this length
MOST_RANKS = 2**17
# the range of rates and times within which no quotient is infinite; the slowest takes 30 years for a byte or a message
_SLOWEST, _FASTEST = 1e-9, 1e300
_LONGEST_SECONDS = 1e9
ASSUMED_HOST_BANDWIDTH = 10e9
"""Bytes per second between a device and its host: a copy within a CPU's memory, or PCIe 3.0 x16."""


def _is_rate(*values: float) -> bool:
    return all(_SLOWEST <= value <= _FASTEST for value in values)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the hierarchy: ``count`` members, which are ranks or whole inner levels, and the links between them.

    Raises: ValueError naming the field that is out of range.
    """

    name: str
    count: int
    bandwidth: float  # of a link, in bytes per second
    latency_seconds: float
    all_reduce_bandwidth: float = 0.0  # of a ring over the members, in bytes per second; 0: as ``bandwidth``

    @property
    def ring_bandwidth(self) -> float:
        """Bytes per second of a ring over the members."""
        return self.all_reduce_bandwidth or self.bandwidth

    def __post_init__(self) -> None:
        for name, valid, limits in (
            ("count", 1 <= self.count <= MOST_RANKS, f"from 1 to {MOST_RANKS}"),
            ("bandwidth", _is_rate(self.bandwidth), "above 0 and finite"),
            ("latency_seconds", 0 <= self.latency_seconds <= _LONGEST_SECONDS, "0 or more, and finite"),
            ("all_reduce_bandwidth", _is_rate(self.all_reduce_bandwidth or self.bandwidth), "0 or more, and finite"),
        ):
            if not valid:
                raise ValueError(f"level {self.name!r}: {name} must be {limits}, and is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ClusterDevice:
    """One kind of device. Speeds are relative to the device on which the profile was taken.

    Raises: ValueError naming the field that is out of range.
    """

    name: str
    memory_bytes: int = 0  # 0: no limit
    speed: float = 1.0  # of forwards and backwards
    memory_speed: float = 0.0  # of operations that only move memory, such as optimizer steps; 0: as ``speed``
    datasheet: str = ""  # name of the built-in datasheet that describes it; "" if its figures come from elsewhere
    host_bandwidth: float = 0.0  # bytes per second between its memory and the host's, in each direction; 0: assumed

    @property
    def update_speed(self) -> float:
        """How fast the optimizer steps, relative to the device on which the profile was taken."""
        return self.memory_speed or self.speed

    @property
    def to_host_bandwidth(self) -> float:
        """The bandwidth between its memory and the host's, assumed if it is not known."""
        return self.host_bandwidth or ASSUMED_HOST_BANDWIDTH

    def __post_init__(self) -> None:
        for name, valid, limits in (
            ("host_bandwidth", _is_rate(self.to_host_bandwidth), "0 or more, and finite"),
            ("speed", _is_rate(self.speed), "above 0 and finite"),
            ("memory_speed", _is_rate(self.memory_speed or self.speed), "0 or more, and finite"),
            ("memory_bytes", 0 <= self.memory_bytes < 2**63, "from 0 to 2**63 - 1"),
        ):
            if not valid:
                raise ValueError(f"device {self.name!r}: {name} must be {limits}, and is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class RuntimeOverhead:
    """Seconds of a rank's time that the runtime takes, in addition to the model's operations."""

    compute_seconds: float = 0.0  # per forward and per backward
    send_seconds: float = 0.0  # per message, on the sending rank
    send_seconds_per_byte: float = 0.0
    receive_seconds: float = 0.0  # per message, on the receiving rank
    step_seconds: float = 0.0  # between two minibatches
    # per message, in addition to the link's latency, while the ranks compute: on a CPU, the cores that compute also
    # move the messages
    delivery_seconds: float = 0.0
    value_seconds: float = 0.0  # on each of the two ranks, per value of a message beyond the first
    # how many times as long forwards and backwards take in ranks under continuous load as in a profile; 1 or more
    pace: float = 1.0

    def __post_init__(self) -> None:
        ends = self.send_seconds, self.send_seconds_per_byte, self.receive_seconds, self.value_seconds
        others = self.compute_seconds, self.step_seconds, self.delivery_seconds
        if not all(0 <= cost <= _LONGEST_SECONDS for cost in (*ends, *others)):
            raise ValueError(f"the overhead of the runtime must be finite and at least 0, and is {self}")
        if not (_is_rate(self.pace) and self.pace >= 1):
            raise ValueError(f"the pace of ranks must be finite and at least 1, and is {self.pace}")


@dataclass(frozen=True, slots=True)
class Links:
    """The links between the ranks of this machine, measured between two of them."""

    device_kind: str  # cpu or cuda
    latency_seconds: float
    bandwidth: float  # bytes per second
    all_reduce_bandwidth: float  # bytes per second
    host: RuntimeOverhead = RuntimeOverhead()
    across: Level | None = None  # between this machine and another one; None: not measured
    host_bandwidth: float = 0.0  # bytes per second between a device and the host, in each direction; 0: not measured

    def __post_init__(self) -> None:
        rates = self.bandwidth, self.all_reduce_bandwidth, self.host_bandwidth or self.bandwidth
        if not _is_rate(*rates) or not 0 <= self.latency_seconds <= _LONGEST_SECONDS:
            raise ValueError(
                f"links need bandwidths above 0 and a latency of at least 0, all finite; got bandwidth "
                f"{self.bandwidth}, all-reduce bandwidth {self.all_reduce_bandwidth}, latency {self.latency_seconds}"
            )
        if self.device_kind not in ("cpu", "cuda"):
            raise ValueError(f"links between {self.device_kind!r} devices; known: cpu, cuda")

    def level(self, count: int) -> Level:
        """Return the level of ``count`` ranks of this machine."""
        return Level("measured", count, self.bandwidth, self.latency_seconds, self.all_reduce_bandwidth)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and links. Ranks are numbered along the hierarchy: the neighbours of rank r are r-1 and r+1.

    Raises: ValueError if there is no level or device, or the number of devices does not match the ranks.
    """

    levels: tuple[Level, ...]  # innermost first
    devices: tuple[ClusterDevice, ...]  # one for all ranks, or one per rank
    source: str  # where the figures come from, as text
    host: RuntimeOverhead = RuntimeOverhead()  # of each rank
    # the members of each rank and their links, if ranks are teams; levels and devices are then those of teams
    within: Level | None = field(default=None, metadata=OMIT_DEFAULT)
    # how many ranks can compute at a time, because they share the cores of their host; 0: all
    cores: float = field(default=0.0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if not self.levels or not self.devices:
            raise ValueError("a cluster has at least one level and one device")
        if self.num_ranks > MOST_RANKS:
            raise ValueError(f"a cluster has at most {MOST_RANKS} ranks, and this one has {self.num_ranks}")
        if len(self.devices) not in (1, self.num_ranks):
            raise ValueError(f"{len(self.devices)} devices for {self.num_ranks} ranks: give one, or one per rank")
        if not (self.cores == 0 or _is_rate(self.cores)):
            raise ValueError(f"the cores that ranks share must be 0 or more, and finite, and are {self.cores}")

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return math.prod(level.count for level in self.levels)

    @property
    def num_devices(self) -> int:
        """The number of devices: of the members of all ranks."""
        return self.num_ranks * (1 if self.within is None else self.within.count)

    def device(self, rank: int) -> ClusterDevice:
        """Return the device of a rank."""
        return self.devices[rank if len(self.devices) > 1 else 0]

    def speed_of(self, ranks: Sequence[int]) -> float:
        """Return how fast a stage on these ranks computes: the speed of the slowest rank."""
        return min(self.device(rank).speed for rank in ranks)

    def update_speed_of(self, ranks: Sequence[int]) -> float:
        """Return how fast the optimizer of a stage on these ranks steps: the speed of the slowest rank."""
        return min(self.device(rank).update_speed for rank in ranks)

    def memory_of(self, rank: int) -> int:
        """Return the memory of a rank's device in bytes; 0 (no limit) for a rank beyond a list of unequal devices."""
        return self.device(rank).memory_bytes if rank < self.num_ranks or len(self.devices) == 1 else 0

    def span(self, first: int, last: int) -> Level:
        """Return the narrowest link, as a level, of a message between two of the ranks from ``first`` to ``last``."""
        link = self.link(first, last)
        levels = self.levels[: self.levels.index(link) + 1]
        used = [level for level in levels if level.count > 1] or [link]
        ring = min(level.ring_bandwidth for level in used)
        return Level("", 1, min(x.bandwidth for x in used), max(x.latency_seconds for x in used), ring)

    def levels_in_use(self, num_ranks: int) -> int:
        """Return the number of levels of links between the first ``num_ranks`` ranks."""
        width, used = 1, 0
        for level in self.levels:
            used += level.count > 1 and width < num_ranks
            width *= level.count
        return used

    def link(self, a: int, b: int) -> Level:
        """Return the innermost level that contains both ranks."""
        size = 1
        for level in self.levels:
            size *= level.count
            if a // size == b // size:
                return level
        return self.levels[-1]
