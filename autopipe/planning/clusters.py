"""The cluster of a plan: from a ``cluster.toml`` file, from options of the command line, or this machine."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

from autopipe.cores import usable_cores
from autopipe.errors import PlanError, unknown_choice
from autopipe.ir.cluster import MOST_RANKS, Cluster, ClusterDevice, Level, Links, RuntimeOverhead
from autopipe.ir.profile import Device, Profile
from autopipe.planning.cost.datasheets import datasheet, describe, device_like, on_datasheet, recognized, relative_speed
from autopipe.units import parse_bandwidth, parse_bytes, parse_seconds

# assumed until ``autopipe doctor --links`` measures them: rounded measurements of one host with CPUs, and datasheets of
# GPUs
HOST_BANDWIDTH = 2e9
HOST_LATENCY_SECONDS = 200e-6
HOST_OVERHEAD = RuntimeOverhead(
    compute_seconds=100e-6,
    send_seconds=100e-6,
    send_seconds_per_byte=2e-9,
    receive_seconds=100e-6,
    step_seconds=4e-3,
    delivery_seconds=1.5e-3,
)
GPU_BANDWIDTH = 16e9  # between GPUs without a datasheet, over PCIe 4.0 x16
NO_PEER_BANDWIDTH = 8e9  # between GPUs of one host that cannot access each other's memory
GPU_LATENCY_SECONDS = 10e-6
LINK_SHARE = 0.5  # of the datasheet's bandwidth that messages reach
GPUS_PER_HOST = 8  # of hosts that are not known
NETWORK_BANDWIDTH = 10e9  # between hosts with GPUs: 80 % of 100 Gbit/s
NETWORK_LATENCY_SECONDS = 30e-6
ASSUMED_HOSTS = "hosts (assumed)"  # the name of their level
GPU_CONTEXT_BYTES, GPU_GAPS = 2**30, 0.08  # see usable_gpu_bytes
LINK_LATENCY_SECONDS = 20e-6
# the newest estimates: (profile, name of the datasheet, estimate). What searches keep is kept for the same object
_ESTIMATED: list[tuple[Profile, str, Profile]] = []
_MOST_ESTIMATED = 2

_REMEDY = "correct the file; the command reference (docs/cli.md) shows a whole one"
_SOURCES = ("datasheet", "measured")


def cluster_of_figures(
    num_ranks: int,
    profile: Profile,
    memory_bytes: int | None,
    link: float | None,
    device_name: str | None = None,
    links: Links | None = None,
) -> Cluster:
    """Return a cluster from ``--gpu-memory`` (bytes), ``--link`` (bytes per second) and ``--device-name``.

    What is None is as on this machine.

    Raises: PlanError if the name of the device is unknown.
    """
    if device_name is not None:
        sheet = datasheet(device_name)
        device = ClusterDevice(sheet.name, memory_bytes or sheet.memory_bytes, datasheet=sheet.name)
        inner = Level("assumed", 1, LINK_SHARE * sheet.link_bandwidth, GPU_LATENCY_SECONDS)
        levels = _with_hosts(inner, num_ranks, GPUS_PER_HOST)
        if link is not None:
            levels = (Level("link", num_ranks, link, LINK_LATENCY_SECONDS),)
        return by_datasheet(Cluster(levels, (device,), "command line"), profile)
    here = this_machine(num_ranks, profile.device, links)
    levels, device, cores = here.levels, here.devices[0], here.cores
    if link is not None:  # between devices of other hosts
        levels, cores = (Level("link", num_ranks, link, LINK_LATENCY_SECONDS),), 0.0
    if memory_bytes is not None:
        device = dataclasses.replace(device, memory_bytes=memory_bytes)
    return Cluster(levels, (device,), "command line", here.host, cores=cores)


def by_datasheet(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with the speeds of its devices from their datasheets, and a ``source`` that explains them.

    Speeds are relative to the profiled device if it has a datasheet. Otherwise they are relative to the cluster's first
    device, for which ``with_estimated_times`` estimates the profile.

    Raises: PlanError if only some of the devices have a datasheet.
    """
    named = [device.datasheet for device in cluster.devices if device.datasheet]
    if not named:
        return cluster
    if len(named) < len(cluster.devices):
        raise PlanError(
            "some devices of the cluster have a datasheet and others a speed: they cannot be compared",
            remedy="give every [[device]] a datasheet, or every one a speed",
        )
    precision, profiled = precision_of(profile), recognized(profile.device.name)
    reference = profiled or datasheet(named[0])
    devices = []
    for device in cluster.devices:
        scaled = device_like(reference.name, device.datasheet, precision)
        devices.append(
            dataclasses.replace(
                device,
                speed=scaled.speed,
                memory_speed=scaled.memory_speed,
                host_bandwidth=device.host_bandwidth or scaled.host_bandwidth,
            )
        )
    if profiled is None:
        source = describe(reference, precision, profile.device.name)
    else:
        source = relative_speed(reference.name, named[0], precision).note
    return dataclasses.replace(cluster, devices=tuple(devices), source=source)


