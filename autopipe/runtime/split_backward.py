"""A backward in two halves: first the gradient that an earlier stage waits for, later the gradients of the weights.

The first half walks the *activation chain*, from the outputs of the stage to the values that it received. At each
*frontier* node, where a weight joins the chain (the backward of a matrix product, a convolution, a norm), it records
the gradient that arrives. The second half passes that gradient to the node again and computes the gradients of its
weights alone. No part of the chain runs twice.

A weight that joins the chain at several nodes is computed in the first half. From one of these nodes, autograd would
also walk to the others and count them twice, and the sum would not have the order of plain autograd.

Source: zero bubble pipeline parallelism, arXiv:2401.10241, section 2 (B and W passes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(slots=True)
class _Frontier:
    """A node of the chain that weights join."""

    node: Node
    # the names of the weights
    weights: list[str] = field(default_factory=list)
    # the gradients that arrived at the node
    arrived: tuple[torch.Tensor | None, ...] = ()


@dataclass(slots=True)
class PendingWeights:
    """The input of the second half."""

    frontiers: list[_Frontier]
    # roots and gradients of the complete backward, if the first half had nothing to do
    everything: tuple[list[torch.Tensor], list[torch.Tensor | None]] | None = None

    def finish(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Run the second half: add to the ``grad`` of each weight."""
        if self.everything is not None:
            torch.autograd.backward(*self.everything)
            return
        for frontier in self.frontiers:
            edges = [GradientEdge(frontier.node, i) for i, g in enumerate(frontier.arrived) if g is not None]
            if not edges:
                continue
            weights = [parameters[name] for name in frontier.weights]
            grads = [g for g in frontier.arrived if g is not None]
            gradients = torch.autograd.grad(edges, weights, grads, allow_unused=True)
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is None:
                    continue
                if weight.grad is None:
                    weight.grad = gradient
                else:
                    weight.grad += gradient
        self.frontiers = []


def backward_inputs(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    received: Sequence[torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    now: Sequence[str] = (),
) -> PendingWeights:
    """Run the first half: compute the gradients of the received values, and of the weights that cannot wait.

    ``roots`` and ``gradients`` are those of ``torch.autograd.backward``. ``now`` names weights whose gradient an
    earlier stage waits for too. A stage that received nothing has no first half.
    """
    if not received:
        return PendingWeights([], (list(roots), list(gradients)))
    leaves = {get_gradient_edge(tensor).node for tensor in received}
    if not roots:
        return PendingWeights([])
    names = {get_gradient_edge(p).node: name for name, p in parameters.items() if p.requires_grad}
    starts = [get_gradient_edge(root).node for root in roots]
    on_chain, weights_below = _walk(starts, leaves, names)
    frontiers, early = _frontiers(starts, on_chain, weights_below, now)
    hooks: list[Any] = [frontier.node.register_prehook(_noting(frontier)) for frontier in frontiers]
    try:
        inputs = [*received, *(parameters[name] for name in early)]
        torch.autograd.backward(roots, gradients, retain_graph=True, inputs=inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return PendingWeights(frontiers)


def _noting(frontier: _Frontier) -> Any:
    def note(arrived: tuple[torch.Tensor | None, ...]) -> None:
        frontier.arrived = arrived

    return note


def _walk(
    starts: Sequence[Node], leaves: set[Node], names: Mapping[Node, str]
) -> tuple[set[Node], dict[Node, tuple[str, ...]]]:
    """Return the nodes from which a received value is reached, and the weights below every node."""
    on_chain: set[Node] = set()
    below: dict[Node, tuple[str, ...]] = {}
    done: set[Node] = set()
    stack = [(node, False) for node in starts]
    while stack:
        node, children_done = stack.pop()
        if not children_done:
            if node in done:
                continue
            done.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        if node in leaves or any(child in on_chain for child in children):
            on_chain.add(node)
        weights = [names[node]] if node in names else []
        for child in children:
            weights.extend(below.get(child, ()))
        below[node] = tuple(dict.fromkeys(weights))
    return on_chain, below


def _frontiers(
    starts: Sequence[Node], on_chain: set[Node], below: Mapping[Node, tuple[str, ...]], now: Sequence[str]
) -> tuple[list[_Frontier], list[str]]:
    """Return the frontier, and the weights that the first half computes."""
    joins: dict[str, list[Node]] = {}
    early: dict[str, None] = dict.fromkeys(now)
    for start in starts:
        if start not in on_chain:
            early.update(dict.fromkeys(below[start]))
    for node in below:
        if node not in on_chain:
            continue
        for child, _ in node.next_functions:
            if child is not None and child not in on_chain:
                for name in below[child]:
                    joins.setdefault(name, []).append(node)
    frontiers: dict[Node, _Frontier] = {}
    for name, nodes in joins.items():
        if len(set(nodes)) > 1 or name in early:
            early[name] = None
            continue
        frontiers.setdefault(nodes[0], _Frontier(nodes[0])).weights.append(name)
    return list(frontiers.values()), list(early)
