"""What the members of a team exchange in each call of their graph, in bytes. Arithmetic over ``Graph``, no torch.

Each entry is one sum over the team (an all-reduce), with the bytes of the tensor that every member gives to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node
from autopipe.ir.tensor import DTYPE_BYTES, TensorSpec

_CALLS = "autopipe.team."


@dataclass(frozen=True, slots=True)
class TeamBytes:
    """The sums of one call, in order, for one microbatch. A stage that recomputes the call repeats ``forward``."""

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()


def team_bytes(graph: Graph, sizes: Mapping[str, int], team: int) -> dict[str, TeamBytes]:
    """Return the sums of every call of a member that exchanges anything.

    ``sizes``: of the symbols of the graph (``Graph.sizes``). ``team``: the number of members.
    """
    specs = {entry.name: entry.spec for entry in graph.inputs}
    specs |= {node.name: node.spec for node in graph.nodes if node.spec is not None}
    amounts: dict[str, TeamBytes] = {}
    for node in graph.nodes:
        if node.target.startswith(_CALLS):
            sums = _SUMS.get(node.target.removeprefix(_CALLS), _nothing)(_Call(node, specs, sizes, team))
            if sums != TeamBytes():
                amounts[node.name] = sums
    return amounts


@dataclass(frozen=True, slots=True)
class _Call:
    node: Node
    specs: Mapping[str, TensorSpec]
    sizes: Mapping[str, int]
    team: int

    @property
    def result(self) -> int:
        """The bytes of the result."""
        assert self.node.spec is not None
        return self.node.spec.num_bytes(self.sizes)

    @property
    def operand(self) -> TensorSpec:
        return self.specs[self.node.inputs[0]]

    @property
    def reduced(self) -> int:
        """The bytes of the first operand, the logits, with one class."""
        classes = int(self.node.arguments.split(", ")[2 + self._has_target].rstrip(")"))
        shape = self.operand.concrete(self.sizes)
        return DTYPE_BYTES[self.operand.dtype] * math.prod(s for at, s in enumerate(shape) if at != classes)

    @property
    def _has_target(self) -> bool:
        return not self.node.target.endswith("log_softmax")


def _nothing(call: _Call) -> TeamBytes:
    return TeamBytes()


def _result(call: _Call) -> TeamBytes:
    return TeamBytes(forward=(call.result,))


def _operand(call: _Call) -> TeamBytes:
    return TeamBytes(forward=(call.operand.num_bytes(call.sizes),))


def _entered(call: _Call) -> TeamBytes:
    """The gradient is summed, if there is one."""
    assert call.node.spec is not None
    return TeamBytes(backward=(call.result,) if call.node.spec.requires_grad else ())


def _cross_entropy(call: _Call) -> TeamBytes:
    """The maxima of all members next to each other, the sums of exponentials, and the targets' logits."""
    return TeamBytes(forward=(call.team * call.reduced, call.reduced, call.reduced))


def _log_softmax(call: _Call) -> TeamBytes:
    """The maxima and the sums of exponentials; and the gradient of the normalizer."""
    return TeamBytes(forward=(call.team * call.reduced, call.reduced), backward=(call.reduced,))


def _nll(call: _Call) -> TeamBytes:
    return TeamBytes(forward=(call.reduced,))


_SUMS: dict[str, Callable[[_Call], TeamBytes]] = {
    "entered": _entered,
    "summed": _result,
    "summed_linear": _result,
    "summed_addmm": _result,
    "summed_heads": _operand,
    "looked_up": _result,
    "vocabulary_cross_entropy": _cross_entropy,
    "vocabulary_log_softmax": _log_softmax,
    "vocabulary_nll": _nll,
}
