"""``ReplicaSync``: the exchange of one stage's replicas in a minibatch: sum of gradients, mean of statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from autopipe.runtime.context import RunContext
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.reduction import BufferMean, GradientSum
from autopipe.runtime.transport.base import Transport


class ReplicaSync:
    """One rank's end of the exchange for one stage."""

    def __init__(self, runner: StageRunner, gradients: GradientSum, buffers: BufferMean, transport: Transport) -> None:
        self._runner, self._gradients, self._buffers, self._transport = runner, gradients, buffers, transport

    def overlapping(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for the last backward of a minibatch: gradients are sent as they arrive.

        If the sum of the previous minibatch has not finished, nothing overlaps and ``start`` begins this one.
        """
        if self._gradients.busy:
            return contextlib.nullcontext()
        return self._gradients.watching(self._runner.versions.in_use)

    def start(self) -> None:
        """Start the sums that have not started. The losses carry their shares, so no mean is taken."""
        self._gradients.start(self._runner.versions.masters)

    def finish(self) -> None:
        """Wait for the sums, and bring the running statistics of all replicas together."""
        self._gradients.finish()
        deferred = self._runner.deferred
        if deferred is None:
            self._buffers.average(self._transport)
            return
        for tensor in deferred.tensors():  # summed over the replicas, they cover the minibatch
            self._transport.all_reduce(self._buffers.group, tensor)


def replica_syncs(
    context: RunContext, runners: Mapping[int, StageRunner], transport: Transport
) -> dict[int, ReplicaSync]:
    """Return the exchanges of a rank, by stage. A stage that is not replicated has none."""
    syncs = {}
    for index, runner in runners.items():
        stage = context.plan.stages[index]
        if stage.replicas == 1:
            continue
        # the gradient of an exactly tied copy went to the owner with every microbatch, and is summed there
        trained = {
            name: parameter
            for name, parameter in runner.versions.masters.items()
            if parameter.requires_grad and runner.exact_ties.get(name, True)
        }
        group = context.request.stage_ranks[index]
        gradients = GradientSum(trained, context.parameters_used(stage), group, transport)
        buffers = BufferMean(runner.stage, context.buffers_written(stage), context.graph.aliases, group)
        syncs[index] = ReplicaSync(runner, gradients, buffers, transport)
    return syncs
