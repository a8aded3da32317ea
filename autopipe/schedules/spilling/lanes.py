"""The two lanes between the host and a device, in a simulation: one to the device, one to the host.

A lane makes its copies in the order of the row. Weights go to one of the slabs, after what was there has been written
to the host, and optimizer state likewise to slabs of its own. A stage gives its weights back first, because the next
stage that is brought waits for their slab. A slab keeps its contents when its stage is given back: if they are still
those of the host when the stage is brought again, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.schedule import COMPUTE, Instruction, Op
from autopipe.schedules.costs import SpillCosts
from autopipe.schedules.spilling.spill import SLABS

Key = tuple[int, int, int]


class Lanes:
    """The lanes of one rank. ``costs``: of each stage; () if copies cost nothing."""

    def __init__(self, costs: Sequence[SpillCosts], optimizer_slabs: int = SLABS) -> None:
        self.busy = [0.0, 0.0]  # seconds of copies so far: to the device, to the host
        self._costs = costs
        self._to_device = self._to_host = 0.0  # when each lane is free
        self._slabs = Slabs()
        self._free_at = [0.0] * SLABS  # when the contents of each slab have been written to the host
        self._optimizer_free_at = [0.0] * optimizer_slabs
        self._optimizer_slab: dict[int, int] = {}  # stage -> slab
        self._next_slab = 0
        self._written: dict[int, float] = {}  # when what a stage gave back is on the host
        self._weights: dict[int, float] = {}  # when the weights of a stage are there
        self._optimizer: dict[int, float] = {}
        self._messages: dict[Key, float] = {}  # when the messages of a microbatch are there
        self._stored: dict[Key, float] = {}  # when the last messages of a microbatch are on the host
        self._gradients: set[int] = set()  # the stages whose gradients are on the device
        self._forward_done: set[Key] = set()
        self._backward_done: set[Key] = set()
        self._on_host: set[int] = set()  # the stages whose gradients wait on the host

    def ready(self, i: Instruction, now: float) -> float:
        """Return when an instruction that computes or steps can begin, and note that it runs."""
        key = i.stage, i.minibatch, i.microbatch
        if i.op in COMPUTE:
            now = max(now, self._weights.get(i.stage, 0.0), self._messages.get(key, 0.0))
            if i.op == Op.FORWARD:
                self._forward_done.add(key)
            else:
                self._backward_done.add(key)
                self._gradients.add(i.stage)
        elif i.op == Op.STEP:
            there = max(self._weights.get(i.stage, 0.0), self._optimizer.get(i.stage, 0.0))
            now = max(now, there, self._written.get(i.stage, 0.0))
            self._gradients.discard(i.stage)
            self._on_host.discard(i.stage)
            self._slabs.change(i.stage)
        return now

    def copy(self, i: Instruction, now: float) -> tuple[float, float]:
        """Return the begin and end of a copy that the rank requests ``now``."""
        costs = self._costs[i.stage] if self._costs else SpillCosts()
        if i.microbatch >= 0:
            return self._copy_messages(i, now, costs)
        if i.op == Op.LOAD:
            slab, cached = self._slabs.take(i.stage)
            seconds = (0.0 if cached else costs.weights) + (costs.gradients if i.stage in self._on_host else 0.0)
            written = 0.0 if cached else max(self._free_at[slab], self._written.get(i.stage, 0.0))
            begin, end = self._bring(max(now, written), seconds)
            self._weights[i.stage] = end
        elif i.op == Op.LOAD_OPTIMIZER:
            self._next_slab = slab = (self._next_slab + 1) % len(self._optimizer_free_at)
            self._optimizer_slab[i.stage] = slab
            written = max(self._optimizer_free_at[slab], self._written.get(i.stage, 0.0))
            begin, end = self._bring(max(now, written), costs.optimizer)
            self._optimizer[i.stage] = end
        else:
            slab, changed = self._slabs.give_back(i.stage)
            begin, end = self._store(now, costs.weights if changed else 0.0)
            self._free_at[slab] = end
            optimizer_slab = self._optimizer_slab.pop(i.stage, None)
            if optimizer_slab is not None:
                _, end = self._store(now, costs.optimizer)
                self._optimizer_free_at[optimizer_slab] = end
            if i.stage in self._gradients:
                self._gradients.discard(i.stage)
                self._on_host.add(i.stage)
                _, end = self._store(now, costs.gradients)
            self._written[i.stage] = end
        return begin, end

    def _copy_messages(self, i: Instruction, now: float, costs: SpillCosts) -> tuple[float, float]:
        key = i.stage, i.minibatch, i.microbatch
        if i.op == Op.LOAD:
            behind = key in self._forward_done
            stored = self._stored.get((-1, i.minibatch, i.microbatch), 0.0)
            seconds = costs.activations_in + (costs.gradients_in if behind else 0.0)
            begin, end = self._bring(max(now, stored), seconds)
            self._messages[key] = end
        else:
            seconds = costs.gradients_out if key in self._backward_done else costs.activations_out
            begin, end = self._store(now, seconds)
            self._stored[-1, i.minibatch, i.microbatch] = end
        return begin, end

    def _bring(self, earliest: float, seconds: float) -> tuple[float, float]:
        self.busy[0] += seconds
        begin = max(earliest, self._to_device) if seconds else earliest
        self._to_device = max(self._to_device, begin + seconds)
        return begin, begin + seconds

    def _store(self, earliest: float, seconds: float) -> tuple[float, float]:
        self.busy[1] += seconds
        begin = max(earliest, self._to_host) if seconds else earliest
        self._to_host = max(self._to_host, begin + seconds)
        return begin, begin + seconds


class Slabs:
    """Which stage's weights each slab contains, and which stages are there. The runtime assigns slabs by it, too."""

    def __init__(self) -> None:
        self._contents: list[int] = [-1] * SLABS
        self._taken: dict[int, int] = {}  # stage -> slab
        self._changed: set[int] = set()

    def take(self, stage: int) -> tuple[int, bool]:
        """Return the slab for a stage that is brought, and whether it contains the stage's weights already."""
        if stage in self._contents:
            slab = self._contents.index(stage)
            self._taken[stage] = slab
            return slab, True
        slab = next(k for k in range(SLABS) if k not in self._taken.values())
        self._taken[stage] = slab
        self._contents[slab] = stage
        return slab, False

    def change(self, stage: int) -> None:
        """Note that the weights of a stage on the device differ from those on the host."""
        self._changed.add(stage)

    def give_back(self, stage: int) -> tuple[int, bool]:
        """Free the slab of a stage. Return it, and whether its contents must be written to the host."""
        changed = stage in self._changed
        self._changed.discard(stage)
        return self._taken.pop(stage), changed

    def is_taken(self, stage: int) -> bool:
        """Return whether a stage is on the device."""
        return stage in self._taken

    def forget(self, stage: int) -> None:
        """Note that the weights of a stage on the host have changed: a slab must not be reused for them."""
        if stage not in self._taken and stage in self._contents:
            self._contents[self._contents.index(stage)] = -1
