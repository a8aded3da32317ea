"""``estimate``: bytes, operations and traffic of the nodes, without memory for any tensor and without a clock.

Every node runs once on fake tensors, which have a shape but no data. The planner computes the times from the datasheet
of a device (``planning.cost.datasheets``). A model that is larger than this machine's memory can be planned this way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopipe.ir.profile import COUNTED, Device, Measurement, NodeCost, Profile
from autopipe.measure.clock import Clock
from autopipe.measure.device import quiet
from autopipe.measure.measure import BatchSource, checked_sizes
from autopipe.measure.segment_costs import count_saved, walk_nodes
from autopipe.measure.stepping import optimizer_cost
from autopipe.measure.subject import Captured, Progress, Subject, no_progress
from autopipe.measure.walk import explained

_HOST = torch.device("cpu")
QUICK_FLOPS = 1e13  # of a forward and a backward; a device for training takes some tens of milliseconds


def estimate(
    capture: Captured,
    workload: BatchSource,
    *,
    microbatch_sizes: Sequence[int],
    larger_sizes: Sequence[int] = (),
    progress: Progress = no_progress,
) -> Profile:
    """Count a captured model, whose parameters may be on the meta device. All seconds are 0.

    ``larger_sizes``: the largest of them is counted too that has at most QUICK_FLOPS operations.

    Raises: ProfileError for a node that needs the data of a tensor.
    """
    sizes = checked_sizes(microbatch_sizes)
    measurements: list[Measurement] = []
    graph = capture.graph
    with quiet(_HOST, 1):

        def count(size: int, part: float) -> None:
            progress(f"microbatch of {size}: counting", part)
            leaves = workload.leaves(workload.example_item(size))
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            batch = {name: mode.from_tensor(leaf) for name, leaf in leaves.items()}
            with mode:
                measurements.append(_counted(Subject(capture, Clock(_HOST), size, batch)))

        steps = len(sizes) + 1
        for index, size in enumerate(sizes):
            count(size, index / steps)
        flops = sum(work.forward.flops + work.backward.flops for work in measurements[-1].work.values()) / sizes[-1]
        quick = [size for size in larger_sizes if size > sizes[-1] and size * flops <= QUICK_FLOPS]
        for size in quick[-1:]:
            count(size, len(sizes) / steps)
        progress("optimizer state", 1.0)
        # the smallest parameters first, because they are allocated here
        parameters = sorted(graph.parameters.items(), key=lambda entry: (entry[1].num_bytes({}), entry[0]))
        trained = {name: spec.requires_grad for name, spec in parameters}
        _, state = optimizer_cost(capture.module, trained, workload, Clock(_HOST), most_bytes=1 << 20)
    return Profile(workload.spec, graph, Device(COUNTED, "tensors without data", 0), tuple(measurements), 0.0, state)


def _counted(subject: Subject) -> Measurement:
    """Return what the nodes keep, compute and move at one size."""
    facts, whole = walk_nodes(subject, no_progress), subject.whole()
    with explained(whole.about[0], subject.size):
        cost = count_saved(subject, whole, subject.start(), {}, facts)
    names = {position: name for name, position in whole.positions.items()}
    keepers = {names[position]: names[keeper] for position, _, keeper in reversed(cost.keepers)}
    costs = {
        node.name: NodeCost(0.0, 0.0, facts.output_bytes[node.name], saved, facts.workspace_bytes[node.name])
        for node, saved in zip(whole.about, cost.saved_bytes, strict=True)
    }
    return Measurement(subject.size, costs, 0.0, keepers, facts.work, facts.casts)
