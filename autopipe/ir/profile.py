"""``Profile``: what the nodes of a graph cost on one device, measured at one or more microbatch sizes."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace

from autopipe.ir.graph import Graph

PRECISIONS = ("fp32", "bf16", "fp16")
COUNTED = "none"
"""The kind of device of a profile that was counted and not timed: all its seconds are 0."""
_MOST_SECONDS = 1e9  # 30 years, for one call
_MOST_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """How to load the user's model again, also in another process. See ``workload``."""

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

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"unknown precision {self.precision!r}; known: {', '.join(PRECISIONS)}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} does not fit in 64 bits")
        if self.lr is not None and not 0 <= self.lr < math.inf:
            raise ValueError(f"the learning rate must be finite and at least 0, and is {self.lr}")

    def with_hook(self, name: str, target: str) -> WorkloadSpec:
        """Return a spec that finds a hook elsewhere."""
        return replace(self, hooks={**self.hooks, name: target})


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One node, one microbatch: seconds and bytes. ``saved_bytes``: kept from forward to backward.

    ``workspace_bytes``: the most that its forward or its backward holds at once and gives back, the gradients that come
    in and go out included.
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        seconds = self.forward_seconds, self.backward_seconds
        size = self.output_bytes, self.saved_bytes, self.workspace_bytes
        if not (0 <= min(seconds) <= max(seconds) <= _MOST_SECONDS and 0 <= min(size) <= max(size) <= _MOST_BYTES):
            raise ValueError("costs are not negative, and not beyond measure")


@dataclass(frozen=True, slots=True)
class PassWork:
    """What one pass over a node does, on any device.

    ``flops``: floating-point operations of its matrix products, convolutions and attention. ``matrix_bytes``: what
    these read and write. ``other_bytes``: what all other operations read and write.
    """

    flops: int = 0
    matrix_bytes: int = 0
    other_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.flops, self.matrix_bytes, self.other_bytes) < 0:
            raise ValueError("operations and bytes are not negative")


@dataclass(frozen=True, slots=True)
class NodeWork:
    """What one node does for one microbatch: in its forward, and in its backward."""

    forward: PassWork = PassWork()
    backward: PassWork = PassWork()


@dataclass(frozen=True, slots=True)
class Measurement:
    """All nodes at one microbatch size. ``spread``: relative interquartile range of the repeated whole passes.

    ``keepers``: value (an input, or a node's result) -> the node that is the first to keep its memory for the backward,
    and therefore counts it in ``saved_bytes``. Values that no node keeps are left out.
    ``work``: node -> its operations and bytes, counted while it ran. Nodes that only name memory are left out; empty in
    a profile of an earlier version.
    """

    microbatch_size: int
    costs: dict[str, NodeCost]
    spread: float = 0.0
    keepers: dict[str, str] = field(default_factory=dict)
    work: dict[str, NodeWork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.microbatch_size < 2**31 or self.spread < 0:
            raise ValueError(f"microbatch size {self.microbatch_size}, spread {self.spread}: 1 and 0 at least")


@dataclass(frozen=True, slots=True)
class Device:
    """What the times were taken on. ``threads``: intra-op threads (CPU)."""

    kind: str
    name: str
    memory_bytes: int
    threads: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda", "gpu", COUNTED):  # gpu: one that is not here
            raise ValueError(f"unknown kind of device {self.kind!r}; known: cpu, cuda, gpu, {COUNTED}")
        if self.memory_bytes < 0 or self.threads < 1:
            raise ValueError(f"{self.name}: memory >= 0 and threads >= 1 are needed")


@dataclass(frozen=True)
class Profile:
    """A graph and its measurements, ascending in microbatch size.

    ``optimizer_seconds_per_byte``: optimizer step, per byte of parameters. ``optimizer_bytes_per_byte``: optimizer
    state kept, per byte of parameters (AdamW in float32: 2).
    ``batch_size``: samples of a minibatch of the user's own data; 0 where it is not known.

    Raises: ValueError when a measurement does not cover every node.
    """

    workload: WorkloadSpec
    graph: Graph
    device: Device
    measurements: tuple[Measurement, ...]
    optimizer_seconds_per_byte: float = 0.0
    optimizer_bytes_per_byte: float = 2.0
    batch_size: int = 0

    def __post_init__(self) -> None:
        names = {node.name for node in self.graph.nodes}
        if not self.measurements:
            raise ValueError("a profile holds at least one measurement")
        for measurement in self.measurements:
            if set(measurement.costs) != names:
                raise ValueError(f"microbatch size {measurement.microbatch_size}: costs do not cover the nodes")
            if not names.issuperset(measurement.keepers.values()):
                raise ValueError(f"microbatch size {measurement.microbatch_size}: a keeper is not a node of the graph")
            if not names.issuperset(measurement.work):
                raise ValueError(
                    f"microbatch size {measurement.microbatch_size}: work of a name that is not a node of the graph"
                )
        sizes = [measurement.microbatch_size for measurement in self.measurements]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"microbatch sizes {sizes} do not ascend")
        if not 0 <= self.optimizer_seconds_per_byte <= 1 or not 0 <= self.optimizer_bytes_per_byte <= _MOST_SECONDS:
            raise ValueError("the optimizer's costs are not negative, and not beyond measure")
        if not 0 <= self.batch_size < 2**31:
            raise ValueError(f"batch_size must be from 0 to 2**31 - 1, and is {self.batch_size}")

    @property
    def trained_bytes(self) -> int:
        """The parameters that an optimizer steps."""
        return sum(spec.num_bytes({}) for spec in self.graph.parameters.values() if spec.requires_grad)

    def at(self, microbatch_size: int) -> Measurement:
        """Return the costs at a microbatch size: measured, or on the line through the two nearest measured sizes.

        The work of the nodes is left out between measured sizes.
        """
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
        return Measurement(microbatch_size, costs, max(low.spread, high.spread), low.keepers)
