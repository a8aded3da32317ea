"""``Profile``: the costs of a graph's nodes on one device, measured at one or more microbatch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace

from autopipe.ir.artifact import OMIT_DEFAULT
from autopipe.ir.graph import Graph
from autopipe.ir.microbatch_loss import Coupling

PRECISIONS = ("fp32", "bf16", "fp16")
COUNTED = "none"
"""The device kind of a profile whose operations were counted and not timed: all its seconds are 0."""
_MOST_SECONDS = 1e9  # 30 years, for one call
_MOST_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """How to load the user's model, also in another process. See ``workload``.

    Raises: ValueError for an unknown precision, or a seed or learning rate out of range.
    """

    target: str  # path/to/file.py[:ATTR] or package.module[:ATTR]
    _: KW_ONLY
    arguments: dict[str, str]  # of the function or class that builds the model
    hooks: dict[str, str]  # name of a hook -> TARGET, for those that the command line names
    inputs: tuple[str, ...]  # texts of --input
    seed: int
    optimizer: str = ""  # one of torch's by name; "" for the file's own hook, or AdamW
    lr: float | None = None  # None for the optimizer's own
    precision: str = "fp32"  # bf16 and fp16: forward and loss run under autocast
    batch_dims: dict[str, int] | None = None  # see ``BatchDimensions.known``; None before the first batch is read
    opaque: str = "auto"  # which modules may run as the user's own code: auto, never, or paths separated by commas
    opaque_modules: tuple[str, ...] = ()  # the modules that do, as the capture decided
    # members of each rank, which share out the tensors that carry an axis (``ir.teams.axes``)
    team: int = field(default=1, metadata=OMIT_DEFAULT)
    # between the calls of the axes, each member has its own positions of the values (``autopipe.sequence``)
    sequence: bool = field(default=False, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"unknown precision {self.precision!r}; known: {', '.join(PRECISIONS)}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"the seed must fit in 64 bits, and is {self.seed}")
        if self.lr is not None and not 0 <= self.lr < math.inf:
            raise ValueError(f"the learning rate must be finite and at least 0, and is {self.lr}")
        if self.team < 1:
            raise ValueError(f"a team needs at least one member, and has {self.team}")
        if self.sequence and self.team == 1:
            raise ValueError("positions are divided among the members of a team, and the team has one")

    def with_hook(self, name: str, target: str) -> WorkloadSpec:
        """Return the spec with another TARGET for a hook."""
        return replace(self, hooks={**self.hooks, name: target})


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Seconds and bytes of one node for one microbatch."""

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int  # kept from forward to backward
    # the peak of temporary memory in its forward or its backward, including the gradients of its inputs and outputs
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        seconds = self.forward_seconds, self.backward_seconds
        size = self.output_bytes, self.saved_bytes, self.workspace_bytes
        if not (0 <= min(seconds) <= max(seconds) <= _MOST_SECONDS and 0 <= min(size) <= max(size) <= _MOST_BYTES):
            raise ValueError(
                f"costs must be at least 0, and at most {_MOST_SECONDS:g} s and {_MOST_BYTES} bytes: {self}"
            )


@dataclass(frozen=True, slots=True)
class PassWork:
    """The operations of one pass over a node: the same on any device."""

    flops: int = 0  # floating-point operations of matrix products, convolutions and attention
    matrix_bytes: int = 0  # bytes that these read and write
    other_bytes: int = 0  # bytes that all other operations read and write
    repeated_flops: int = 0  # of ``flops``, those with which the backward of a fused attention repeats its forward
    kernels: int = 0  # operations that compute or move anything, each at least one kernel

    def __post_init__(self) -> None:
        if min(self.flops, self.matrix_bytes, self.other_bytes, self.repeated_flops, self.kernels) < 0:
            raise ValueError(f"operations and bytes must be at least 0: {self}")
        if self.repeated_flops > self.flops:
            raise ValueError(f"repeated_flops are a part of flops: {self}")


@dataclass(frozen=True, slots=True)
class NodeWork:
    """The operations of one node for one microbatch."""

    forward: PassWork = PassWork()
    backward: PassWork = PassWork()

    @property
    def model_flops(self) -> int:
        """Floating-point operations that training needs, however it computes them: without repeated ones."""
        return self.forward.flops + self.backward.flops - self.forward.repeated_flops - self.backward.repeated_flops


