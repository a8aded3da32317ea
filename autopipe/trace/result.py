"""``Capture``: the result of the tracer, and how its graph differs in evaluation mode."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from torch import Tensor, fx

from autopipe.ir.graph import Graph
from autopipe.ir.microbatch_loss import Coupling
from autopipe.ir.teams.axes import Shard
from autopipe.trace.lines.of_nodes import short_where_text
from autopipe.trace.loss.divisor import Divisor, find_divisor
from autopipe.trace.sizes.align import GraphsDiffer, merged

logger = logging.getLogger(__name__)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Capture:
    """The training forward of one microbatch, as data (``graph``) and as code (``module``)."""

    graph: Graph
    module: fx.GraphModule
    """Has the node names of ``graph``. Holds the user's own modules and tensors under their original paths."""
    constants: dict[str, Tensor]  # tensors that are neither parameters nor buffers, by attribute name
    method: str  # human-readable name of the strategy
    evaluation: dict[str, Arguments]  # node -> its (args, kwargs) in evaluation mode, where they differ
    evaluation_note: str  # why evaluation cannot use this graph, or ""
    notes: tuple[str, ...]  # messages for the user
    asks_compiling: bool = False  # the model may take another path in plain training, where nothing compiles
    exact: bool | None = None  # whether verification found every bit equal; None if it did not run
    divisor: Divisor | None = None  # divisor of the loss; None for the number of samples
    coupling: Coupling = field(default=Coupling())  # by how much microbatches change the gradient, if verified
    team: int = 1  # members that run it together; see ``trace.teams``
    shards: Mapping[str, Shard] = field(default_factory=dict)  # what each member has of parameters, buffers, constants

    @property
    def partial(self) -> tuple[str, ...]:
        """The parameters that every member has, and whose gradients are summed over them."""
        return self.graph.partial


def with_divisor(capture: Capture, *batches: Mapping[str, Tensor]) -> Capture:
    """Add the divisor of the loss. One that cannot be computed on batches, tensors by input, is omitted."""
    divisor = find_divisor(capture.graph, capture.module)
    try:
        for leaves in batches:
            if divisor is not None:
                divisor.values(leaves)
    except Exception as error:
        logger.info("the divisor of the loss cannot be computed: %s", error)
        return capture
    text = "" if divisor is None else divisor.text
    return dataclasses.replace(capture, divisor=divisor, graph=dataclasses.replace(capture.graph, divisor=text))


def with_own_constants(capture: Capture, suffix: str) -> Capture:
    """Return a capture with unique constant names, so that one stage can hold the constants of two captures."""
    names = {name: f"{name}_{suffix}" for name in capture.constants}
    if not names:
        return capture
    nodes = tuple(
        dataclasses.replace(node, constants=tuple(names[name] for name in node.constants))
        for node in capture.graph.nodes
    )
    described = {node.name: node for node in nodes}
    for node in capture.module.graph.nodes:
        if node.op == "get_attr" and node.target in names:
            node.target = names[node.target]
        if "node" in node.meta:
            node.meta["node"] = described[node.name]
    constants = {names[name]: value for name, value in capture.constants.items()}
    return dataclasses.replace(capture, graph=dataclasses.replace(capture.graph, nodes=nodes), constants=constants)


def evaluation_arguments(
    same: dict[fx.Node, fx.Node], raw: dict[fx.Node, Arguments]
) -> tuple[dict[fx.Node, Arguments], str]:
    """Return node -> its arguments in evaluation mode where they differ, and why the graph cannot serve, or "".

    ``same``: node of the evaluation recording -> node of the training recording. ``raw``: the arguments of the latter
    as recorded, before sizes were written into the graph.
    """
    differing: dict[fx.Node, Arguments] = {}
    try:
        for other, node in same.items():
            if node.op in ("output", "placeholder", "get_attr"):
                continue
            differs: list[Any] = []

            def choose(_: Any, now: Any, differs: list[Any] = differs, node: fx.Node = node) -> Any:
                if type(now) is int:
                    raise GraphsDiffer("another size", short_where_text(node.meta))
                differs.append(now)
                return now

            args, kwargs = raw[node]
            args = merged(args, other.args, node.args, same, choose)
            kwargs = merged(kwargs, dict(other.kwargs), dict(node.kwargs), same, choose)
            if differs:
                differing[node] = args, kwargs
    except GraphsDiffer as difference:
        return {}, f"eval mode traces differently: {difference}"
    return differing, ""
