"""The cost of a gradient reduction: one flat sum after the last backward, or buckets that start during it.

Two replicas are processes over gloo with one thread each, on a stack of linear layers. Both methods alternate, round by
round, in the same two processes. Reports medians of the last backward of a minibatch, and of the time after it until
the sums are complete. Writes benchmarks/results/replicas.md.

Gloo reduces in threads of its own, which share the cores with the backward on a CPU: only the waiting overlaps, not the
work. A device with a copy engine gains more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autopipe.ir.messages import BUCKET_BYTES, Channel
from autopipe.runtime.step.reduction import GradientSum
from autopipe.runtime.transport.distributed import ProcessTransport, start_process_group

RESULTS = Path(__file__).resolve().parent / "results" / "replicas.md"
METHODS = ("none, only the backward", "one flat sum after it", "buckets during it")


Times = dict[str, list[tuple[float, float]]]


def rounds(rank: int, store: str, width: int, layers: int, batch: int, count: int) -> Times:
    """Measure on one rank: seconds of the backward and of the time after it, for each method, in alternating rounds."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start_process_group(dist.FileStore(store, 2), rank, 2, timeout_seconds=120)  # type: ignore[attr-defined]
    transport = ProcessTransport([Channel("control", 0, 0, 0, 1)], [(0, 1)])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    parameters = dict(model.named_parameters())
    flat = GradientSum(parameters, list(parameters), (0, 1), transport, bucket_bytes=2**62)
    buckets = GradientSum(parameters, list(parameters), (0, 1), transport)
    x = torch.randn(batch, width)
    times: Times = {method: [] for method in METHODS}
    for index in range(count * len(METHODS)):
        method = METHODS[index % len(METHODS)]
        loss = model(x).square().mean()
        transport.barrier()
        start = time.perf_counter()
        with buckets.watching(parameters) if method == METHODS[2] else contextlib.nullcontext():
            loss.backward()
        middle = time.perf_counter()
        if method != METHODS[0]:
            reduction = buckets if method == METHODS[2] else flat
            reduction.start(parameters)
            reduction.finish()
        if index >= len(METHODS):  # the first round of each is the warm-up
            times[method].append((middle - start, time.perf_counter() - middle))
        for parameter in parameters.values():
            parameter.grad = None
    transport.close()
    return times


def measured(arguments: Sequence[str]) -> Times:
    """Start two ranks, and return the times of the slower one in each round."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, __file__, "--store", store, *arguments]
        ranks = [subprocess.Popen([*command, "--rank", str(r)], stdout=subprocess.PIPE, text=True) for r in (0, 1)]
        try:
            answers = [json.loads(process.communicate(timeout=900)[0]) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    return {name: [max(pair, key=sum) for pair in zip(*(a[name] for a in answers), strict=True)] for name in METHODS}


def main() -> None:
    """Run the measurements, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--store", default="")
    options = parser.parse_args()
    if options.rank >= 0:
        figures = options.width, options.layers, options.batch, options.rounds
        print(json.dumps(rounds(options.rank, options.store, *figures)))
        return
    names = "width", "layers", "batch", "rounds"
    times = measured([text for name in names for text in (f"--{name}", str(getattr(options, name)))])
    megabytes = options.layers * (options.width + 1) * options.width * 4 / 1e6
    lines = [
        "# Reducing the gradients of two replicas",
        "",
        f"{options.layers} linear layers of width {options.width} ({megabytes:.0f} MB of gradients), {options.batch}",
        "samples per microbatch, gloo, one thread per rank; medians of",
        f"{options.rounds - 1} interleaved rounds, buckets of {BUCKET_BYTES / 2**20:.0f} MiB.",
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, CPU.",
        "",
        "| reduction | last backward, s | after it, s | both, s | both, quartiles |",
        "|---|---|---|---|---|",
    ]
    for method in METHODS:
        backward, after = (statistics.median(seconds) for seconds in zip(*times[method], strict=True))
        low, middle, high = statistics.quantiles([sum(pair) for pair in times[method]], n=4)
        lines.append(f"| {method} | {backward:.3f} | {after:.3f} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    print("\n".join(lines))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
