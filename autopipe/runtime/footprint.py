"""How much memory each stage really takes: what its instructions leave behind, and the most they hold meanwhile.

What is made in an instruction is its stage's, until nobody holds it any more::

    peak(stage) = max over its instructions of (held by the stage before + most in between - before)

It begins with the weights, and counts a microbatch's batch tensors from its forward to its backward. On a CUDA device
torch's allocator tells what is taken in between; on a CPU the operations are counted (``measure.live``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autopipe import sparse
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Instruction
from autopipe.measure.live import HostMeter, meter_of
from autopipe.runtime.events import Reporter
from autopipe.runtime.stage_runner import StageRunner


@dataclass(slots=True)
class _Stage:
    """Bytes of one stage. ``batches``: of the microbatches that are in flight; ``most_in_flight``: how many at once."""

    weights: int
    peak: int
    batches: dict[tuple[int, int], int] = field(default_factory=dict)
    most_in_flight: int = 0


class Footprint:
    """Keeps the books of one rank's stages while it follows its row; ``runners``: before they have run anything."""

    def __init__(self, runners: Mapping[int, StageRunner], device: torch.device) -> None:
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
        """Book what happens in here. ``batch``: the batch tensors that the instruction's microbatch brings along."""
        books = self._stages[instruction.stage]
        key = instruction.minibatch, instruction.microbatch
        if instruction.op == "F":
            books.batches[key] = sum(tensor.numel() * tensor.element_size() for tensor in batch)
            books.most_in_flight = max(books.most_in_flight, len(books.batches))
        held = self.owners.held_by(instruction.stage) + sum(books.batches.values())
        before, self.owners.owner = self._meter.now(), instruction.stage
        self._meter.restart()
        try:
            yield
        finally:
            books.peak = max(books.peak, held + self._meter.most() - before)
            if instruction.op in ("B", "W"):
                books.batches.pop(key, None)

    def tell(self, reporter: Reporter, plan: Plan) -> None:
        """Send an event for each stage, beside what was planned."""
        for books in self.report():
            reporter.event("peak", planned_bytes=plan.stages[books["stage"]].peak_bytes, **books)

    def report(self) -> list[dict[str, int]]:
        """Return for each stage what its event says: bytes at most, of one version of the weights, and held at the end.

        At the end nothing is in flight: weights of all versions, what the optimizer keeps, and running sums.
        """
        return [
            {
                "stage": index,
                "bytes": books.peak,
                "weight_bytes": books.weights,
                "held_bytes": self.owners.held_by(index),
                "versions": self._runners[index].versions.peak_versions,
                "in_flight": books.most_in_flight,
            }
            for index, books in self._stages.items()
        ]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors, memory that they share once."""
    storages = {
        storage._cdata: storage.nbytes()
        for tensor in tensors
        for storage in (part.untyped_storage() for part in sparse.stored(tensor))
    }
    return sum(storages.values())
