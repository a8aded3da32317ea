"""The simulator's prediction of a plan: from a plan, a profile and a cluster to a timeline.

Of a schedule with a flush, one minibatch is simulated, because all are equal. Of a schedule whose steps overlap,
several are simulated, and the time that one minibatch adds is the time of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopipe.errors import PlanError, ScheduleError
from autopipe.ir.cluster import Cluster
from autopipe.ir.cuts import Cuts
from autopipe.ir.gradients import num_buckets
from autopipe.ir.messages import Edge, MessagePlan, tied
from autopipe.ir.plan import Plan, Prediction
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import Schedule
from autopipe.ir.timeline import Timeline
from autopipe.planning import PlanOptions
from autopipe.planning.api import candidate_counts
from autopipe.planning.refusals import microbatch_count
from autopipe.planning.search.alternatives import MOST_SCORED, RankedScore, Score
from autopipe.schedules import REGISTRY, Costs, EdgeCosts, StageCosts, lower, make, simulate

WINDOW = 8
# pairs of a rank and a microbatch that take about a quarter of a second to simulate, and ten seconds
MOST_SIMULATED = 4096
MOST_SIMULATED_ONCE = 200_000


def schedule_of(plan: Plan, num_minibatches: int = 1) -> Schedule:
    """Return the schedule of a plan, without communication."""
    return make(plan.schedule, plan.request(num_minibatches))


def costs_of(plan: Plan, profile: Profile, cluster: Cluster) -> Costs:
    """Return the costs for the simulator, from the plan's times."""
    graph = profile.graph
    copies = {(tie.parameter, copy) for tie in plan.ties for copy in tie.copies}
    stages = []
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
    return Costs(tuple(stages), _edges(plan, profile, cluster))


def _edges(plan: Plan, profile: Profile, cluster: Cluster) -> dict[Edge, EdgeCosts]:
    message_plan = MessagePlan.of(plan, profile.graph)
    amounts = message_bytes(plan, profile, message_plan)
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


def message_bytes(plan: Plan, profile: Profile, message_plan: MessagePlan) -> dict[Edge, int]:
    """Return the bytes of a microbatch on each edge: activations to later stages, gradients to earlier ones."""
    num_bytes = {boundary.value: boundary.bytes for boundary in plan.boundaries}
    num_bytes |= {tied(tie.parameter): profile.graph.parameters[tie.parameter].num_bytes({}) for tie in plan.ties}
    every = (*message_plan.forward.items(), *message_plan.backward.items())
    return {edge: sum(num_bytes[value] for value in values) for edge, values in every}


def timeline_of(plan: Plan, profile: Profile, cluster: Cluster, num_minibatches: int = 1) -> Timeline:
    """Return the simulated timeline of some minibatches."""
    lowered = lower(schedule_of(plan, num_minibatches), MessagePlan.of(plan, profile.graph).edges)
    return simulate(lowered, costs_of(plan, profile, cluster))


def predict(plan: Plan, profile: Profile, cluster: Cluster) -> Prediction:
    """Return the simulated prediction; without a flush, of the steady state."""
    if not any(schedule_of(plan).staleness):
        timeline = timeline_of(plan, profile, cluster)
        seconds, bubble = timeline.seconds, timeline.bubble_fraction
    else:
        short, long = (timeline_of(plan, profile, cluster, count) for count in (WINDOW, 2 * WINDOW))
        seconds = (long.seconds - short.seconds) / WINDOW
        busy = sum(long.busy_seconds(rank) - short.busy_seconds(rank) for rank in range(plan.num_ranks)) / WINDOW
        bubble = max(0.0, 1 - busy / (seconds * plan.num_ranks)) if seconds else 0.0
    bottleneck = max(stage.seconds / stage.replicas for stage in plan.stages)
    return Prediction(seconds, plan.batch_size / seconds if seconds else 0.0, bubble, bottleneck)


def simulator_score(profile: Profile, cluster: Cluster, choices: Sequence[PlanOptions]) -> RankedScore:
    """Return the simulator as the score of a search. The larger the plans are, the fewer it simulates.

    If they are too large to simulate, the score is the closed-form estimate for all of them: the two kinds of
    prediction are never compared with each other.
    """
    stages = len(Cuts(profile.graph).legal) + 1
    largest = max(1, *(_largest(profile, options, stages) for options in choices))
    if largest > MOST_SIMULATED_ONCE:
        return RankedScore(lambda plan: plan.predicted, 1)
    return RankedScore(simulated(profile, cluster), max(1, min(MOST_SCORED, MOST_SCORED * MOST_SIMULATED // largest)))


def _largest(profile: Profile, options: PlanOptions, most_stages: int) -> int:
    try:
        fixed = microbatch_count(options)
        count = fixed or max(candidate_counts(profile, options), default=1)
        # if ranks may stay unused, no stage has more ranks than microbatches
        most = min(options.num_ranks, count * most_stages) if options.may_replicate else options.num_ranks
        return count * most
    except PlanError:
        return 0  # the search will raise it


def simulated(profile: Profile, cluster: Cluster) -> Score:
    """Return the simulator as a score. A plan that its schedule cannot run takes infinitely long.

    A plan that is too large to simulate keeps the closed-form estimate.
    """

    def score(plan: Plan) -> Prediction:
        if plan.num_ranks * plan.num_microbatches > MOST_SIMULATED_ONCE:
            return plan.predicted
        try:
            return predict(plan, profile, cluster)
        except ScheduleError:
            return Prediction(math.inf, 0.0, 0.0, plan.predicted.bottleneck_seconds)

    return score
