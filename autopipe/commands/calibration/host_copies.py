"""The bandwidth between the memory of a device and that of its host, over the lanes of spilled execution."""

from __future__ import annotations

import statistics
import time

import torch

from autopipe.ir.schedule import Instruction, Op
from autopipe.runtime.checkpoint.host_buffer import HostBuffer
from autopipe.runtime.spilling.copies import lane_of

ROUNDS = 7
WARM_UP = 2


def host_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a copy in one direction, while another one runs in the other direction.

    On a CPU, both copies are within its memory.
    """
    size = 2**28 if device.type == "cuda" else 2**25
    hosts = [HostBuffer(size, pinned=device.type == "cuda") for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    for host in hosts:
        host.bytes.zero_()
    lanes = [lane_of(device, None) for _ in range(2)]
    pairs = (there[0], hosts[0].bytes), (hosts[1].bytes, there[1])
    times = []
    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        copies = [lane.copy(Instruction(Op.LOAD, 0, 0), [pair], []) for lane, pair in zip(lanes, pairs, strict=True)]
        for copy in copies:
            copy.synchronize()
        times.append(time.perf_counter() - start)
    for lane in lanes:
        lane.close()
    return size / statistics.median(times[WARM_UP:])
