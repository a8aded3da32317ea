"""``Graph``: one training forward (model and loss) as a list of nodes in execution order.

The tracer builds it, the planner cuts it, the generator writes code from it, and its digest identifies the model.

Cut ``i`` is before ``nodes[i]``; a stage is the range of nodes between two chosen cuts. A *value* is a graph input or
the result of a node, identified by name. ``ir.cuts`` determines which cuts are legal and which values cross them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopipe.ir.artifact import OMIT_DEFAULT, digest
from autopipe.ir.batch import BatchForm
from autopipe.ir.teams.axes import Axis
from autopipe.ir.tensor import TensorSpec, evaluate, symbols_of

_MANY = 1024  # a size with which every shape expression must still be computable
# the name of the symbol that counts the samples
SAMPLES = "s0"
KINDS = ("call_module", "call_function", "call_method")
# normalization modules of torch: if one updates its running statistics, its result does not depend on them
_STATISTICS = {f"{kind}{d}d" for kind in ("BatchNorm", "InstanceNorm") for d in (1, 2, 3)} | {"SyncBatchNorm"}
_STATISTICS_FUNCTIONS = {
    f"{place}.{name}" for place in ("torch", "torch.nn.functional") for name in ("batch_norm", "instance_norm")
}


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number in a call of the user's code that changes from step to step, and so travels with each batch."""

    function: str  # that is called
    place: str  # of the call: file:line
    call: int  # which call of the function on this line, from 0
    argument: int  # which of its arguments, containers flattened
    kind: str  # "bool", "int" or "float"
    hint: str  # its first value

    @property
    def value(self) -> bool | int | float:
        """The first value."""
        return (
            self.hint == "True" if self.kind == "bool" else int(self.hint) if self.kind == "int" else float(self.hint)
        )


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of the batch, with its name in the generated code. ``number``: it has a number of Python instead."""

    name: str
    spec: TensorSpec
    number: Number | None = field(default=None, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that may differ from batch to batch: a dimension of an input."""

    name: str  # in shape expressions: s0 counts the samples, s1, s2, ... are lengths
    input: str
    dimension: int
    hint: int  # its value in the batch that was captured
    low: int = 1  # the smallest size for which the graph equals the model
    high: int = 0  # the largest; 0: no limit
    multiple: int = field(default=1, metadata=OMIT_DEFAULT)  # of which the size must be one: the members of a team

    def holds(self, size: int) -> bool:
        """Return whether the graph is valid for this size."""
        return self.low <= size and (not self.high or size <= self.high) and size % self.multiple == 0


@dataclass(frozen=True, slots=True)
class Node:
    """One call. A tied tensor has several names in the model; here only the first one is used."""

    name: str  # of its result
    kind: str  # one of ``KINDS``
    target: str  # the module, function or method that is called
    inputs: tuple[str, ...]  # values read, each once, in order of first use
    spec: TensorSpec | None  # of the result if it is one tensor, else None (a tuple, a size)
    arguments: str = ""  # the constant arguments as canonical text, for the digest
    after: tuple[str, ...] = ()  # earlier nodes that change in place what this one reads, and must run before it
    parameters: tuple[str, ...] = ()  # read by the call
    buffers: tuple[str, ...] = ()  # read by the call
    buffers_written: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()  # tensors that are neither parameters nor buffers
    mutates: tuple[str, ...] = ()  # values changed in place
    storage: str = ""  # the earlier value whose memory the result shares, or ""
    input_only: bool = False  # depends only on the batch and on constants, so every stage can compute it
    num_random: int = 0  # how many random draws it makes
    random_position: int = 0  # the position of its first draw in the whole forward
    glued: bool = False  # must be in the same stage as the previous node
    # a user module that runs as it is, because its calls differ from batch to batch; it takes one random position
    opaque: bool = False
    # the user's call of ``torch.utils.checkpoint`` around this call, numbered from 1 in order; 0: not in one
    checkpoint: int = 0
    context: str = ""  # grad mode and autocast; "" for the default
    module_path: str = ""  # of the module whose forward makes the call
    module_type: str = ""
    source: str = ""  # ``file:line`` of the call
    own_source: str = ""  # the line of the model's own code that leads to it, if ``source`` is in a library

    @property
    def place(self) -> str:
        """The place of the call for errors: the model's own line, with the library's in parentheses; "" if unknown."""
        return f"{self.own_source} ({self.source})" if self.own_source else self.source

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"node {self.name}: unknown kind {self.kind!r}")
        if min(self.num_random, self.random_position, self.checkpoint) < 0:
            raise ValueError(
                f"node {self.name}: num_random, random_position and checkpoint must be at least 0, and are "
                f"{self.num_random}, {self.random_position} and {self.checkpoint}"
            )


