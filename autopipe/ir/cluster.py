"""``Cluster``: the devices a plan is for, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# more than any machine has; tables and tuples of ranks are made of what is written here
MOST_RANKS = 2**17
# what is outside of these divides into infinity: 30 years for a byte, or for a message
_SLOWEST, _FASTEST = 1e-9, 1e300
_LONGEST_SECONDS = 1e9


def _is_rate(*values: float) -> bool:
    return all(_SLOWEST <= value <= _FASTEST for value in values)


@dataclass(frozen=True, slots=True)
class Level:
    """``count`` members side by side, joined by links of this bandwidth (bytes per second) and latency (seconds).

    ``all_reduce_bandwidth``: what a ring over the members moves; 0 where it is the bandwidth of the links.
    """

    name: str
    count: int
    bandwidth: float
    latency_seconds: float
    all_reduce_bandwidth: float = 0.0

    @property
    def ring_bandwidth(self) -> float:
        """Bytes per second of a ring over the members."""
        return self.all_reduce_bandwidth or self.bandwidth

    def __post_init__(self) -> None:
        rates = (self.bandwidth, *([self.all_reduce_bandwidth] if self.all_reduce_bandwidth else []))
        numbers = _is_rate(*rates) and 0 <= self.latency_seconds <= _LONGEST_SECONDS
        if not numbers or not 1 <= self.count <= MOST_RANKS:
            raise ValueError(
                f"level {self.name!r}: count >= 1, bandwidth > 0 and latency >= 0 are needed, none beyond measure"
            )


@dataclass(frozen=True, slots=True)
class ClusterDevice:
    """One kind of device. ``memory_bytes`` 0: no limit.

    ``speed``: of forwards and backwards, relative to the device the profile was taken on. ``memory_speed``: the same of
    what only moves memory, such as the step of an optimizer; 0: as ``speed``.
    ``datasheet``: the name of the built-in datasheet that describes it, "" where its figures come from elsewhere.
    """

    name: str
    memory_bytes: int = 0
    speed: float = 1.0
    memory_speed: float = 0.0
    datasheet: str = ""

    @property
    def update_speed(self) -> float:
        """How fast the optimizer steps, relative to the device the profile was taken on."""
        return self.memory_speed or self.speed

    def __post_init__(self) -> None:
        rates = (self.speed, *([self.memory_speed] if self.memory_speed else []))
        if not _is_rate(*rates) or not 0 <= self.memory_bytes < 2**63:
            raise ValueError(f"device {self.name!r}: speed > 0 and memory >= 0 are needed, none beyond measure")


@dataclass(frozen=True, slots=True)
class RuntimeOverhead:
    """Seconds that the runtime itself takes of a rank, beyond what the model does.

    ``compute_seconds``: for each forward and each backward. ``send_seconds``, ``send_seconds_per_byte``,
    ``receive_seconds``: for what crosses with a microbatch, at its two ends; ``value_seconds``: at each end, for each
    value of it beyond the first. ``step_seconds``: from one minibatch to the next. ``delivery_seconds``: what a message
    waits, beyond the link's latency, where the ranks compute: on a CPU the cores that compute also move the messages.
    ``pace``: how much longer forwards and backwards take of ranks that work on and on than in the quietest moment of a
    profile, 1 or more.
    """

    compute_seconds: float = 0.0
    send_seconds: float = 0.0
    send_seconds_per_byte: float = 0.0
    receive_seconds: float = 0.0
    step_seconds: float = 0.0
    delivery_seconds: float = 0.0
    value_seconds: float = 0.0
    pace: float = 1.0

    def __post_init__(self) -> None:
        ends = self.send_seconds, self.send_seconds_per_byte, self.receive_seconds, self.value_seconds
        others = self.compute_seconds, self.step_seconds, self.delivery_seconds
        if not all(0 <= cost <= _LONGEST_SECONDS for cost in (*ends, *others)):
            raise ValueError("the runtime's own costs are times: 0 or more")
        if not (_is_rate(self.pace) and self.pace >= 1):
            raise ValueError("the pace of ranks is 1 or more: how much longer they take than in the profile")


@dataclass(frozen=True, slots=True)
class Links:
    """Measured between two ranks of this machine. ``device_kind``: cpu or cuda. Bandwidths in bytes per second."""

    device_kind: str
    latency_seconds: float
    bandwidth: float
    all_reduce_bandwidth: float
    host: RuntimeOverhead = RuntimeOverhead()

    def __post_init__(self) -> None:
        if not _is_rate(self.bandwidth, self.all_reduce_bandwidth) or not 0 <= self.latency_seconds <= _LONGEST_SECONDS:
            raise ValueError("links: bandwidths > 0 and latency >= 0 are needed")
        if self.device_kind not in ("cpu", "cuda"):
            raise ValueError(f"links between {self.device_kind!r} devices: cpu or cuda is known")

    def level(self, count: int) -> Level:
        """Return the links of so many ranks of this machine."""
        return Level("measured", count, self.bandwidth, self.latency_seconds, self.all_reduce_bandwidth)


@dataclass(frozen=True, slots=True)
class Cluster:
    """``levels``: innermost first; rank r's neighbours are r-1 and r+1. ``source``: where the figures come from.

    ``devices``: one for all ranks, or one per rank. ``host``: what the runtime costs each rank.
    """

    levels: tuple[Level, ...]
    devices: tuple[ClusterDevice, ...]
    source: str
    host: RuntimeOverhead = RuntimeOverhead()

    def __post_init__(self) -> None:
        if not self.levels or not self.devices:
            raise ValueError("a cluster has at least one level and one device")
        if self.num_ranks > MOST_RANKS:
            raise ValueError(f"{self.num_ranks} ranks; {MOST_RANKS} at most")
        if len(self.devices) not in (1, self.num_ranks):
            raise ValueError(f"{len(self.devices)} devices for {self.num_ranks} ranks: give one, or one per rank")

    @property
    def num_ranks(self) -> int:
        """How many ranks it holds."""
        return math.prod(level.count for level in self.levels)

    def device(self, rank: int) -> ClusterDevice:
        """Return the device of a rank."""
        return self.devices[rank if len(self.devices) > 1 else 0]

    def speed_of(self, ranks: Sequence[int]) -> float:
        """Return how fast a stage on these ranks computes: as the slowest of them."""
        return min(self.device(rank).speed for rank in ranks)

    def update_speed_of(self, ranks: Sequence[int]) -> float:
        """Return how fast the optimizer of a stage on these ranks steps: as the slowest of them."""
        return min(self.device(rank).update_speed for rank in ranks)

    def memory_of(self, rank: int) -> int:
        """Return the bytes of a rank's device; 0, no limit, also for a rank that unequal devices do not reach."""
        return self.device(rank).memory_bytes if rank < self.num_ranks or len(self.devices) == 1 else 0

    def link(self, a: int, b: int) -> Level:
        """Return the innermost level that holds both ranks."""
        size = 1
        for level in self.levels:
            size *= level.count
            if a // size == b // size:
                return level
        return self.levels[-1]
