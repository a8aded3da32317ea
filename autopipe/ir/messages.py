"""The messages between the stages of a plan: the edges for lowering, and the values in each message.

Forward: each boundary value goes from its producer directly to each consumer. Backward: its gradient returns as a chain
through the consumers, last to first, to the producer (see ``ir.plan.Boundary``). The gradient of an exact tie takes the
same kind of chain, through its copies to its owner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.channel import ACTIVATION, BATCH, GRADIENT, LOAN, LOSS, TIE_GRADIENT, TIE_VALUE, Channel
from autopipe.ir.gradients import chains, moving_ties, trained_ties
from autopipe.ir.graph import Graph
from autopipe.ir.loans import Loan, loans
from autopipe.ir.plan import Plan, Tie
from autopipe.ir.schedule import ScheduleSpec, StageEdges

Edge = tuple[int, int]


def tied(parameter: str) -> str:
    """Return the name of a tied parameter's gradient in messages. It differs from all names of values."""
    return f"parameter:{parameter}"


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """The contents of the messages. An edge is (from stage, to stage); a message has its values in this order."""

    forward: dict[Edge, tuple[str, ...]]  # edge -> boundary values
    backward: dict[Edge, tuple[str, ...]]  # edge -> boundary values and tied parameters whose gradients it carries
    ties: tuple[Tie, ...]  # of trained parameters
    shared: tuple[Tie, ...] = ()  # of parameters whose values change, see ``moving_ties``
    loans: tuple[Loan, ...] = ()  # for the ``after_step`` hook

    @staticmethod
    def of(plan: Plan, graph: Graph) -> MessagePlan:
        """Return the messages of a plan of this graph."""
        forward: dict[Edge, list[str]] = {}
        backward: dict[Edge, list[str]] = {}

        def chain(name: str, stages: Sequence[int]) -> None:
            for later, earlier in zip(reversed(stages), [*reversed(stages)][1:], strict=False):
                backward.setdefault((later, earlier), []).append(name)

        returning = chains(graph, plan)
        for boundary in plan.boundaries:
            for consumer in boundary.consumers:
                forward.setdefault((boundary.producer, consumer), []).append(boundary.value)
            if boundary.value in returning:
                chain(boundary.value, returning[boundary.value])
        ties = trained_ties(graph, plan)
        for tie in ties:
            if tie.exact:
                chain(tied(tie.parameter), (tie.owner, *tie.copies))
        return MessagePlan(
            {edge: tuple(values) for edge, values in sorted(forward.items())},
            {edge: tuple(values) for edge, values in sorted(backward.items())},
            ties,
            moving_ties(graph, plan),
            loans(plan, graph),
        )

    @property
    def edges(self) -> StageEdges:
        """The edges, for lowering."""
        return StageEdges(tuple(self.forward), tuple(self.backward))


def loss_channel(request: ScheduleSpec, rank: int) -> Channel:
    """Return the channel on which a rank of the last stage sends its part of the losses to rank 0."""
    return Channel(LOSS, request.num_stages - 1, 0, rank, 0)


def batch_channel(rank: int) -> Channel:
    """Return the channel on which rank 0 sends another rank its part of the minibatches, if rank 0 reads for all.

    If ranks are teams, these are processes: the first sends to every other one.
    """
    return Channel(BATCH, 0, 0, 0, rank)


def tie_channels(kind: str, giver: int, taker: int, request: ScheduleSpec) -> list[Channel]:
    """Return the channels on which the replicas of one stage receive a tied parameter or its gradient from another.

    All replicas of the giver have equal tensors, so replica ``i`` of the taker receives from replica ``i`` modulo their
    number. A rank that runs both stages needs none.
    """
    givers, takers = request.stage_ranks[giver], request.stage_ranks[taker]
    pairs = ((givers[index % len(givers)], rank) for index, rank in enumerate(takers) if rank not in givers)
    return [Channel(kind, giver, taker, from_rank, to_rank) for from_rank, to_rank in pairs]


def _partners(one: Sequence[int], other: Sequence[int]) -> set[tuple[int, int]]:
    """Return the pairs of ranks of two stages that run the same microbatch: see ``ScheduleSpec.rank_of``."""
    return {(one[k % len(one)], other[k % len(other)]) for k in range(math.lcm(len(one), len(other)))}


def loan_channel(loan: Loan, request: ScheduleSpec, reader: int) -> Channel:
    """Return the channel on which replica ``reader`` of the reading stage receives a parameter."""
    givers, takers = request.stage_ranks[loan.owner], request.stage_ranks[loan.reader]
    return Channel(LOAN, loan.owner, loan.reader, givers[reader % len(givers)], takers[reader])


def channels(message_plan: MessagePlan, request: ScheduleSpec) -> list[Channel]:
    """Return all channels that a run can use, sorted: the same list on every rank."""
    ranks = request.stage_ranks
    channel_set = {
        Channel(kind, a, b, from_rank, to_rank)
        for kind, edges in ((ACTIVATION, message_plan.forward), (GRADIENT, message_plan.backward))
        for a, b in edges
        for from_rank, to_rank in _partners(ranks[a], ranks[b])
    }
    for tie in message_plan.shared:
        for copy in tie.copies:
            channel_set.update(tie_channels(TIE_VALUE, tie.owner, copy, request))
    for tie in message_plan.ties:
        for copy in tie.copies:
            channel_set.update(tie_channels(TIE_GRADIENT, copy, tie.owner, request))
    for loan in message_plan.loans:
        channel_set.update(loan_channel(loan, request, index) for index in range(len(ranks[loan.reader])))
    for rank in range(1, request.num_ranks):
        channel_set.add(batch_channel(rank))
    channel_set.update(loss_channel(request, rank) for rank in ranks[-1])
    return sorted(c for c in channel_set if c.from_rank != c.to_rank)


def message_bytes(plan: Plan, graph: Graph, message_plan: MessagePlan) -> dict[Edge, int]:
    """Return the bytes of a microbatch on each edge: activations to later stages, gradients to earlier ones."""
    num_bytes = {boundary.value: boundary.bytes for boundary in plan.boundaries}
    num_bytes |= {tied(tie.parameter): graph.parameters[tie.parameter].num_bytes({}) for tie in plan.ties}
    every = (*message_plan.forward.items(), *message_plan.backward.items())
    return {edge: sum(num_bytes[value] for value in values) for edge, values in every}
