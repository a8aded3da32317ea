"""How much memory each stage really takes: what its instructions leave behind, and the most they hold meanwhile.

A rank follows its row one instruction at a time. What a device holds before and behind an instruction, and at most in
between, is therefore the stage's whose instruction it is::

    held(stage) += behind - before            peak(stage) = max(held(stage) + most in between - before)

It begins with the weights, and counts a microbatch's batch tensors from its forward to its backward. On a CUDA device
torch's allocator tells; on a CPU nothing does, so every operation is looked at for memory that it makes, which is
forgotten when it goes. What a kernel needs only while it runs is not seen there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Instruction
from autopipe.runtime.events import Reporter
from autopipe.runtime.stage_runner import StageRunner


class Meter(Protocol):
    """Tells how many bytes a rank's device holds. Within ``with`` it watches."""

    def __enter__(self) -> Any:
        """Begin to watch."""

    def __exit__(self, *error: Any) -> Any:
        """Stop watching."""

    def now(self) -> int:
        """Return the bytes that are held."""

    def restart(self) -> None:
        """Forget the most."""

    def most(self) -> int:
        """Return the most bytes that were held since ``restart``."""


class HostMeter(TorchDispatchMode):
    """Counts the memory of every tensor that an operation of this thread makes, for as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation for it
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._now = self._most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory, once, however many tensors share it."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return

        def gone(_: object) -> None:
            self._now -= size
            del self._held[key]

        self._held[key] = weakref.ref(storage, gone)
        self._now += size
        self._most = max(self._most, self._now)

    def now(self) -> int:
        """Return the bytes that are held."""
        return self._now

    def restart(self) -> None:
        """Forget the most."""
        self._most = self._now

    def most(self) -> int:
        """Return the most since then."""
        return self._most


class CudaMeter:
    """Asks torch's allocator, which knows every byte that tensors and kernels take on the device."""

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was begun."""

    def count(self, tensor: torch.Tensor) -> None:
        """The allocator has counted it."""

    def now(self) -> int:
        """Return the bytes that are held."""
        return torch.cuda.memory_allocated()

    def restart(self) -> None:
        """Forget the most."""
        torch.cuda.reset_peak_memory_stats()

    def most(self) -> int:
        """Return the most since then."""
        return torch.cuda.max_memory_allocated()


@dataclass(slots=True)
class _Stage:
    """Bytes of one stage. ``batches``: of the microbatches that are in flight; ``most_in_flight``: how many at once."""

    weights: int
    held: int
    peak: int
    batches: dict[tuple[int, int], int] = field(default_factory=dict)
    most_in_flight: int = 0


class Footprint:
    """Keeps the books of one rank's stages while it follows its row; ``runners``: before they have run anything."""

    def __init__(self, runners: Mapping[int, StageRunner], device: torch.device) -> None:
        meter = CudaMeter() if device.type == "cuda" else HostMeter()
        self.meter: Meter = meter
        self._runners = runners
        self._stages: dict[int, _Stage] = {}
        for index, runner in runners.items():
            tensors = [*runner.versions.masters.values(), *runner.stage.buffers()]
            for tensor in tensors:
                meter.count(tensor)
            size = _bytes(tensors)
            self._stages[index] = _Stage(size, size, size)

    @contextlib.contextmanager
    def during(self, instruction: Instruction, batch: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Book what happens in here. ``batch``: the batch tensors that the instruction's microbatch brings along."""
        books = self._stages[instruction.stage]
        key = instruction.minibatch, instruction.microbatch
        if instruction.op == "F":
            books.batches[key] = sum(tensor.numel() * tensor.element_size() for tensor in batch)
            books.held += books.batches[key]
            books.most_in_flight = max(books.most_in_flight, len(books.batches))
        before = self.meter.now()
        self.meter.restart()
        try:
            yield
        finally:
            books.peak = max(books.peak, books.held + self.meter.most() - before)
            books.held += self.meter.now() - before
            if instruction.op in ("B", "W"):
                books.held -= books.batches.pop(key, 0)

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
                "held_bytes": books.held,
                "versions": self._runners[index].versions.peak_versions,
                "in_flight": books.most_in_flight,
            }
            for index, books in self._stages.items()
        ]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors, memory that they share once."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
