"""``DeviceBooks``: counts the memory of a device on which stages take turns, and enforces its budget.

On a CPU, the operations are counted (``measure.live``), and the budget takes the place of a device's memory. Host
memory that stages are moved to is not counted. On a CUDA device, torch's allocator counts, and enforces the budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from autopipe.errors import RunError
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Instruction, Op
from autopipe.measure.live import HostMeter, meter_of
from autopipe.runtime.events import Reporter
from autopipe.units import in_distinct_bytes


class DeviceBooks:
    """The books of one rank, with the interface of ``Footprint``.

    Args:
        device: of the rank.
        budget: bytes that it may use; 0: no limit.

    """

    def __init__(self, device: torch.device, budget: int = 0) -> None:
        self._kind, self._budget = device.type, budget
        self.owners = HostMeter(device.type)
        self._meter = self.owners if device.type == "cpu" else meter_of(device)
        self._peaks: dict[int, int] = {}
        self._weights: dict[int, int] = {}
        # the batch tensors of each microbatch of a stage in flight: address -> bytes
        self._batches: dict[tuple[int, int, int], Mapping[int, int]] = {}
        self._most_in_flight: dict[int, int] = {}

    def count(self, stage: int, buffers: Iterable[torch.Tensor], weights: int) -> None:
        """Count the buffers of a stage, which stay on the device. ``weights``: bytes of all of its parameters."""
        self.owners.owner = stage
        for tensor in buffers:
            self.owners.count(tensor)
        self._weights[stage] = weights
        self._peaks[stage] = self._most_in_flight[stage] = 0

    @contextlib.contextmanager
    def during(self, instruction: Instruction, batch: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Count the allocations of the body; see ``Footprint``. Raises: RunError above the budget."""
        stage, key = instruction.stage, (instruction.stage, instruction.minibatch, instruction.microbatch)
        if instruction.op == Op.FORWARD:
            present = [tensor for tensor in batch if tensor.device.type == self._kind]
            self._batches[key] = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in present}
            of_stage = sum(1 for other, _, _ in self._batches if other == stage)
            self._most_in_flight[stage] = max(self._most_in_flight[stage], of_stage)
        batches = {address: size for sizes in self._batches.values() for address, size in sizes.items()}
        self.owners.owner = stage
        self._meter.restart()
        yield
        used = self._meter.most() + sum(batches.values())
        self._peaks[stage] = max(self._peaks[stage], used)
        if instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHTS):
            self._batches.pop(key, None)
        if 0 < self._budget < used and self._kind == "cpu":
            texts = in_distinct_bytes(used, self._budget)
            raise RunError(
                f"stage {stage} needs {texts[0]} of the device, and its budget is {texts[1]}",
                where=f"{instruction} of rank 0",
                remedy="plan for less memory (a smaller --gpu-memory), or use a smaller --microbatch-size",
            )

    def enforce(self) -> None:
        """Let torch's allocator enforce the budget on a CUDA device, in which it takes the place of the memory."""
        if self._budget and self._kind == "cuda":
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._budget / total))

    def report_to(self, reporter: Reporter, plan: Plan) -> None:
        """Report an event for each stage, with the planned peak."""
        for fields in self.report():
            reporter.event("peak", planned_bytes=plan.stages[fields["stage"]].peak_bytes, **fields)

    def report(self) -> list[dict[str, int]]:
        """Return the fields of each stage's event; see ``Footprint``. ``bytes`` are those of the whole device."""
        return [
            {
                "stage": stage,
                "bytes": peak,
                "weight_bytes": self._weights[stage],
                "held_bytes": self.owners.held_by(stage),
                "versions": 1,
                "in_flight": self._most_in_flight[stage],
            }
            for stage, peak in self._peaks.items()
        ]
