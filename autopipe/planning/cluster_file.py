"""Clusters from options, and from a ``cluster.toml`` file."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

from autopipe.errors import PlanError, unknown_choice
from autopipe.ir.cluster import MOST_RANKS, Cluster, ClusterDevice, Level
from autopipe.planning.cost.datasheets import datasheet
from autopipe.units import parse_bandwidth, parse_bytes, parse_seconds

_REMEDY = "correct the file; the command reference (docs/cli.md) shows a whole one"
SOURCES = ("datasheet", "measured")


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
    if "source" in document and source not in SOURCES:
        raise PlanError(unknown_choice("source", str(source), SOURCES), where=where)
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
