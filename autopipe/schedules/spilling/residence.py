"""Which stages of a row are on the device, for the rules of spilled stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopipe.ir.schedule import COMPUTE, Instruction, Op
from autopipe.schedules.spilling.spill import SLABS

Broken = Iterator[tuple[str, str]]
"""(rule, what is wrong)."""


class Residence:
    """The stages and messages of one rank that are on the device, instruction by instruction."""

    def __init__(self, row: Sequence[Instruction]) -> None:
        self._spilled = {i.stage for i in row if i.op == Op.LOAD}
        self._of_messages = any(i.op == Op.LOAD and i.microbatch >= 0 for i in row)
        self._loaded: set[int] = set()
        self._with_optimizer: set[int] = set()
        self._messages: set[tuple[int, int, int]] = set()

    def broken_by(self, i: Instruction) -> Broken:
        """Follow one instruction, and yield the rules that it breaks."""
        messages = i.stage, i.minibatch, i.microbatch
        if i.op == Op.LOAD and i.microbatch >= 0:
            self._messages.add(messages)
        elif i.op == Op.UNLOAD and i.microbatch >= 0:
            if messages not in self._messages:
                yield "messages-there", f"{i}: the messages of this microbatch are on the host already"
            self._messages.discard(messages)
        elif i.op == Op.LOAD:
            if i.stage in self._loaded:
                yield "resident", f"{i}: stage {i.stage} is on the device already"
            self._loaded.add(i.stage)
            if len(self._loaded) > SLABS:
                yield "two-slabs", f"{i} makes {len(self._loaded)} stages on the device; there is room for {SLABS}"
        elif i.op == Op.LOAD_OPTIMIZER:
            if i.stage not in self._loaded:
                yield "resident", f"{i}: stage {i.stage} is not on the device"
            self._with_optimizer.add(i.stage)
        elif i.op == Op.UNLOAD:
            if i.stage not in self._loaded:
                yield "resident", f"{i}: stage {i.stage} is not on the device"
            self._loaded.discard(i.stage)
            self._with_optimizer.discard(i.stage)
        elif i.stage in self._spilled and (i.op in COMPUTE or i.op == Op.STEP):
            if i.stage not in self._loaded:
                yield "resident", f"{i}: stage {i.stage} is not on the device"
            if i.op == Op.STEP and i.stage not in self._with_optimizer:
                yield "resident", f"{i}: the optimizer state of stage {i.stage} is not on the device"
            if i.op in COMPUTE and self._of_messages and messages not in self._messages:
                yield "messages-there", f"{i}: the messages of this microbatch are not on the device"

    def broken_by_end(self) -> Broken:
        """Yield the rules that the end of the row breaks."""
        if self._loaded:
            yield "resident", f"stage {min(self._loaded)} is not given back at the end"
