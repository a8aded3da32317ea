"""The simulator's prediction of a plan: from a plan, a profile and a cluster to a timeline.

Of a schedule with a flush, one minibatch is simulated, because all are equal. Of a schedule whose steps overlap,
several are simulated, and the time that one minibatch adds is the time of a step.

``RunCosts`` is what the prediction of a run was made from. A run has it as costs.json, so that it can be drawn later:
the profile and the plan of the work directory may belong to another run by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.messages import Edge, MessagePlan, message_bytes, num_buckets
from autopipe.ir.plan import Plan, Prediction
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import Schedule
from autopipe.ir.teams.exchanged import SUM, Exchange
from autopipe.ir.timeline import Timeline
from autopipe.planning.spilled.costs import spill_costs
from autopipe.planning.teams import on_cluster, ring_seconds
from autopipe.schedules import REGISTRY, Program, least_seconds, lower, make, simulate
from autopipe.schedules.costs import Costs, EdgeCosts, SpillCosts, StageCosts

WINDOW = 8
# pairs of a rank and a microbatch that take about ten seconds to simulate
MOST_SIMULATED_ONCE = 200_000
# programs that are kept for other plans with the same schedule, stages and messages, and the most pairs of each
_KEPT, _MOST_KEPT = 16, 4096
_PROGRAMS: dict[tuple[Any, ...], Program] = {}


def schedule_of(plan: Plan, num_minibatches: int = 1) -> Schedule:
    """Return the schedule of a plan, without communication."""
    return make(plan.schedule, plan.request(num_minibatches))


def costs_of(plan: Plan, profile: Profile, cluster: Cluster) -> Costs:
    """Return the costs for the simulator, from the plan's times."""
    graph = profile.graph
    copies = {(tie.parameter, copy) for tie in plan.ties for copy in tie.copies}
    partial, stages = {*graph.partial}, []
    for stage in plan.stages:
        owned = sum(graph.parameters[n].num_bytes({}) for n in stage.parameters if (n, stage.index) not in copies)
        link = cluster.link(stage.ranks[0], stage.ranks[-1])
        # in a ring all-reduce, each rank sends and receives 2 (r - 1) / r of the gradients
        share = 2 * (stage.replicas - 1) / stage.replicas
        reduce_seconds = share * owned / link.ring_bandwidth + (link.latency_seconds if share else 0.0)
        host, pace = cluster.host.compute_seconds, cluster.host.pace
        update = profile.optimizer_seconds_per_byte * owned / cluster.update_speed_of(stage.ranks) / plan.sharing(stage)
        if plan.sharing(stage) > 1:  # the new weights are exchanged like the gradients, behind the step
            update += reduce_seconds
        if cluster.within is not None:
            own = sum(graph.parameters[name].num_bytes({}) for name in stage.parameters if name in partial)
            update += ring_seconds(Exchange(SUM, own), cluster.within) if own else 0.0
        backward = pace * (stage.backward_seconds + stage.recompute_seconds)
        stages.append(
            StageCosts(
                pace * stage.forward_seconds + host,
                backward + host,
                backward / 2 + host,
                backward / 2 + host,
                step_seconds=update + cluster.host.step_seconds,
                reduce_seconds=reduce_seconds,
                # a backward in halves has no last part during which the sum could begin
                reduce_buckets=1 if REGISTRY[plan.schedule].splits_backward else num_buckets(owned),
            )
        )
    spill: tuple[SpillCosts, ...] = ()
    if REGISTRY[plan.schedule].spills:
        # to begin a copy is as much work as to begin to send a message
        spill = spill_costs(plan, profile, cluster.device(0).to_host_bandwidth, cluster.host.send_seconds)
    return Costs(tuple(stages), _edges(plan, profile, cluster), spill, cluster.cores)


def _edges(plan: Plan, profile: Profile, cluster: Cluster) -> dict[Edge, EdgeCosts]:
    message_plan = MessagePlan.of(plan, profile.graph)
    amounts = message_bytes(plan, profile.graph, message_plan)
    edges: dict[Edge, EdgeCosts] = {}
    host = cluster.host
    for edge, values in (*message_plan.forward.items(), *message_plan.backward.items()):
        total, further = amounts[edge], max(len(values) - 1, 0) * host.value_seconds
        link = cluster.link(plan.stages[edge[0]].ranks[0], plan.stages[edge[1]].ranks[0])
        # further values cost less than the first, which wakes the threads that send
        send = host.send_seconds + further + host.send_seconds_per_byte * total
        # the measured bandwidth and latency of a link include the work at its ends
        occupied = max(total / link.bandwidth - host.send_seconds_per_byte * total, 0.0)
        latency = max(link.latency_seconds - host.send_seconds - host.receive_seconds, 0.0) + host.delivery_seconds
        edges[edge] = EdgeCosts(occupied, latency, send, host.receive_seconds + further)
    return edges


