"""``Capture``: what the tracer hands over."""

from __future__ import annotations

import dataclasses

from torch import Tensor, fx

from autopipe.ir.graph import Graph
from autopipe.trace.evaluation import Arguments
from autopipe.trace.loss.divisor import Divisor


@dataclasses.dataclass(frozen=True)
class Capture:
    """The training forward of one microbatch: as data (``graph``) and as something that runs (``module``).

    ``module``: node names are those of ``graph``, placeholders its inputs; it holds the user's own modules and tensors
    under their original paths. ``constants``: tensors that are neither parameter nor buffer, by attribute name.
    ``method``: how it was captured, for people. ``evaluation``: node -> its (args, kwargs) in evaluation mode, where
    they differ; ``evaluation_note``: why evaluation cannot use this graph, or "". ``notes``: what people should know.
    ``exact``: every bit was as in the model where it was verified; None where it was not. ``divisor``: what the loss
    divides by; None where that is the number of samples.
    """

    graph: Graph
    module: fx.GraphModule
    constants: dict[str, Tensor]
    method: str
    evaluation: dict[str, Arguments]
    evaluation_note: str
    notes: tuple[str, ...]
    exact: bool | None = None
    divisor: Divisor | None = None


def with_own_constants(capture: Capture, suffix: str) -> Capture:
    """Return a capture whose constants have names of their own, so that a stage can hold another capture's as well."""
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