def with_estimated_times(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile to whose times the speeds of the cluster are relative.

    This is the profile itself, unless the cluster's devices have datasheets and the profiled device has none. Then its
    times are estimated from the operations and bytes of its nodes.

    Raises: PlanError if the profile does not contain them.
    """
    first = cluster.devices[0].datasheet
    if not first or recognized(profile.device.name) is not None:
        return profile
    name = datasheet(first).name
    for counted, known, estimated in _ESTIMATED:
        if counted is profile and known == name:
            return estimated
    estimated = on_datasheet(profile, datasheet(first), precision_of(profile))
    _ESTIMATED[:] = [*_ESTIMATED, (profile, name, estimated)][-_MOST_ESTIMATED:]
    return estimated


def precision_of(profile: Profile) -> str:
    """Return the precision of the arithmetic: autocast's, or that of most of the bytes of the parameters."""
    if profile.workload.precision != "fp32":
        return profile.workload.precision
    sizes: dict[str, int] = {}
    for spec in profile.graph.parameters.values():
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes({})
    most = max(sizes, key=lambda name: sizes[name], default="float32")
    return {"float16": "fp16", "bfloat16": "bf16"}.get(most, "fp32")


def usable_gpu_bytes(total: int) -> int:
    """Return how much of a GPU's memory a plan may use.

    Taken off are 1 GiB for the CUDA context, cuBLAS and the communicators of NCCL, and 8 % for the gaps that torch's
    allocator leaves between its blocks. Both are assumptions; ``--gpu-memory`` gives another limit.
    """
    return max(round(total * (1 - GPU_GAPS)) - GPU_CONTEXT_BYTES, 1)  # 0 would be no limit


def this_machine(num_ranks: int, device: Device, links: Links | None = None) -> Cluster:
    """Return this machine as a cluster. ``links``: their measurements; None: an assumption is used.

    CPU ranks share the available memory and the cores. On GPUs, each has ``usable_gpu_bytes`` of the profiled device,
    and further ranks are on hosts with as many GPUs as this one.
    """
    per_host, cores = num_ranks, 0.0
    if device.kind == "cuda":
        per_host = device.per_host or GPUS_PER_HOST
        level = Level("gpus of one host", 1, gpu_bandwidth(device), GPU_LATENCY_SECONDS)
        local = ClusterDevice(device.name, usable_gpu_bytes(device.memory_bytes), host_bandwidth=_to_host(device.name))
        host = RuntimeOverhead()
    else:
        import psutil

        level = Level("host", 1, HOST_BANDWIDTH, HOST_LATENCY_SECONDS)
        local, host = ClusterDevice(device.name, psutil.virtual_memory().available // num_ranks), HOST_OVERHEAD
        cores = _ranks_at_a_time(num_ranks, device.threads)
    if links is not None and links.device_kind == device.kind:
        levels = _with_hosts(links.level(1), num_ranks, per_host, links.across)
        local = dataclasses.replace(local, host_bandwidth=links.host_bandwidth or local.host_bandwidth)
        return Cluster(levels, (local,), "measured", links.host, cores=cores)
    return Cluster(_with_hosts(level, num_ranks, per_host), (local,), "assumed", host, cores=cores)


def _ranks_at_a_time(num_ranks: int, threads: int) -> float:
    """Return how many ranks of this machine can compute at a time, each with its threads; 0: all.

    One rank alone takes the measured times, whether it has a core for each of its threads or not.
    """
    ranks = max(usable_cores() / threads, 1.0)
    return 0.0 if num_ranks <= ranks else ranks


def gpu_bandwidth(device: Device) -> float:
    """Return the bytes per second that are assumed between two GPUs of a host.

    That is a part of the datasheet's figure. GPUs on PCIe have the names of those with NVLink, and other links. Without
    peer access, messages go through host memory.
    """
    if not device.peer_access:
        return NO_PEER_BANDWIDTH
    try:
        sheet = recognized(device.name)
    except PlanError:  # the name fits several; their links may differ
        sheet = None
    on_pcie = "pcie" in device.name.lower()
    return GPU_BANDWIDTH if sheet is None or on_pcie else LINK_SHARE * sheet.link_bandwidth


def _to_host(name: str) -> float:
    """Return the bandwidth between a GPU and its host by its datasheet; 0 without one."""
    try:
        sheet = recognized(name)
    except PlanError:  # the name fits several
        return 0.0
    return 0.0 if sheet is None else sheet.host_bandwidth


def _with_hosts(inner: Level, num_ranks: int, per_host: int, across: Level | None = None) -> tuple[Level, ...]:
    """Return the levels of ranks on hosts of at most ``per_host``.

    ``inner``, ``across``: the links within a host and between two; None: an assumption is used.

    All hosts have the same number of ranks, the largest one possible.
    """
    width = next(count for count in range(min(per_host, num_ranks), 0, -1) if num_ranks % count == 0)
    levels = (dataclasses.replace(inner, count=width),)
    if width == num_ranks:
        return levels
    across = across or Level(ASSUMED_HOSTS, 1, NETWORK_BANDWIDTH, NETWORK_LATENCY_SECONDS)
    return *levels, dataclasses.replace(across, count=num_ranks // width)


def uniform_cluster(num_ranks: int, *, memory: str = "", link: str = "10GB/s", latency: str = "5us") -> Cluster:
    """Return a cluster of equal devices and links. ``memory``, ``link``, ``latency``: quantities as a user types them.

    Raises: PlanError for an invalid quantity.
    """
    device = ClusterDevice("device", parse_bytes(memory) if memory else 0)
    level = Level("link", num_ranks, parse_bandwidth(link), parse_seconds(latency))
    return Cluster((level,), (device,), f"options: {num_ranks} ranks, {memory or 'no memory limit'}, {link}")


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes.

    ``[device]`` describes all ranks. Each ``[[device]]`` describes the next ``count`` ranks.

    Raises: PlanError naming the file and the key if one is missing, unknown or of the wrong type.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path.name} cannot be read: {error}", where=str(path), remedy=_REMEDY) from None
    except (ValueError, RecursionError) as error:  # ValueError: numbers and dates that Python rejects
        raise PlanError(f"{path.name} is not TOML: {error}", where=str(path), remedy=_REMEDY) from None
    return parse_cluster(document, str(path))


def parse_cluster(document: dict[str, Any], where: str) -> Cluster:
    """Return the cluster of a TOML document; see ``read_cluster``."""
    try:
        return _cluster(document, where)
    except PlanError as error:
        raise PlanError(error.what, where=error.where or where, remedy=error.remedy or _REMEDY) from None
    except ValueError as error:  # from the checks of the data types
        raise PlanError(str(error), where=where, remedy=_REMEDY) from None


def _cluster(document: dict[str, Any], where: str) -> Cluster:
    _only_keys(document, {"source", "device", "level"}, where)
    levels = document.get("level", [])
    devices = document.get("device", {})
    if not isinstance(devices, (dict, list)):
        raise PlanError(f"device is {devices!r}; it must be a table", where=where, remedy="write it below [device]")
    if not isinstance(levels, list) or not levels:
        raise PlanError(
            "there is no [[level]]", where=where, remedy="add one [[level]] per kind of link, innermost first"
        )
    parsed = tuple(_level(entry, f"{where}: level {index}") for index, entry in enumerate(levels))
    num_ranks = math.prod(level.count for level in parsed)
    source = document.get("source", "given")
    if "source" in document and source not in _SOURCES:
        raise PlanError(unknown_choice("source", str(source), _SOURCES), where=where)
    if isinstance(devices, dict):
        return Cluster(parsed, (_device(devices, f"{where}: device"),), source)
    listed: list[tuple[ClusterDevice, int]] = []
    for index, entry in enumerate(devices):
        place = f"{where}: device {index}"
        listed.append((_device(entry, place), _whole(entry, "count", place, 1)))
    described = sum(count for _, count in listed)
    if described != num_ranks:
        counts = " x ".join(str(level.count) for level in parsed)
        raise PlanError(
            f"[[device]] describes {described} ranks, but the levels have {counts} = {num_ranks}",
            where=where,
            remedy="give one [device] for all, or counts that add up",
        )
    return Cluster(parsed, tuple(device for device, count in listed for _ in range(count)), source)


def _level(entry: Any, where: str) -> Level:
    _only_keys(entry, {"name", "count", "bandwidth", "latency"}, where)
    if "bandwidth" not in entry or "count" not in entry:
        missing = "count" if "count" not in entry else "bandwidth"
        raise PlanError(f"{missing} is missing", where=where, remedy='write count = 4 and bandwidth = "10GB/s"')
    bandwidth = parse_bandwidth(entry["bandwidth"], where=f"{where}.bandwidth")
    latency = parse_seconds(_text(entry, "latency", where, "0s"), where=f"{where}.latency")
    return Level(_text(entry, "name", where, "level"), _whole(entry, "count", where, 1), bandwidth, latency)


def _device(entry: Any, where: str) -> ClusterDevice:
    _only_keys(entry, {"name", "memory", "speed", "memory_speed", "host_bandwidth", "count", "datasheet"}, where)
    memory = parse_bytes(entry["memory"], where=f"{where}.memory") if "memory" in entry else 0
    to_host = 0.0
    if "host_bandwidth" in entry:
        to_host = parse_bandwidth(entry["host_bandwidth"], where=f"{where}.host_bandwidth")
    if "datasheet" in entry:
        rates = [key for key in ("speed", "memory_speed") if key in entry]
        if rates:
            raise PlanError(
                f"datasheet and {rates[0]} exclude each other: the datasheet contains the speed of the device",
                where=where,
                remedy="leave one of them out",
            )
        sheet = datasheet(_text(entry, "datasheet", where, ""))
        name = _text(entry, "name", where, sheet.name)
        return ClusterDevice(name, memory or sheet.memory_bytes, host_bandwidth=to_host, datasheet=sheet.name)
    speed = _speed(entry, "speed", where, 1.0)
    name, memory_speed = _text(entry, "name", where, "device"), _speed(entry, "memory_speed", where, 0.0)
    return ClusterDevice(name, memory, speed, memory_speed, host_bandwidth=to_host)


def _speed(entry: Any, key: str, where: str, default: float) -> float:
    """Return a speed relative to the profiled device's, or ``default`` where none is given. Raises: PlanError."""
    speed = entry.get(key)
    if speed is None:
        return default
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < math.inf:
        raise PlanError(f"{key} is {speed!r}; it must be a number larger than 0", where=where)
    return float(speed)


def _only_keys(entry: Any, known: set[str], where: str) -> None:
    if not isinstance(entry, dict):
        raise PlanError(f"expected a table, got {entry!r}", where=where)
    for key in entry:
        if key not in known:
            raise PlanError(unknown_choice("key", key, known), where=where)


def _text(entry: dict[str, Any], key: str, where: str, default: str) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str):
        raise PlanError(f"{key} is {value!r}; it must be a string in quotes", where=where)
    return value


def _whole(entry: dict[str, Any], key: str, where: str, default: int) -> int:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{key} is {value!r}; it must be a whole number of at least 1", where=where)
    if value > MOST_RANKS:
        raise PlanError(f"{key} is more than {MOST_RANKS}", where=where)
    return value