def timeline_of(plan: Plan, profile: Profile, cluster: Cluster, num_minibatches: int = 1) -> Timeline:
    """Return the simulated timeline of some minibatches."""
    return timeline_at(plan, profile.graph, costs_of(plan, profile, cluster), num_minibatches)


def timeline_at(plan: Plan, graph: Graph, costs: Costs, num_minibatches: int = 1) -> Timeline:
    """Return the simulated timeline of some minibatches at given costs."""
    return simulate(lower(schedule_of(plan, num_minibatches), MessagePlan.of(plan, graph).edges), costs)


def _program(plan: Plan, message_plan: MessagePlan, num_minibatches: int) -> Program:
    """Return the instructions of some minibatches. Those of small plans are kept, for others that differ in times."""
    spec, edges = plan.request(num_minibatches), message_plan.edges
    layout = spec.stage_ranks, spec.num_microbatches, num_minibatches, spec.text
    key = (plan.schedule, *layout, tuple(sorted(spec.options.items())), edges)
    program = _PROGRAMS.pop(key, None) or Program(lower(make(plan.schedule, spec), edges))
    if spec.num_ranks * spec.num_microbatches * num_minibatches <= _MOST_KEPT:
        _PROGRAMS[key] = program  # the newest last
        for oldest in list(_PROGRAMS)[:-_KEPT]:
            del _PROGRAMS[oldest]
    return program


def least_step_seconds(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Return a lower bound of the step that ``predict`` returns, without a simulation; 0 if none is known."""
    kind = REGISTRY[plan.schedule]
    one_each = len({rank for stage in plan.stages for rank in stage.ranks}) == len(plan.stages)
    if kind.spills or kind.splits_backward or not kind.synchronous or plan.schedule_text or not one_each:
        return 0.0
    if any(stage.replicas > 1 for stage in plan.stages):
        return 0.0
    edges = MessagePlan.of(plan, profile.graph).edges
    return least_seconds(costs_of(plan, profile, cluster), plan.num_microbatches, edges.forward, edges.backward)


def predict(plan: Plan, profile: Profile, cluster: Cluster) -> Prediction:
    """Return the simulated prediction; without a flush, of the steady state."""
    if REGISTRY[plan.schedule].spills:  # the first minibatch finds nothing on the device
        timeline, longer = (timeline_of(plan, profile, cluster, count) for count in (2, 3))
        seconds = longer.seconds - timeline.seconds
        bubble = max(0.0, 1 - (longer.busy_seconds(0) - timeline.busy_seconds(0)) / seconds) if seconds else 0.0
    else:
        message_plan, costs = MessagePlan.of(plan, profile.graph), costs_of(plan, profile, cluster)
        once = _program(plan, message_plan, 1)
        if not any(once.staleness):
            totals = once.run(costs)
            seconds, bubble = totals.seconds, totals.bubble_fraction
        else:
            short, long = (_program(plan, message_plan, count).run(costs) for count in (WINDOW, 2 * WINDOW))
            seconds = (long.seconds - short.seconds) / WINDOW
            busy = sum(b - a for a, b in zip(short.busy_seconds, long.busy_seconds, strict=True)) / WINDOW
            bubble = max(0.0, 1 - busy / (seconds * plan.num_ranks)) if seconds else 0.0
    bottleneck = max(stage.seconds / stage.replicas for stage in plan.stages)
    return Prediction(seconds, plan.batch_size / seconds if seconds else 0.0, bubble, bottleneck)


@dataclass(frozen=True, slots=True)
class _MessageCosts:
    """The costs of the messages from one stage to another."""

    sender: int
    receiver: int
    costs: EdgeCosts


@dataclass(frozen=True, slots=True)
class RunCosts:
    """The costs of a plan, and the devices and versions that they are for."""

    plan_digest: str
    cluster: Cluster
    stages: tuple[StageCosts, ...]
    messages: tuple[_MessageCosts, ...]
    spill: tuple[SpillCosts, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)  # of the programs that train, by name

    @staticmethod
    def of(plan: Plan, profile: Profile, cluster: Cluster, versions: dict[str, str]) -> RunCosts:
        """Return the costs with which ``planning.cost.predict`` predicts a plan."""
        costs = costs_of(plan, on_cluster(profile, cluster), cluster)
        messages = tuple(_MessageCosts(a, b, edge) for (a, b), edge in sorted(costs.edges.items()))
        return RunCosts(plan.digest, cluster, costs.stages, messages, costs.spill, versions)

    def timeline(self, plan: Plan, graph: Graph, num_minibatches: int = 1) -> Timeline:
        """Return the simulated timeline of some minibatches of the plan.

        Raises: ScheduleError if the costs are for another number of stages.
        """
        edges = {(message.sender, message.receiver): message.costs for message in self.messages}
        return timeline_at(plan, graph, Costs(self.stages, edges, self.spill, self.cluster.cores), num_minibatches)
