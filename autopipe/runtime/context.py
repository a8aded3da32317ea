"""``RunContext``: a plan, its graph, and the values that every rank derives from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopipe.errors import PlanError
from autopipe.ir.graph import Graph
from autopipe.ir.messages import Channel, MessagePlan, channels, moving_ties
from autopipe.ir.plan import Plan, Stage
from autopipe.ir.plan_fits_graph import refuse_disagreement
from autopipe.ir.schedule import ScheduleSpec
from autopipe.schedules import make


@dataclass(frozen=True, slots=True)
class RunContext:
    """A plan, its graph, and the values derived from them. All ranks have equal contexts."""

    plan: Plan
    graph: Graph
    request: ScheduleSpec
    # the values that go from stage to stage
    message_plan: MessagePlan
    # every channel of the run, in one order on all ranks
    channels: tuple[Channel, ...]
    # the ranks of each replicated stage
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(plan: Plan, graph: Graph) -> RunContext:
        """Derive the context.

        Raises: ArtifactError if the two do not belong together; PlanError as ``refuse_stale_ties`` and
        ``refuse_replicated_state`` do.
        """
        refuse_disagreement(plan, graph)
        request = plan.request()
        refuse_stale_ties(plan, graph, request)
        refuse_replicated_state(plan, graph)
        message_plan = MessagePlan.of(plan, graph)
        groups = tuple(sorted({ranks for ranks in plan.stage_ranks if len(ranks) > 1}))
        return RunContext(plan, graph, request, message_plan, tuple(channels(message_plan, request)), groups)

    def with_options(self, **options: int) -> RunContext:
        """Return the context with other options of the schedule."""
        return replace(self, request=replace(self.request, options={**self.request.options, **options}))

    def buffers_written(self, stage: Stage) -> frozenset[str]:
        """Return the buffers that forwards of a stage write, by first name: running statistics."""
        return frozenset(name for node in self.graph.nodes[stage.start : stage.stop] for name in node.buffers_written)

    def parameters_used(self, stage: Stage) -> tuple[str, ...]:
        """Return the parameters that forwards of a stage read, in order of first use."""
        nodes = self.graph.nodes[stage.start : stage.stop]
        return tuple(dict.fromkeys(name for node in nodes for name in node.parameters))

    @property
    def weighted(self) -> bool:
        """Whether the user's loss returns its own weight."""
        return len(self.graph.outputs) > 1


def refuse_stale_ties(plan: Plan, graph: Graph, request: ScheduleSpec) -> None:
    """Refuse a schedule under which the stages of a tied, trained parameter read different versions of it.

    Raises: PlanError naming the parameter and the versions.
    """
    staleness = make(plan.schedule, request).staleness
    for tie in moving_ties(graph, plan):
        stages = (tie.owner, *tie.copies)
        deltas = {stage: staleness[stage] for stage in stages}
        if len(set(deltas.values())) > 1:
            versions = ", ".join(f"stage {stage} reads version t - {delta}" for stage, delta in deltas.items())
            raise PlanError(
                f"{plan.schedule} cannot keep {tie.parameter} tied: in minibatch t {versions}",
                remedy="choose 1f1b or 2bw, or pipedream --vertical-sync: with these, all stages read one version",
            )


def refuse_replicated_state(plan: Plan, graph: Graph) -> None:
    """Refuse replicas of a stage that passes state from one microbatch to the next in a buffer.

    A replica sees only its own microbatches, so its queue, counter or power iteration would differ.

    Raises: PlanError naming the buffer and the stage.
    """
    for stage in plan.stages:
        if stage.replicas == 1:
            continue
        for node in graph.nodes[stage.start : stage.stop]:
            buffers = graph.replayed_buffers.intersection(node.buffers)
            if buffers:
                raise PlanError(
                    f"{stage.label} runs on {stage.replicas} ranks, and its forward reads the buffer "
                    f"{min(buffers)} that it writes: each replica would see only its own microbatches",
                    where=node.place,
                    remedy="--replicas never",
                )
