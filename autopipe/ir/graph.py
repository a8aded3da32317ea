"""``Graph``: one training forward (model and loss) as a list of nodes in the order they run.

It is what the tracer found, without torch: the planner cuts it, the generator writes it, its digest names the model.

Cut ``i`` lies before ``nodes[i]``; stages are the runs of nodes between chosen cuts. A *value* is a graph input or the
result of a node, both by name. What a cut moves from stage to stage, and which cuts are legal, is in ``ir.cuts``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopipe.ir.artifact import digest
from autopipe.ir.batch import BatchForm
from autopipe.ir.tensor import TensorSpec, evaluate, symbols_of

_MANY = 1024  # a size at which every shape must still be a number that fits
KINDS = ("call_module", "call_function", "call_method")
# torch's normalisations: where one updates running statistics, its result does not depend on them
_STATISTICS = {f"{kind}{d}d" for kind in ("BatchNorm", "InstanceNorm") for d in (1, 2, 3)} | {"SyncBatchNorm"}
_STATISTICS_FUNCTIONS = {
    f"{place}.{name}" for place in ("torch", "torch.nn.functional") for name in ("batch_norm", "instance_norm")
}


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of the batch, under the name that the generated code gives it."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that may differ from batch to batch: ``name`` is dimension ``dimension`` of input ``input``.

    ``hint``: what it was in the batch that was followed. ``low``, ``high``: between which sizes the graph is known to
    be the model; ``high`` 0: unlimited.
    """

    name: str
    input: str
    dimension: int
    hint: int
    low: int = 1
    high: int = 0

    def holds(self, size: int) -> bool:
        """Tell whether the graph stands for batches of this size."""
        return self.low <= size and (not self.high or size <= self.high)


@dataclass(frozen=True, slots=True)
class Node:
    """One call.

    ``inputs``: values read, each once, in order of first use. ``after``: earlier nodes that change in place what this
    one reads; it must stay behind them. ``spec``: the result where it is one tensor, else None (a tuple, a size).
    ``arguments``: the canonical text of the call's constant arguments, so that the digest sees them.
    ``parameters``/``buffers``/``constants``: state it reads, by first name (a tied tensor has one name here).
    ``storage``: the earlier value whose memory the result shares, or "". ``mutates``: values changed in place.
    ``input_only``: depends on the batch and on constants alone, so every stage can compute it for itself.
    ``random_position``/``num_random``: the place of its first random draw in the whole forward, and how many it makes.
    ``glued``: must stand in the stage of the node before it. ``context``: grad mode and autocast, "" being the default.
    ``source``: ``file:line`` of the call; ``own_source``: of the model's own line that leads to it, where that is a
    library's.
    ``opaque``: a module of the user's that runs as it is, since its calls are not the same for every batch; its draws
    take one position, whatever it draws.
    """

    name: str
    kind: str
    target: str
    inputs: tuple[str, ...]
    spec: TensorSpec | None
    arguments: str = ""
    after: tuple[str, ...] = ()
    # all of the model's, by first name, used or not; requires_grad is False for frozen ones
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()  # all of the model's, by first name, used or not
    buffers_written: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    storage: str = ""
    input_only: bool = False
    num_random: int = 0
    random_position: int = 0
    glued: bool = False
    opaque: bool = False
    context: str = ""
    module_path: str = ""
    module_type: str = ""
    source: str = ""
    own_source: str = ""

    @property
    def place(self) -> str:
        """Where the call stands, for errors: the model's own line, and that of a library behind it; "" if unknown."""
        return f"{self.own_source} ({self.source})" if self.own_source else self.source

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"node {self.name}: unknown kind {self.kind!r}")
        if min(self.num_random, self.random_position) < 0:
            raise ValueError(f"node {self.name}: a number of random draws is negative")


def _only_updates(node: Node) -> bool:
    """Tell whether a node's result is independent of the buffers that it writes."""
    if node.kind == "call_module":
        return node.module_type in _STATISTICS
    return node.target in _STATISTICS_FUNCTIONS


