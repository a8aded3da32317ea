"""``estimate``: what the nodes keep, compute and move, found without memory for any tensor and without a clock.

Every node runs once on fake tensors, which have a shape and no data, as in a measurement; only the times are missing.
The planner prices such a profile for a device by its datasheet (``planning.cost.roofline``). So a model that is larger
than this machine's memory can be planned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopipe.errors import ProfileError
from autopipe.ir.profile import COUNTED, Device, Measurement, Profile
from autopipe.measure.clock import Clock
from autopipe.measure.device import quiet
from autopipe.measure.measure import Fed
from autopipe.measure.size import Captured, Progress, SizeRun
from autopipe.measure.stepping import optimizer_cost

_HOST = torch.device("cpu")


def estimate(
    capture: Captured, workload: Fed, *, microbatch_sizes: Sequence[int], progress: Progress | None = None
) -> Profile:
    """Count a captured model, whose parameters may be on the meta device. All seconds are 0.

    ``progress``: called with what is being done and the part that is done, 0 .. 1.

    Raises: ProfileError for a node that needs the data of a tensor.
    """
    sizes = sorted(set(microbatch_sizes))
    if not sizes or sizes[0] < 1:
        raise ProfileError(f"microbatch sizes {list(microbatch_sizes)} are not positive", remedy="give 1,2,4,8 or so")
    report = progress or (lambda text, part: None)
    measurements: list[Measurement] = []
    graph = capture.graph
    with quiet(_HOST, 1):
        for index, size in enumerate(sizes):
            report(f"microbatch of {size}: counting", index / len(sizes))
            leaves = workload.leaves(workload.example_item(size))
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            batch = {name: mode.from_tensor(leaf) for name, leaf in leaves.items()}
            with mode:
                measurements.append(SizeRun(capture, Clock(_HOST), size, batch).counted())
        report("optimizer state", 1.0)
        # of the smallest parameters, which are made for it
        parameters = sorted(graph.parameters.items(), key=lambda entry: (entry[1].num_bytes({}), entry[0]))
        trained = {name: spec.requires_grad for name, spec in parameters}
        _, state = optimizer_cost(capture.module, trained, workload, Clock(_HOST), most_bytes=1 << 20)
    return Profile(workload.spec, graph, Device(COUNTED, "tensors without data", 0), tuple(measurements), 0.0, state)
