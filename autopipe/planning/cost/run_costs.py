"""``RunCosts``: what the prediction of a run was made from, so that it can be drawn without the profile.

A run has it as costs.json. The profile and the plan of the work directory may belong to another run by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.timeline import Timeline
from autopipe.planning.cost.predict import costs_of, timeline_at
from autopipe.planning.teams import on_cluster
from autopipe.schedules.costs import Costs, EdgeCosts, SpillCosts, StageCosts


@dataclass(frozen=True, slots=True)
class MessageCosts:
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
    messages: tuple[MessageCosts, ...]
    spill: tuple[SpillCosts, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)  # of the programs that train, by name

    @staticmethod
    def of(plan: Plan, profile: Profile, cluster: Cluster, versions: dict[str, str]) -> RunCosts:
        """Return the costs with which ``planning.cost.predict`` predicts a plan."""
        costs = costs_of(plan, on_cluster(profile, cluster), cluster)
        messages = tuple(MessageCosts(a, b, edge) for (a, b), edge in sorted(costs.edges.items()))
        return RunCosts(plan.digest, cluster, costs.stages, messages, costs.spill, versions)

    def timeline(self, plan: Plan, graph: Graph, num_minibatches: int = 1) -> Timeline:
        """Return the simulated timeline of some minibatches of the plan.

        Raises: ScheduleError if the costs are for another number of stages.
        """
        edges = {(message.sender, message.receiver): message.costs for message in self.messages}
        return timeline_at(plan, graph, Costs(self.stages, edges, self.spill, self.cluster.cores), num_minibatches)
