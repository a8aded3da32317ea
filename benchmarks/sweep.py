"""Policies of a sweep: simulated over generated mixes of jobs, and measured with processes that share a device.

The simulation is that of ``autopipe sweep --dry-run``. The measurement is of processes whose computation and copies
sleep (``benchmarks/sharing.py``). Writes benchmarks/results/sweep.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

from autopipe.sweep.simulator import WHOLE, ModelJob, bound, makespan, most_places, simulate
from benchmarks import sharing

RESULTS = Path(__file__).resolve().parent / "results" / "sweep.md"
LEASE, COST = 120.0, 10.0
SHAPES = ((4, 2), (5, 4), (8, 4), (12, 8), (16, 4), (32, 8))
DRAWS = 5
SHARD = 5.0  # seconds of the longer one of a shard's computation and copies
LIGHT = 0.2  # the shorter one, as a part of the longer one
# jobs that are compute-bound, and transfer-bound
BOUND_BY = {"compute-bound": (1, 0), "transfer-bound": (0, 1), "half of each": (1, 1)}
HYDRA = """## Hydra's published claims

Not reproduced here; as printed in the abstract of arXiv:2110.08633v7 (Nagrecha and Kumar):

- "between 50% and 100% higher training throughput than even the best settings of state-of-the-art industrial \
frameworks such as DeepSpeed and GPipe for multi-large-model training", fine-tuning GPT-2;
- "near-linear strong scaling" in multi-GPU setups;
- "even a 6-billion parameter model on a single commodity GPU".

These compare with other systems on GPUs. The tables above compare policies in one system."""


def jobs_of(count: int, lengths: str, kind: str, draw: random.Random) -> list[ModelJob]:
    """Return jobs of about an hour. ``kind``: "whole", or what bounds those whose stages take turns."""
    jobs = []
    for number in range(count):
        seconds = 3600.0 if lengths == "equal" else draw.uniform(900, 7200)
        if kind == "whole":
            jobs.append(ModelJob(number, seconds))
            continue
        computing, copying = BOUND_BY[kind]
        is_computing = number % (computing + copying) < computing
        times = (SHARD, LIGHT * SHARD) if is_computing else (LIGHT * SHARD, SHARD)
        jobs.append(ModelJob(number, *times, shards=round(seconds / SHARD), shares=True))
    return jobs


def ratios(count: int, devices: int, lengths: str, kind: str) -> Iterator[tuple[float, float, int, float, int]]:
    """Yield makespan over bound of whole jobs and of leases, preemptions, that of shards, and jobs of a device."""
    for seed in range(1 if lengths == "equal" else DRAWS):
        jobs = jobs_of(count, lengths, kind, random.Random(seed))
        least = bound(jobs, devices)
        whole = makespan(simulate(jobs, range(devices), lease=WHOLE))
        course = simulate(jobs, range(devices), lease=LEASE, cost=COST)
        leases = makespan(course)
        places = most_places(jobs, range(devices), lease=LEASE, cost=COST, most=2)
        shards = leases
        if places > 1:
            divided = [job.divided(places) for job in jobs]
            shards = makespan(simulate(divided, range(devices), lease=LEASE, places=places, cost=COST))
        yield whole / least, leases / least, len(course) - count, shards / least, places


def rows() -> list[str]:
    """Return the rows of the table."""
    lines = []
    for kind in ("whole", *BOUND_BY):
        for lengths in ("equal", "unequal"):
            for count, devices in SHAPES:
                whole, leases, moves, shards, places = zip(*ratios(count, devices, lengths, kind), strict=True)
                cells = [f"{statistics.mean(values):.3f}" for values in (whole, leases)]
                shared = "" if max(places) == 1 else f"{statistics.mean(shards):.3f}"
                name = "fits the device" if kind == "whole" else f"spilled, {kind}"
                print(name, lengths, count, devices, cells, max(leases), shared, flush=True)
                lines.append(
                    f"| {name} | {lengths} | {count} | {devices} | {cells[0]} | {cells[1]} | {max(leases):.3f} | "
                    f"{statistics.mean(moves):.1f} | {shared} |"
                )
    return lines


def main() -> None:
    """Simulate, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of the measurement")
    options = parser.parse_args()
    lines = [
        "# Policies of a sweep",
        "",
        "## Simulated",
        "",
        "Seconds until all jobs are done, over the bound max(sum / devices, longest job), in which no jobs share a "
        f"device. Jobs of one hour, or of 15 minutes to 2 hours ({DRAWS} draws). Leases of {LEASE:.0f} s; a preempted "
        f"job needs {COST:.0f} s before it continues. Shards of {SHARD:.0f} s; the shorter one of their computation "
        f"and their copies takes {LIGHT:.0%} of the longer one. Shards: two jobs share a device, where the simulation "
        "says that this is at least 5 % faster; otherwise the cell is empty. Preemptions: of leases, in a sweep.",
        "",
        "| jobs | lengths | number | devices | whole jobs, longest first | leases | the worst draw | preemptions "
        "| shards |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows(),
        "",
        *sharing.report(options.repeats),
        "",
        HYDRA,
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.",
    ]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
