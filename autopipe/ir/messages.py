"""The messages between the stages of a plan: the edges for lowering, and the values in each message. Pure arithmetic.

Forward: each boundary value goes from its producer directly to each consumer. Backward: its gradient returns as a chain
through the consumers, last to first, to the producer (see ``ir.plan.Boundary``). The gradient of an exact tie takes the
same kind of chain, through its copies to its owner.

Loans are the parameters of other stages that a stage needs to run the ``after_step`` hook. The new value of a parameter
may depend on others: a momentum teacher's depends on its student's. If those are in another stage, their values after
the optimizer's step are sent to the stage. It runs the hook over its own parameters and these loans, and discards the
changes to the loans. So its own parameters get the same values as in one process.

``chains``: the stages through which the gradient of a boundary value returns. A stage that reads a value without
differentiating it (detached, compared, counted) has no gradient to return. So the chain of stages along which a
boundary's gradient travels does not include it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan, Tie
from autopipe.ir.schedule import ScheduleSpec, StageEdges

Edge = tuple[int, int]

ACTIVATION, GRADIENT, TIE_GRADIENT, TIE_VALUE, LOAN, LOSS, BATCH = (
    "activation",
    "gradient",
    "tie-gradient",
    "tie-value",
    "loan",
    "loss",
    "batch",
)
# the kinds whose tensors are contiguous and stay on the CPU, on any device that the rank computes on
FIGURES = (LOSS, BATCH)

# The gradients of replicas are reduced in buckets of this size (PyTorch DDP, arXiv:2006.15704, section 3.2).
BUCKET_BYTES = 25 * 2**20


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


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """One direction between two ranks; messages arrive in the order in which they are sent.

    Two ranks may exchange messages for several pairs of stages. Each pair has its own channel.
    """

    kind: str  # one of the constants above
    from_stage: int
    to_stage: int
    from_rank: int
    to_rank: int

    def __str__(self) -> str:
        source, target = f"{self.from_stage} (rank {self.from_rank})", f"{self.to_stage} (rank {self.to_rank})"
        return f"{self.kind} of stage {source} to stage {target}"


@dataclass(frozen=True, slots=True)
class Loan:
    """A parameter that stage ``owner`` steps, and sends to stage ``reader`` after each step."""

    parameter: str
    owner: int
    reader: int


def owners(plan: Plan) -> dict[str, int]:
    """Return the stage that steps each parameter: for a tied one, the first of its stages."""
    owners: dict[str, int] = {}
    for stage in plan.stages:
        for name in stage.parameters:
            owners.setdefault(name, stage.index)
    return owners


def borrowed(plan: Plan, graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter that the hook changes, the ones of other stages that its new value depends on."""
    owner = owners(plan)
    return {
        name: tuple(other for other in read if owner[other] != owner[name]) for name, read in graph.after_step.items()
    }


def loans(plan: Plan, graph: Graph) -> tuple[Loan, ...]:
    """Return all loans of a plan, sorted by reader and by the order of the model's parameters: equal on every rank."""
    owner = owners(plan)
    wanted = {(owner[name], other) for name, others in borrowed(plan, graph).items() for other in others}
    return tuple(
        Loan(name, owner[name], stage.index)
        for stage in plan.stages
        for name in graph.parameters
        if (stage.index, name) in wanted
    )


def num_buckets(num_bytes: float) -> int:
    """Return about how many buckets ``num_bytes`` of gradients need."""
    return max(1, -(-int(num_bytes) // BUCKET_BYTES))


def _may_carry(node: Node) -> bool:
    """Return whether a result may need a gradient: True if unknown, as for a tuple or a call that changes memory."""
    return node.spec is None or node.spec.requires_grad


def _reached(graph: Graph) -> list[bool]:
    """Return, for every node, whether the backward from the loss may run through it."""
    needed, reached_backwards = set(graph.outputs[:1]), []
    for node in reversed(graph.nodes):
        reached = _may_carry(node) and (node.name in needed or bool(node.mutates))
        if reached:
            needed.update(node.inputs)
        reached_backwards.append(reached)
    return reached_backwards[::-1]


def chains(graph: Graph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return, for every boundary value with a gradient, the stages that add to the gradient, producer first.

    Values that no later stage differentiates are not included.
    """
    reached = _reached(graph)
    last = len(plan.stages) - 1
    chain_of = {}
    for boundary in plan.boundaries:
        if not boundary.spec.requires_grad:
            continue
        readers = [
            stage
            for stage in boundary.consumers
            if _reads(graph.nodes[plan.stages[stage].start : plan.stages[stage].stop], boundary.value, reached, graph)
            or (stage == last and boundary.value == graph.outputs[0])
        ]
        if readers:
            chain_of[boundary.value] = (boundary.producer, *readers)
    return chain_of


def trained_ties(graph: Graph, plan: Plan) -> tuple[Tie, ...]:
    """Return the ties whose stages exchange gradients: those of trained parameters.

    A plan also lists the ties of frozen parameters, because its digest covers them. Their stages exchange no gradient,
    and no value unless ``after_step`` changes it (``moving_ties``).
    """
    return tuple(tie for tie in plan.ties if graph.parameters[tie.parameter].requires_grad)


def moving_ties(graph: Graph, plan: Plan) -> tuple[Tie, ...]:
    """Return the ties whose stages exchange values: trained parameters, and those that ``after_step`` changes."""
    return tuple(tie for tie in plan.ties if tie.parameter in graph.moving)


def _reads(nodes: Sequence[Node], value: str, reached: Sequence[bool], graph: Graph) -> bool:
    return any(value in node.inputs and reached[graph.position[node.name]] for node in nodes)