@dataclass(frozen=True)
class Graph:
    """The forward of one microbatch.

    Raises: ValueError when a node reads a value that is not made before it, or state that the model does not have.
    """

    name: str
    inputs: tuple[Input, ...]
    symbols: tuple[Symbol, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]  # the loss, and the weight of the loss if the user's loss returns one
    parameters: dict[str, TensorSpec]  # all of the model's, by first name; requires_grad is False for frozen ones
    buffers: dict[str, TensorSpec]  # all of the model's, by first name
    aliases: dict[str, str]  # other name -> first name
    captured_by: str = ""  # the strategy that captured it, as text
    # False if the model, run plainly, rounds differently than its calls do: some libraries choose another kernel or
    # code path for the same numbers, as transformers does for a mask of ones
    exact: bool = True
    batch: BatchForm = field(default_factory=BatchForm)
    divisor: str = ""  # what the loss divides by, as text, if not the number of samples; see stages/divisor.py
    # parameter that this hook changes -> the others that its new value depends on
    after_step: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # state that only batches of another form read -> the node whose stage keeps it
    homes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {entry.name for entry in self.inputs}
        if len(known) < len(self.inputs):
            raise ValueError("two inputs have the same name")
        self._check_symbols()
        for node in self.nodes:
            for value in (*node.inputs, *node.after):
                if value not in known:
                    raise ValueError(f"node {node.name} reads {value!r} before it is made")
            if node.name in known:
                raise ValueError(f"two values are named {node.name!r}")
            known.add(node.name)
            self._check_state(node, known)
        for other, first in self.aliases.items():
            if first not in self.parameters and first not in self.buffers:
                raise ValueError(f"{other!r} is another name of {first!r}, which the model does not have")
        for name in {*self.after_step, *(other for read in self.after_step.values() for other in read)}:
            if name not in self.parameters:
                raise ValueError(f"after_step changes or reads {name!r}, which the model does not have")
        names = {node.name for node in self.nodes}
        for name, home in self.homes.items():
            if home not in names or (name not in self.parameters and name not in self.buffers):
                raise ValueError(f"{name!r} is kept beside {home!r}, and one of the two is not there")
        if not self.outputs:
            raise ValueError("no output: the loss is wanted")
        for value in self.outputs:
            if value not in known:
                raise ValueError(f"output {value!r} is made by no node")

    def _check_symbols(self) -> None:
        shapes = {entry.name: entry.spec.shape for entry in self.inputs}
        for symbol in self.symbols:
            if symbol.hint < 1 or not 0 <= symbol.dimension < len(shapes.get(symbol.input, ())):
                raise ValueError(f"symbol {symbol.name!r} is not a dimension of an input")
        names = {symbol.name for symbol in self.symbols}
        specs = [entry.spec for entry in self.inputs] + [node.spec for node in self.nodes if node.spec is not None]
        hints = {symbol.name: symbol.hint for symbol in self.symbols}
        specs += [*self.parameters.values(), *self.buffers.values()]
        for dimension in dict.fromkeys(size for spec in specs for size in spec.shape if isinstance(size, str)):
            if not symbols_of(dimension) <= names:
                raise ValueError(f"{dimension!r} is made of sizes that no input has")
            for sizes in (hints, dict.fromkeys(names, 1), dict.fromkeys(names, _MANY)):
                if evaluate(dimension, sizes) < 0 and sizes is hints:
                    raise ValueError(f"{dimension!r} is negative with {hints}")

    def _check_state(self, node: Node, known: set[str]) -> None:
        for kind, read, there in (
            ("parameter", node.parameters, self.parameters),
            ("buffer", (*node.buffers, *node.buffers_written), self.buffers),
            ("value", (*node.mutates, *([node.storage] if node.storage else [])), known),
        ):
            for name in read:
                if name not in there:
                    raise ValueError(f"node {node.name} names {kind} {name!r}, which is not there")

    @functools.cached_property
    def digest(self) -> str:
        """Name the model: other layers, shapes, constants or order give another digest; other weights do not."""
        anonymous = [
            (n.name, n.kind, n.target, n.inputs, n.spec, n.arguments, n.parameters, n.buffers, n.context)
            for n in self.nodes
        ]
        hook = (self.after_step,) if self.after_step else ()
        return digest((self.inputs, anonymous, self.outputs, self.parameters, self.buffers, self.aliases, *hook))

    @functools.cached_property
    def moving(self) -> frozenset[str]:
        """The parameters whose values change from step to step: trained ones, and what ``after_step`` changes."""
        return frozenset(
            name for name, spec in self.parameters.items() if spec.requires_grad or name in self.after_step
        )

    @functools.cached_property
    def position(self) -> Mapping[str, int]:
        """Node name -> its place in ``nodes``."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @functools.cached_property
    def module_spans(self) -> Mapping[str, tuple[int, int]]:
        """Path of a module, or of one around it -> places of its first and last call, ``input_only`` ones left out."""
        spans: dict[str, tuple[int, int]] = {}
        for index, node in enumerate(self.nodes):
            path = "" if node.input_only else node.module_path
            while path:
                spans[path] = spans.get(path, (index, index))[0], index
                path = path.rpartition(".")[0]
        return spans

    @functools.cached_property
    def containers(self) -> frozenset[str]:
        """Paths of the modules that have calls in modules of theirs."""
        return frozenset(path.rpartition(".")[0] for path in self.module_spans)

    @functools.cached_property
    def last_use(self) -> Mapping[str, int]:
        """Value -> place of the last node that reads it; ``len(nodes)`` for an output."""
        last: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                last[value] = index
        for value in self.outputs:
            last[value] = len(self.nodes)
        return last

    @functools.cached_property
    def replayed_buffers(self) -> frozenset[str]:
        """The buffers that a forward writes and that a result depends on: queues, power iterations, counters.

        A forward that is run a second time must see them as they were at the first. Running statistics that are only
        updated are not among them. All nodes that use one of them are in one stage (``ir.cuts``).
        """
        written = {name for node in self.nodes for name in node.buffers_written}
        read = {
            name for node in self.nodes if not _only_updates(node) for name in (*node.buffers, *node.buffers_written)
        }
        return frozenset(written & read)

    def sizes(self, batch_size: int) -> dict[str, int]:
        """Return a number for every symbol: the batch where it is the first one, else its hint."""
        return {s.name: batch_size if index == 0 else s.hint for index, s in enumerate(self.symbols)}
