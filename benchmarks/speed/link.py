"""Measure gloo between two processes: seconds of a message as a latency and a bandwidth."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.speed.running import execute

SMALL, LARGE, REPEATS = 1, 2**20, 40


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks."""

    latency: float  # seconds
    bandwidth: float  # bytes per second

    def numbers(self, seconds: float) -> int:
        """Return how many float32 numbers a message takes that long."""
        return max(int((seconds - self.latency) * self.bandwidth / 4), 1)


def measured(folder: Path) -> Link:
    """Return the link between two processes of this machine."""
    answer = json.loads(execute([sys.executable, "-m", "benchmarks.speed.link"], folder))
    return Link(*answer)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    seconds = []
    for size in (SMALL, LARGE):
        message, times = torch.zeros(size), []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            for turn in (0, 1):
                dist.send(message, 1 - rank) if rank == turn else dist.recv(message, 1 - rank)
            times.append((time.perf_counter() - begin) / 2)
        # another program on the machine lengthens some of them
        seconds.append(statistics.quantiles(times[REPEATS // 4 :], n=4)[0])
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps([seconds[0], 4 * LARGE / max(seconds[1] - seconds[0], 1e-9)]), flush=True)


def main() -> None:
    """Print the latency and the bandwidth as JSON."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
