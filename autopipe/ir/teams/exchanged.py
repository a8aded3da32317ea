"""What the members of a team exchange in each call of their graph, in bytes. Arithmetic over ``Graph``, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node
from autopipe.ir.tensor import DTYPE_BYTES, TensorSpec

_CALLS = ("autopipe.team.", "autopipe.sequence.")

SUM = "sum"  # every member gives the tensor and has the sum of all (all-reduce)
SCATTER = "scatter"  # every member gives the tensor and has its part of the sum (reduce-scatter)
GATHER = "gather"  # every member gives its part and has the tensor (all-gather)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange between the members of a team."""

    how: str  # SUM, SCATTER or GATHER
    num_bytes: int  # of the complete tensor

    @property
    def passes(self) -> int:
        """How often a ring sends ``(t - 1) / t`` of the bytes over each link."""
        return 2 if self.how == SUM else 1


@dataclass(frozen=True, slots=True)
class TeamBytes:
    """The exchanges of one call, in order, for one microbatch. A stage that recomputes the call repeats ``forward``."""

    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()


def team_bytes(graph: Graph, sizes: Mapping[str, int], team: int) -> dict[str, TeamBytes]:
    """Return the exchanges of every call of a member that exchanges anything.

    ``sizes``: of the symbols of the graph (``Graph.sizes``). ``team``: the number of members.
    """
    specs = {entry.name: entry.spec for entry in graph.inputs}
    specs |= {node.name: node.spec for node in graph.nodes if node.spec is not None}
    amounts: dict[str, TeamBytes] = {}
    for node in graph.nodes:
        if node.target.startswith(_CALLS):
            exchanges = _EXCHANGES.get(node.target.rpartition(".")[2], _nothing)(_Call(node, specs, sizes, team))
            if exchanges != TeamBytes():
                amounts[node.name] = exchanges
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
    def has_gradient(self) -> bool:
        """Whether the result has a gradient."""
        assert self.node.spec is not None
        return self.node.spec.requires_grad

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


def _sums(*counts: int) -> tuple[Exchange, ...]:
    return tuple(Exchange(SUM, count) for count in counts)


def _result(call: _Call) -> TeamBytes:
    return TeamBytes(forward=_sums(call.result))


def _operand(call: _Call) -> TeamBytes:
    return TeamBytes(forward=_sums(call.operand.num_bytes(call.sizes)))


def _entered(call: _Call) -> TeamBytes:
    """The gradient is summed, if there is one."""
    return TeamBytes(backward=_sums(call.result) if call.has_gradient else ())


def _cross_entropy(call: _Call) -> TeamBytes:
    """The maxima of all members next to each other, the sums of exponentials, and the targets' logits."""
    return TeamBytes(forward=_sums(call.team * call.reduced, call.reduced, call.reduced))


def _log_softmax(call: _Call) -> TeamBytes:
    """The maxima and the sums of exponentials; and the gradient of the normalizer."""
    return TeamBytes(forward=_sums(call.team * call.reduced, call.reduced), backward=_sums(call.reduced))


def _nll(call: _Call) -> TeamBytes:
    return TeamBytes(forward=_sums(call.reduced))


def _gathered(call: _Call) -> TeamBytes:
    return TeamBytes(forward=(Exchange(GATHER, call.result),))


def _entered_rows(call: _Call) -> TeamBytes:
    backward = (Exchange(SCATTER, call.result),) if call.has_gradient else ()
    return TeamBytes((Exchange(GATHER, call.result),), backward)


def _own_rows(call: _Call) -> TeamBytes:
    return TeamBytes(backward=(Exchange(GATHER, call.team * call.result),) if call.has_gradient else ())


def _summed_rows(call: _Call) -> TeamBytes:
    complete = call.team * call.result
    return TeamBytes((Exchange(SCATTER, complete),), (Exchange(GATHER, complete),) if call.has_gradient else ())


def _summed_rows_heads(call: _Call) -> TeamBytes:
    complete = call.operand.num_bytes(call.sizes)
    backward = (Exchange(GATHER, complete),) if call.operand.requires_grad else ()
    return TeamBytes((Exchange(SCATTER, complete),), backward)


_EXCHANGES: dict[str, Callable[[_Call], TeamBytes]] = {
    "entered": _entered,
    "summed": _result,
    "summed_linear": _result,
    "summed_addmm": _result,
    "summed_heads": _operand,
    "looked_up": _result,
    "vocabulary_cross_entropy": _cross_entropy,
    "vocabulary_log_softmax": _log_softmax,
    "vocabulary_nll": _nll,
    "gathered": _gathered,
    "entered_rows": _entered_rows,
    "own_rows": _own_rows,
    "summed_rows": _summed_rows,
    "summed_rows_linear": _summed_rows,
    "summed_rows_addmm": _summed_rows,
    "summed_rows_heads": _summed_rows_heads,
    "looked_up_rows": _summed_rows,
}
