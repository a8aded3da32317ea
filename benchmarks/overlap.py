"""How well the copies of spilled execution overlap with computation, where both sleep.

The lanes and the ``Spiller`` are those of a run; copies and instructions take given times. For several ratios of the
two, a step is compared with the longer one of computation and copies of every stage. ``benchmarks/spilled.py`` writes
the results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from autopipe.ir.schedule import COPIES, Op, ScheduleSpec
from autopipe.runtime.spilling.copies import Pair, ThreadLane
from autopipe.runtime.spilling.spiller import Spiller
from autopipe.runtime.spilling.stage_memory import SpilledPart
from autopipe.schedules import make

STAGES, MICROBATCHES, MINIBATCHES = 12, 4, 3
UNIT = 0.01  # seconds of a forward
FLOATS = 1024
RATIOS = (0.5, 2.0, 4.0, 8.0)


def efficiency(load: float) -> float:
    """Return ideal over measured seconds of a step. ``load``: seconds of one copy of a stage's weights, in forwards.

    A backward with its recompute takes three forwards, and the optimizer state is twice as large as the weights.
    """
    seconds_per_byte = load * UNIT / (4 * FLOATS)

    def copy(pairs: Sequence[Pair]) -> None:
        time.sleep(seconds_per_byte * sum(source.nbytes for _, source in pairs))

    parameters = [nn.Parameter(torch.zeros(FLOATS)) for _ in range(STAGES)]
    slots = [[torch.zeros(2 * FLOATS)] for _ in range(STAGES)]
    parts = {s: SpilledPart(s, [parameters[s]], lambda s=s: slots[s]) for s in range(STAGES)}  # type: ignore[misc]
    spiller = Spiller(parts, torch.device("cpu"))
    spiller.to_device, spiller.to_host = ThreadLane(None, copy), ThreadLane(None, copy)
    row = make("spilled", ScheduleSpec(((0,),) * STAGES, MICROBATCHES, MINIBATCHES)).rows[0]
    seconds = {Op.FORWARD: UNIT, Op.BACKWARD: 3 * UNIT}
    ends = [0.0] * MINIBATCHES
    for i in row:
        if i.op in COPIES:
            spiller.carry_out(i)
            continue
        spiller.ready(i)
        time.sleep(seconds.get(i.op, 0.0))
        if i.op == Op.STEP:
            spiller.stepped(i.stage)
        ends[i.minibatch] = time.perf_counter()
    spiller.settle()
    spiller.close()
    ideal = STAGES * UNIT * (max(MICROBATCHES, load) + max(3 * MICROBATCHES, 3 * load))
    return ideal / (ends[-1] - ends[-2])


def rows() -> list[str]:
    """Return a row of the table for each ratio."""
    return [
        f"| {ratio / MICROBATCHES:g} | {3 * ratio / (3 * MICROBATCHES):g} | {efficiency(ratio):.2f} |"
        for ratio in RATIOS
    ]


if __name__ == "__main__":
    print("\n".join(rows()))