def _only_updates(node: Node) -> bool:
    """Return whether a node's result is independent of the buffers that it writes."""
    if node.kind == "call_module":
        return node.module_type in _STATISTICS
    return node.target in _STATISTICS_FUNCTIONS


def _is_call_of_torch(node: Node) -> bool:
    if node.kind == "call_module":  # a module of torch.nn, unless it is opaque
        return not node.opaque
    return node.kind == "call_method" or node.target.startswith("torch.")


def _may_be_cast_of(spec: TensorSpec | None, parameter: TensorSpec) -> bool:
    """Return whether a result may be the 16-bit cast of a parameter."""
    return spec is not None and spec.shape == parameter.shape and spec.dtype in ("bfloat16", "float16")


@dataclass(frozen=True)
class Graph:
    """The forward of one microbatch.

    Raises: ValueError if a node reads a value that is not made before it, or state that the model does not have.
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
    # False if the original model rounds differently from the recorded calls. Some libraries choose another kernel or
    # code path for the same numbers, as transformers does for a mask of ones.
    exact: bool = True
    batch: BatchForm = field(default_factory=BatchForm)
    # the model's Python may make other calls, or other numbers, for each microbatch: it runs beside the stages
    varies: bool = field(default=False, metadata=OMIT_DEFAULT)
    divisor: str = ""  # what the loss divides by, as text, if not the number of samples; see stages/divisor.py
    # parameter that the after_step hook changes -> the other parameters that its new value depends on
    after_step: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # of the complete graph, if this is that of a member of a team (``trace.teams``): its digest
    complete: str = field(default="", metadata=OMIT_DEFAULT)
    # the shapes in the complete graph of the parameters and buffers of which the member has a part
    whole_shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), metadata=OMIT_DEFAULT)
    # of a member: the parameters that it has completely and reads with its part of a value, so that the team adds their
    # gradients before a step
    partial: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    # state that only batches of another form read -> the node whose stage has it
    homes: dict[str, str] = field(default_factory=dict)
    # along which a team can shard it; () if they were not looked for. They are derived: the digest leaves them out
    axes: tuple[Axis, ...] = field(default=(), metadata=OMIT_DEFAULT)
    whole: tuple[tuple[str, str], ...] = field(
        default=(), metadata=OMIT_DEFAULT
    )  # a parameter without an axis, and why

    def __post_init__(self) -> None:
        known = {entry.name for entry in self.inputs}
        if len(known) < len(self.inputs):
            raise ValueError(f"two inputs have the same name; the names are {[entry.name for entry in self.inputs]}")
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
                raise ValueError(f"{name!r} is assigned to the stage of {home!r}, and one of the two does not exist")
        if not self.outputs:
            raise ValueError("the graph has no output: expected the loss")
        for value in self.outputs:
            if value not in known:
                raise ValueError(f"output {value!r} is not the result of a node")

    def _check_symbols(self) -> None:
        shapes = {entry.name: entry.spec.shape for entry in self.inputs}
        for symbol in self.symbols:
            if min(symbol.hint, symbol.multiple) < 1 or not 0 <= symbol.dimension < len(shapes.get(symbol.input, ())):
                raise ValueError(f"symbol {symbol.name!r} is not a dimension of an input")
        names = {symbol.name for symbol in self.symbols}
        specs = [entry.spec for entry in self.inputs] + [node.spec for node in self.nodes if node.spec is not None]
        hints = {symbol.name: symbol.hint for symbol in self.symbols}
        specs += [*self.parameters.values(), *self.buffers.values()]
        for dimension in dict.fromkeys(size for spec in specs for size in spec.shape if isinstance(size, str)):
            if not symbols_of(dimension) <= names:
                raise ValueError(f"{dimension!r} contains a symbol that is not a size of an input")
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
                    raise ValueError(f"node {node.name} names {kind} {name!r}, which does not exist")

    @functools.cached_property
    def digest(self) -> str:
        """The identity of the model: other layers, shapes, constants or order change it; other weights do not.

        Nor does another device, whose dtypes and memory orders may differ: it can resume a checkpoint.
        """
        specs = [node.spec and node.spec.as_captured for node in self.nodes]
        anonymous = [
            (n.name, n.kind, n.target, n.inputs, spec, n.arguments, n.parameters, n.buffers, n.context)
            for n, spec in zip(self.nodes, specs, strict=True)
        ]
        hook = (self.after_step,) if self.after_step else ()
        return digest((self.inputs, anonymous, self.outputs, self.parameters, self.buffers, self.aliases, *hook))

    @property
    def model_digest(self) -> str:
        """The digest of the complete graph: that of the model, however it is divided."""
        return self.complete or self.digest

    @functools.cached_property
    def model_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter or buffer -> its shape in the model, however it is divided."""
        own = {name: spec.concrete({}) for name, spec in {**self.parameters, **self.buffers}.items()}
        return {**own, **dict(self.whole_shapes)}

    @functools.cached_property
    def moving(self) -> frozenset[str]:
        """The parameters whose values change from step to step: trained ones, and those that ``after_step`` changes."""
        return frozenset(
            name for name, spec in self.parameters.items() if spec.requires_grad or name in self.after_step
        )

    @functools.cached_property
    def position(self) -> Mapping[str, int]:
        """Node name -> its index in ``nodes``."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @functools.cached_property
    def module_spans(self) -> Mapping[str, tuple[int, int]]:
        """Path of a module -> indices of the first and last call in it or its submodules, without ``input_only``."""
        spans: dict[str, tuple[int, int]] = {}
        for index, node in enumerate(self.nodes):
            path = "" if node.input_only else node.module_path
            while path:
                spans[path] = spans.get(path, (index, index))[0], index
                path = path.rpartition(".")[0]
        return spans

    @functools.cached_property
    def containers(self) -> frozenset[str]:
        """Paths of the modules that have calls in submodules."""
        return frozenset(path.rpartition(".")[0] for path in self.module_spans)

    @functools.cached_property
    def last_use(self) -> Mapping[str, int]:
        """Value -> index of the last node that reads it; ``len(nodes)`` for an output."""
        last: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                last[value] = index
        for value in self.outputs:
            last[value] = len(self.nodes)
        return last

    @functools.cached_property
    def cast_once(self) -> frozenset[str]:
        """The float32 parameters that one call of torch reads under autocast: stages may keep one cast of each.

        What an opaque module or another library does with a parameter is not known; it might read it without a cast.
        A call that may return the cast itself, such as ``weight.bfloat16()``, is left out: later calls may change its
        result in place, and under ``no_grad`` its result has no gradient.
        """
        num_readers = Counter(name for node in self.nodes for name in node.parameters)
        readers = [node for node in self.nodes if "autocast(" in node.context and _is_call_of_torch(node)]
        return frozenset(
            name
            for node in readers
            for name in node.parameters
            if num_readers[name] == 1
            and self.parameters[name].dtype == "float32"
            and not _may_be_cast_of(node.spec, self.parameters[name])
        )

    @functools.cached_property
    def replayed_buffers(self) -> frozenset[str]:
        """The buffers that a forward writes and that a result depends on: queues, power iterations, counters.

        If a forward runs a second time, they must have the values of the first time. Running statistics that are only
        updated are not included. All nodes that use one of these buffers are in one stage (``ir.cuts``).
        """
        written = {name for node in self.nodes for name in node.buffers_written}
        read = {
            name for node in self.nodes if not _only_updates(node) for name in (*node.buffers, *node.buffers_written)
        }
        return frozenset(written & read)

    @functools.cached_property
    def recomputed_with(self) -> frozenset[str]:
        """The buffers of which a forward that runs again gets the first values: also all those of opaque modules.

        The code of an opaque module may write a buffer in a branch that no batch of the capture took.
        """
        return self.replayed_buffers | {name for node in self.nodes if node.opaque for name in node.buffers}

    def sizes(self, batch_size: int) -> dict[str, int]:
        """Return the sizes for shape expressions: ``batch_size`` for the samples, the hint for the others."""
        samples = self.samples
        return {s.name: batch_size if s is samples else s.hint for s in self.symbols}

    @functools.cached_property
    def numbers(self) -> tuple[Input, ...]:
        """The inputs that are Python numbers of the user's code, which change from step to step."""
        return tuple(entry for entry in self.inputs if entry.number is not None)

    @functools.cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that require a gradient."""
        return frozenset(name for name, spec in self.parameters.items() if spec.requires_grad)

    @property
    def draws(self) -> bool:
        """Whether a forward may draw random numbers."""
        return self.varies or any(node.num_random for node in self.nodes)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(spec.num_bytes({}) for spec in self.parameters.values())

    @property
    def lengths(self) -> tuple[Symbol, ...]:
        """The symbols of other sizes than the number of samples."""
        return tuple(symbol for symbol in self.symbols if symbol.name != SAMPLES)

    @property
    def samples(self) -> Symbol | None:
        """The symbol that counts the samples; None if no dimension of an input does."""
        return next((symbol for symbol in self.symbols if symbol.name == SAMPLES), None)
