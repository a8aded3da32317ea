"""``Graph``: one training forward (model and loss) as a list of nodes in the order they run.

It is what the tracer found, without torch: the planner cuts it, the generator writes it, its digest names the model.

Cut ``i`` lies before ``nodes[i]``; stages are the runs of nodes between chosen cuts. A *value* is a graph input or the
result of a node, both by name. What a cut moves from stage to stage, and which cuts are legal, is in ``ir.cuts``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.ir.artifact import digest
from autopipe.ir.tensor import TensorSpec

KINDS = ("call_module", "call_function", "call_method")


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of the batch, under the name that the generated code gives it."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that may differ from batch to batch: ``name`` is dimension ``dimension`` of input ``input``."""

    name: str
    input: str
    dimension: int
    hint: int


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
    """

    name: str
    kind: str
    target: str
    inputs: tuple[str, ...]
    spec: TensorSpec | None
    arguments: str = ""
    after: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    buffers_written: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    storage: str = ""
    input_only: bool = False
    num_random: int = 0
    random_position: int = 0
    glued: bool = False
    context: str = ""
    module_path: str = ""
    module_type: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"node {self.name}: unknown kind {self.kind!r}")


@dataclass(frozen=True)
class Graph:
    """The forward of one microbatch.

    ``outputs``: the loss, and the weight of the loss where the user's loss returns one.
    ``parameters``/``buffers``: every one of the model under its first name, used or not; ``aliases``: other name ->
    first name. ``requires_grad`` of a parameter's spec is False where it is frozen.

    Raises: ValueError when a node reads a value that is not made before it.
    """

    name: str
    inputs: tuple[Input, ...]
    symbols: tuple[Symbol, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    parameters: dict[str, TensorSpec]
    buffers: dict[str, TensorSpec]
    aliases: dict[str, str]

    def __post_init__(self) -> None:
        known = {entry.name for entry in self.inputs}
        for node in self.nodes:
            for value in (*node.inputs, *node.after):
                if value not in known:
                    raise ValueError(f"node {node.name} reads {value!r} before it is made")
            if node.name in known:
                raise ValueError(f"two values are named {node.name!r}")
            known.add(node.name)
        for value in self.outputs:
            if value not in known:
                raise ValueError(f"output {value!r} is made by no node")

    @functools.cached_property
    def digest(self) -> str:
        """Name the model: other layers, shapes, constants or order give another digest; other weights do not."""
        anonymous = [
            (n.name, n.kind, n.target, n.inputs, n.spec, n.arguments, n.parameters, n.buffers, n.context)
            for n in self.nodes
        ]
        return digest((self.inputs, anonymous, self.outputs, self.parameters, self.buffers, self.aliases))

    @functools.cached_property
    def position(self) -> Mapping[str, int]:
        """Node name -> its place in ``nodes``."""
        return {node.name: index for index, node in enumerate(self.nodes)}

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

    def sizes(self, batch_size: int) -> dict[str, int]:
        """Return a number for every symbol: the batch where it is the first one, else its hint."""
        return {s.name: batch_size if index == 0 else s.hint for index, s in enumerate(self.symbols)}
