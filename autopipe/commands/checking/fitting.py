"""Where a comparison with plain training fits: the device of the ranks, else this host, else nowhere.

All stages run as threads on one device, one after another with the plain loop. So a comparison needs the memory of the
complete model, which a pipeline of several GPUs exists to divide. Its size is estimated from the plan and the profile::

    device   max(sum of the planned peaks of all ranks, the plain loop)
    plain    (1 + staleness) W + G + O + A        as in planning.cost.memory, for the complete model
    host     RUNS (steps G + 2 W + O) + 2 W       the results to compare, and the model while it is built
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopipe.commands.prepared import Prepared
from autopipe.cores import usable_cores
from autopipe.launch.rank.out_of_memory import is_out_of_memory, resident_bytes
from autopipe.measure.device import release
from autopipe.runtime.context import RunContext
from autopipe.units import in_bytes
from autopipe.verify.check import staleness
from autopipe.workload.model.size_limits import available_bytes

# runs whose results exist at a time: in stages, plain, in the plan's order, and in reverse for the noise
_RUNS = 4
# the part of the free memory that a comparison may use
_SHARE = 0.92
# on the host instead of a GPU: a cautious rate of one core in float32, and the longest wait before training
_FLOPS_PER_CORE, _MOST_SECONDS = 2e10, 300.0


@dataclass(frozen=True, slots=True)
class Need:
    """What a comparison needs, estimated."""

    # on the device of the runs, and in host memory besides
    device_bytes: int
    host_bytes: int
    # 0 if the profile did not count them
    flops: float = 0.0
    # the model uses autocast, whose dtypes are others on a CPU than the plan has for a GPU
    autocast: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a comparison runs."""

    # "": it fits nowhere
    device: str
    threads: int
    # why it is not the device of the ranks, or why it fits nowhere; else ""
    why: str = ""


def need_of(prepared: Prepared, steps: int) -> Need:
    """Estimate what a comparison of ``steps`` steps needs."""
    plan, graph, profile = prepared.plan, prepared.graph, prepared.profile
    weights, trained = graph.parameter_bytes, profile.trained_bytes
    saved = sum(cost.saved_bytes for cost in profile.at(plan.microbatch_size).costs.values())
    versions = 1 + max(staleness(RunContext.of(plan, graph)).values(), default=0)
    state = round(profile.optimizer_bytes_per_byte * trained)
    plain = versions * weights + trained + state + saved
    stages = sum(stage.peak_bytes * stage.replicas for stage in plan.stages)
    nearest = min(profile.measurements, key=lambda m: abs(m.microbatch_size - plan.microbatch_size))
    once = sum(work.forward.flops + work.backward.flops for work in nearest.work.values()) / nearest.microbatch_size
    samples = plan.microbatch_size * plan.num_microbatches * steps
    results = _RUNS * (steps * trained + 2 * weights + state) + 2 * weights
    autocast = any("autocast(" in node.context for node in graph.nodes)
    return Need(max(stages, plain), results, once * samples * _RUNS, autocast)


def place_of(prepared: Prepared, need: Need, beside: int = 0) -> Place:
    """Return where a comparison fits. ``beside``: bytes of this host's memory that its ranks take meanwhile."""
    device = prepared.profile.device
    host = int(_SHARE * available_bytes()) - beside
    on_host = need.device_bytes + need.host_bytes
    if device.kind != "cuda":
        if on_host <= host:
            return Place(device.kind, device.threads)
        return Place("", 1, _lack("of memory", on_host, host))
    free = _free_on_gpu()
    if need.device_bytes <= free and need.host_bytes <= host:
        return Place(device.kind, device.threads)
    cores = usable_cores()
    lack = _lack("on one GPU", need.device_bytes, free)
    if need.autocast:
        return Place("", 1, f"{lack}; on the CPU of this host, autocast computes in other dtypes")
    seconds = need.flops / (cores * _FLOPS_PER_CORE)
    if on_host <= host and seconds <= _MOST_SECONDS:
        return Place("cpu", cores, f"compared on the CPU of this host: the comparison needs {lack}")
    if on_host <= host:
        return Place("", 1, f"{lack}; on the CPU of this host it would take about {seconds / 60:.0f} minutes")
    return Place("", 1, f"{lack}, or {_lack('of memory on this host', on_host, host)}")


def _lack(where: str, needed: int, free: int) -> str:
    return f"about {in_bytes(needed)} {where} ({in_bytes(max(free, 0))} available)"


def _free_on_gpu() -> int:
    """Return the bytes that a comparison may use of the GPU."""
    release(torch.device("cuda"))
    return int(_SHARE * torch.cuda.mem_get_info()[0])


def not_checked(reason: str, prepared: Prepared) -> str:
    """Return the line on a comparison that was left out."""
    target = prepared.plan.workload.target
    return (
        f"not checked: {reason}. To check this code, compare a smaller configuration of the model (fewer blocks, "
        f"--arg): autopipe check {target}"
    )


def out_of_memory(error: BaseException, device: str) -> str:
    """Return "out of memory after N GiB" for an error that memory ran out, or that one caused; else ""."""
    cause: BaseException | None = error
    while cause is not None and not is_out_of_memory(cause):
        cause = cause.__cause__
    if cause is None:
        return ""
    used = torch.cuda.max_memory_allocated() if device == "cuda" else resident_bytes()
    return f"out of memory after {in_bytes(used)}"
