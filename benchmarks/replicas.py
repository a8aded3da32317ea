"""What a reduction adds behind the last backward: one flat sum at its end, or buckets that start within it.

Two replicas as processes over gloo, one thread each, on a stack of linear layers. Both ways take turns, round by round,
in the same two processes. Medians are quoted of the last backward of a minibatch, and of what comes behind it until the
sums are there. Writes benchmarks/results/replicas.md.

Gloo adds up in threads of its own, which on a CPU take turns with the backward for the same cores: what overlaps here
is the waiting, not the work. A device with a copy engine has more to gain.
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

from autopipe.ir.channel import Channel
from autopipe.ir.gradients import BUCKET_BYTES
from autopipe.runtime.step.reduction import GradientSum
from autopipe.runtime.transport.distributed import ProcessTransport, start_process_group

RESULTS = Path(__file__).resolve().parent / "results" / "replicas.md"
WAYS = ("none, the backward alone", "one flat sum behind it", "buckets within it")


Times = dict[str, list[tuple[float, float]]]


def rounds(rank: int, store: str, width: int, layers: int, batch: int, count: int) -> Times:
    """Measure on one rank: seconds of the backward and of what follows it, for each way, a round each in turn."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start_process_group(dist.FileStore(store, 2), rank, 2, use_nccl=False, timeout_seconds=120)  # type: ignore[attr-defined]
    transport = ProcessTransport([Channel("control", 0, 0, 0, 1)], [(0, 1)])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    parameters = dict(model.named_parameters())
    flat = GradientSum(parameters, list(parameters), (0, 1), transport, bucket_bytes=2**62)
    buckets = GradientSum(parameters, list(parameters), (0, 1), transport)
    x = torch.randn(batch, width)
    found: Times = {way: [] for way in WAYS}
    for index in range(count * len(WAYS)):
        way = WAYS[index % len(WAYS)]
        loss = model(x).square().mean()
        transport.barrier()
        start = time.perf_counter()
        with buckets.watching(parameters) if way == WAYS[2] else contextlib.nullcontext():
            loss.backward()
        middle = time.perf_counter()
        if way != WAYS[0]:
            reduction = buckets if way == WAYS[2] else flat
            reduction.start(parameters)
            reduction.finish()
        if index >= len(WAYS):  # the first round of each warms up
            found[way].append((middle - start, time.perf_counter() - middle))
        for parameter in parameters.values():
            parameter.grad = None
    transport.close()
    return found


def measured(arguments: Sequence[str]) -> Times:
    """Start two ranks and return, round by round, the seconds of the one that took longer in all."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, __file__, "--store", store, *arguments]
        ranks = [subprocess.Popen([*command, "--rank", str(r)], stdout=subprocess.PIPE, text=True) for r in (0, 1)]
        try:
            answers = [json.loads(process.communicate(timeout=900)[0]) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    return {way: [max(pair, key=sum) for pair in zip(*(a[way] for a in answers), strict=True)] for way in WAYS}


def main() -> None:
    """Measure, print, write."""
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
    found = measured([text for name in names for text in (f"--{name}", str(getattr(options, name)))])
    megabytes = options.layers * (options.width + 1) * options.width * 4 / 1e6
    lines = [
        "# Adding up the gradients of two replicas",
        "",
        f"{options.layers} linear layers of width {options.width} ({megabytes:.0f} MB of gradients), {options.batch}",
        "samples a microbatch, gloo, one thread a rank; medians of",
        f"{options.rounds - 1} interleaved rounds, buckets of {BUCKET_BYTES / 2**20:.0f} MiB.",
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, CPU.",
        "",
        "| the sum | last backward, s | behind it, s | both, s | both, quartiles |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        backward, behind = (statistics.median(times) for times in zip(*found[way], strict=True))
        low, middle, high = statistics.quantiles([sum(pair) for pair in found[way]], n=4)
        lines.append(f"| {way} | {backward:.3f} | {behind:.3f} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    print("\n".join(lines))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
