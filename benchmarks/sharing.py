"""Two spilled jobs that share a device, against one after the other, where computation and copies sleep.

The processes, the token and its keeper, the lanes and the ``Spiller`` are those of a run; copies and instructions take
given times. A copy has the link of its direction to itself, also among processes. ``benchmarks/sweep.py`` writes the
results.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopipe.ir.schedule import COPIES, Op, ScheduleSpec
from autopipe.runtime.spilling.copies import Pair, ThreadLane
from autopipe.runtime.spilling.spiller import Spiller
from autopipe.runtime.spilling.stage_memory import SpilledPart
from autopipe.runtime.spilling.token import DeviceToken
from autopipe.schedules import make
from autopipe.sweep.simulator import WHOLE, ModelJob, makespan, simulate
from autopipe.sweep.token_keeper import TokenKeeper

STAGES, MICROBATCHES, MINIBATCHES = 8, 4, 8
FLOATS = 1024
BACKWARD = 3  # forwards that a backward takes, with its recompute
LONG, SHORT = 0.02, 0.004  # seconds


@dataclass(frozen=True)
class Kind:
    """A job: the seconds of a stage's forward computation, and of one copy of its weights.

    The backward takes three times as long, and the weights and the optimizer state are copied with it.
    """

    name: str
    compute: float
    copy: float


COMPUTING, COPYING = Kind("compute-bound", LONG, SHORT), Kind("transfer-bound", SHORT, LONG)
MIXES = ((COMPUTING, COPYING), (COMPUTING, COMPUTING), (COPYING, COPYING))


def train(kind: Kind, address: str, minibatches: int, begin: Any, links: Sequence[Any], done: Any) -> None:
    """Follow the row of a spilled schedule, and send its spans: of computation, and of copies."""
    seconds_per_byte = kind.copy / (4 * FLOATS)
    spans: list[tuple[str, float, float]] = []

    def lane(link: Any) -> ThreadLane:
        def copy(pairs: Sequence[Pair]) -> None:
            with link:
                start = time.monotonic()
                time.sleep(seconds_per_byte * sum(source.nbytes for _, source in pairs))
                spans.append(("copy", start, time.monotonic()))

        return ThreadLane(None, copy)

    parameters = [nn.Parameter(torch.zeros(FLOATS)) for _ in range(STAGES)]
    slots = [[torch.zeros(2 * FLOATS)] for _ in range(STAGES)]
    parts = {s: SpilledPart(s, [parameters[s]], lambda s=s: slots[s]) for s in range(STAGES)}  # type: ignore[misc]
    spiller = Spiller(parts, torch.device("cpu"), token=DeviceToken(address, lambda _: None))
    spiller.to_device, spiller.to_host = lane(links[0]), lane(links[1])
    row = make("spilled", ScheduleSpec(((0,),) * STAGES, MICROBATCHES, minibatches)).rows[0]
    forward = kind.compute / MICROBATCHES
    seconds = {Op.FORWARD: forward, Op.BACKWARD: BACKWARD * forward}
    begin.wait()
    for i in row:
        if i.op in COPIES:
            spiller.carry_out(i)
            continue
        spiller.ready(i)
        start = time.monotonic()
        time.sleep(seconds.get(i.op, 0.0))
        if i.op == Op.STEP:
            spiller.stepped(i.stage)
        spans.append(("compute", start, time.monotonic()))
    spiller.settle()
    spiller.close()
    done.put((kind.name, spans))


def run(kinds: Sequence[Kind], minibatches: int = MINIBATCHES) -> tuple[float, list[list[tuple[str, float, float]]]]:
    """Run jobs that share a device; return the seconds from their common begin, and the spans of each."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="autopipe-bench-") as scratch:
        keeper = TokenKeeper(Path(scratch), lambda job: -job)
        done, begin = context.Queue(), context.Barrier(len(kinds) + 1)
        links = context.Lock(), context.Lock()
        processes = [
            context.Process(target=train, args=(kind, keeper.address(0, job), minibatches, begin, links, done))
            for job, kind in enumerate(kinds)
        ]
        for process in processes:
            process.start()
        begin.wait()
        start = time.monotonic()
        spans = [done.get()[1] for _ in processes]
        for process in processes:
            process.join()
        keeper.close()
    return max(end for own in spans for _, _, end in own) - start, spans


def predicted(kinds: Sequence[Kind], places: int) -> float:
    """Return the seconds that the simulator of sweeps predicts."""
    visits = 2 * STAGES * MINIBATCHES  # a forward and a backward; on average they take twice as long as a forward
    mean = (1 + BACKWARD) / 2
    jobs = [ModelJob(n, mean * k.compute, mean * k.copy, visits, shares=True) for n, k in enumerate(kinds)]
    return makespan(simulate(jobs, [0], lease=WHOLE, places=places))


def report(repeats: int) -> list[str]:
    """Return the lines of the results."""
    lines = [
        "## Measured: two spilled jobs on one device",
        "",
        "Processes whose computation and copies sleep; everything else is that of a run: the token and its keeper, the "
        f"lanes, the schedule. {STAGES} stages, {MINIBATCHES} minibatches; a stage's forward takes {LONG * 1e3:.0f} "
        f"ms of computation and {SHORT * 1e3:.0f} ms of copies (compute-bound) or the reverse (transfer-bound), and "
        f"its backward three times as long. A copy has the link of its direction to itself. Medians of {repeats}.",
        "",
        "| jobs | one after the other, s | alternating, s | faster | predicted |",
        "|---|---|---|---|---|",
    ]
    for kinds in MIXES:
        alone, together = [], []
        for _ in range(repeats):
            alone.append(sum(run([kind])[0] for kind in kinds))
            together.append(run(kinds)[0])
        first, second = statistics.median(alone), statistics.median(together)
        expected = predicted(kinds, 1) / predicted(kinds, 2)
        name = " + ".join(kind.name for kind in kinds)
        lines.append(f"| {name} | {first:.2f} | {second:.2f} | {first / second:.2f} | {expected:.2f} |")
    return lines


if __name__ == "__main__":
    print("\n".join(report(1)))
