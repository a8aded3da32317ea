"""Print the seconds of a forward and a backward of one sleeping layer, the median of some, in a process alone."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.speed.models.sleeping import build_model


def main(repeats: int = 30) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    model = build_model(layers=1)
    times = []
    for _ in range(repeats):
        x = torch.ones(1, 1, requires_grad=True)
        begin = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - begin)
    print(statistics.median(times[3:]))


if __name__ == "__main__":
    main()