@dataclass(frozen=True, slots=True)
class Measurement:
    """The costs of all nodes at one microbatch size."""

    microbatch_size: int  # samples
    costs: dict[str, NodeCost]  # by node
    spread: float = 0.0  # relative interquartile range of repeated passes over the whole graph
    # value (an input, or a node's result) -> the first node that keeps its memory for the backward, and therefore
    # counts it in ``saved_bytes``; only values that a node keeps
    keepers: dict[str, str] = field(default_factory=dict)
    # node -> its operations; without nodes that only return a view, and empty in a profile of an earlier version
    work: dict[str, NodeWork] = field(default_factory=dict)
    # parameter -> bytes of its 16-bit cast, of which a stage keeps one for each version of the weights (autocast)
    casts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.microbatch_size < 2**31 or self.spread < 0:
            raise ValueError(
                f"the microbatch size must be at least 1 and the spread at least 0, and are {self.microbatch_size} and "
                f"{self.spread}"
            )

    @property
    def model_flops(self) -> int:
        """Floating-point operations of a forward and a backward; see ``NodeWork.model_flops``."""
        return sum(work.model_flops for work in self.work.values())


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which a profile was measured."""

    kind: str  # cpu, cuda, gpu (one of another machine) or ``COUNTED``
    name: str
    memory_bytes: int
    threads: int = 1  # intra-op threads of torch, on a CPU
    per_host: int = 0  # GPUs of its host; 0: not known
    peer_access: bool = True  # whether the GPUs of its host copy to one another without host memory, as far as known

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda", "gpu", COUNTED):
            raise ValueError(f"unknown kind of device {self.kind!r}; known: cpu, cuda, gpu, {COUNTED}")
        if self.memory_bytes < 0 or self.threads < 1:
            raise ValueError(
                f"{self.name}: memory must be at least 0 bytes and threads at least 1, and are {self.memory_bytes} and "
                f"{self.threads}"
            )
        if self.per_host < 0:
            raise ValueError(f"{self.name}: the GPUs of a host must be at least 0, and are {self.per_host}")


@dataclass(frozen=True)
class Profile:
    """A graph and its measurements.

    Raises: ValueError if a measurement does not cover every node, or a number is out of range.
    """

    workload: WorkloadSpec
    graph: Graph
    device: Device
    measurements: tuple[Measurement, ...]  # ascending in microbatch size
    optimizer_seconds_per_byte: float = 0.0  # of an optimizer step, per byte of parameters
    optimizer_bytes_per_byte: float = 2.0  # of optimizer state, per byte of parameters (AdamW in float32: 2)
    batch_size: int = 0  # samples of a minibatch of the user's data; 0: not known
    # by how much microbatches change the gradient
    coupling: Coupling = field(default=Coupling(), metadata=OMIT_DEFAULT)
    # whether the captured graph was compared with the model
    verified: bool = field(default=True, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        names = {node.name for node in self.graph.nodes}
        if not self.measurements:
            raise ValueError("a profile needs at least one measurement")
        for measurement in self.measurements:
            if set(measurement.costs) != names:
                nodes = sorted(set(measurement.costs) ^ names)
                raise ValueError(
                    f"microbatch size {measurement.microbatch_size}: the costs do not match the nodes of the graph; "
                    f"{nodes[0]!r} is in only one of them"
                )
            for kind, keys in (("keepers", measurement.keepers.values()), ("work", measurement.work)):
                unknown = sorted(set(keys) - names)
                if unknown:
                    raise ValueError(
                        f"microbatch size {measurement.microbatch_size}: {kind} names {unknown[0]!r}, which is not a "
                        "node of the graph"
                    )
            unknown = sorted(measurement.casts.keys() - self.graph.parameters.keys())
            if unknown or any(not 0 <= size <= _MOST_BYTES for size in measurement.casts.values()):
                raise ValueError(
                    f"microbatch size {measurement.microbatch_size}: casts must name parameters of the graph with "
                    f"their bytes, and are {measurement.casts}"
                )
        sizes = [measurement.microbatch_size for measurement in self.measurements]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"microbatch sizes must be in ascending order, and are {sizes}")
        if not 0 <= self.optimizer_seconds_per_byte <= 1 or not 0 <= self.optimizer_bytes_per_byte <= _MOST_SECONDS:
            raise ValueError(
                f"the optimizer's costs are out of range: {self.optimizer_seconds_per_byte} seconds and "
                f"{self.optimizer_bytes_per_byte} bytes per byte of parameters"
            )
        if not 0 <= self.batch_size < 2**31:
            raise ValueError(f"batch_size must be from 0 to 2**31 - 1, and is {self.batch_size}")

    @property
    def trained_bytes(self) -> int:
        """The bytes of all parameters that the optimizer steps."""
        return sum(spec.num_bytes({}) for spec in self.graph.parameters.values() if spec.requires_grad)

    def at(self, microbatch_size: int) -> Measurement:
        """Return the costs at a microbatch size: measured, or interpolated between the two nearest measured sizes."""
        exact = [m for m in self.measurements if m.microbatch_size == microbatch_size]
        if exact:
            return exact[0]
        nearest = sorted(self.measurements, key=lambda m: (abs(m.microbatch_size - microbatch_size), m.microbatch_size))
        low, high = sorted(nearest[:2], key=lambda m: m.microbatch_size) if len(nearest) > 1 else (nearest[0],) * 2

        def along(a: float, b: float) -> float:
            if low is high:
                return a * microbatch_size / low.microbatch_size
            share = (microbatch_size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)
            return max(a + (b - a) * share, 0.0)

        costs = {}
        for name, a in low.costs.items():
            b = high.costs[name]
            costs[name] = NodeCost(
                along(a.forward_seconds, b.forward_seconds),
                along(a.backward_seconds, b.backward_seconds),
                round(along(a.output_bytes, b.output_bytes)),
                round(along(a.saved_bytes, b.saved_bytes)),
                round(along(a.workspace_bytes, b.workspace_bytes)),
            )
        work = {}
        for name in low.work.keys() & high.work.keys():
            ours, theirs = low.work[name], high.work[name]
            work[name] = NodeWork(
                _between(ours.forward, theirs.forward, along), _between(ours.backward, theirs.backward, along)
            )
        return Measurement(microbatch_size, costs, max(low.spread, high.spread), low.keepers, work, low.casts)


def _between(low: PassWork, high: PassWork, along: Callable[[float, float], float]) -> PassWork:
    """Return the work at a size between two others. ``along``: interpolates a number."""
    flops = round(along(low.flops, high.flops))
    return PassWork(
        flops,
        round(along(low.matrix_bytes, high.matrix_bytes)),
        round(along(low.other_bytes, high.other_bytes)),
        min(round(along(low.repeated_flops, high.repeated_flops)), flops),
        max(low.kernels, high.kernels),
    )
