"""``Footprint``: measures the peak memory of each stage.

Memory that is allocated during an instruction belongs to the stage of the instruction until it is freed::

    peak(stage) = max over its instructions of (owned by the stage before + peak during - total before)

The peak starts at the weights. It counts the batch tensors of a microbatch from its forward to its backward. On a CUDA
device the allocator of torch measures; on a CPU the operations are counted (``measure.live``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autopipe import sparse
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Instruction, Op
from autopipe.measure.live import HostMeter, meter_of
from autopipe.runtime.events import Reporter
from autopipe.runtime.stage_runner import StageRunner


@dataclass(slots=True)
class _Stage:
    """Bytes of one stage."""

    weights: int
    peak: int
    # the batch tensors of each microbatch in flight
    batches: dict[tuple[int, int], int] = field(default_factory=dict)
    # the largest number of microbatches in flight at once
    most_in_flight: int = 0


class Footprint:
    """Attributes allocations to the stages of one rank. Build it before the ``runners`` have run anything.

    The workspace of cuBLAS (32 MiB on a Hopper GPU) belongs to no stage. It is in what a plan leaves free of a GPU.
    """

    def __init__(self, runners: Mapping[int, StageRunner], device: torch.device) -> None:
        self._kind = device.type
        if device.type == "cuda":
            _allocate_workspaces(device)
        self.owners = HostMeter(device.type)
        self._meter = self.owners if device.type == "cpu" else meter_of(device)
        self._runners = runners
        self._stages: dict[int, _Stage] = {}
        for index, runner in runners.items():
            tensors = [*runner.versions.masters.values(), *runner.stage.buffers()]
            self.owners.owner = index
            for tensor in tensors:
                self.owners.count(tensor)
            size = _bytes(tensors)
            self._stages[index] = _Stage(size, size)

    @contextlib.contextmanager
    def during(self, instruction: Instruction, batch: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Attribute the allocations of the body.

        ``batch``: the batch tensors of the instruction's microbatch. Those that the body copies to the device count as
        its allocations.
        """
        stage = self._stages[instruction.stage]
        key = instruction.minibatch, instruction.microbatch
        if instruction.op == Op.FORWARD:
            present = (tensor for tensor in batch if tensor.device.type == self._kind)
            stage.batches[key] = sum(tensor.numel() * tensor.element_size() for tensor in present)
            stage.most_in_flight = max(stage.most_in_flight, len(stage.batches))
        owned = self.owners.held_by(instruction.stage) + sum(stage.batches.values())
        before, self.owners.owner = self._meter.now(), instruction.stage
        self._meter.restart()
        try:
            yield
        finally:
            stage.peak = max(stage.peak, owned + self._meter.most() - before)
            if instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHTS):
                stage.batches.pop(key, None)

    def report_to(self, reporter: Reporter, plan: Plan) -> None:
        """Report an event for each stage, with the planned peak."""
        for fields in self.report():
            reporter.event("peak", planned_bytes=plan.stages[fields["stage"]].peak_bytes, **fields)

    def report(self) -> list[dict[str, int]]:
        """Return the fields of each stage's event.

        ``held_bytes`` is what the stage owns now. After the last step, with nothing in flight, these are the weights of
        all versions, the optimizer state and running sums.
        """
        return [
            {
                "stage": index,
                "bytes": stage.peak,
                "weight_bytes": stage.weights,
                "held_bytes": self.owners.held_by(index),
                "versions": self._runners[index].versions.peak_versions,
                "in_flight": stage.most_in_flight,
            }
            for index, stage in self._stages.items()
        ]


def _allocate_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate what it keeps: for products in this thread, and in autograd's."""
    one = torch.ones(1, 1, device=device, requires_grad=True)
    torch.autograd.backward(torch.nn.functional.linear(one, one, one[0]).sum())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors. Shared memory counts once."""
    storages = {
        storage._cdata: storage.nbytes()
        for tensor in tensors
        for storage in (part.untyped_storage() for part in sparse.stored(tensor))
    }
    return sum(storages.values())
