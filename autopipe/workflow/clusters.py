"""The cluster that a plan is for: a file, two figures from the command line, or this machine."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopipe.errors import PlanError, unknown_choice
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Device
from autopipe.workflow.units import parse_bytes, parse_rate, parse_seconds

# shared memory of one host and a GPU's own links: round figures from data sheets, until they are measured
HOST_BANDWIDTH = 4e9
HOST_LATENCY_SECONDS = 100e-6
GPU_BANDWIDTH = 16e9
GPU_LATENCY_SECONDS = 10e-6
LINK_LATENCY_SECONDS = 20e-6

_DEVICE_KEYS = ("name", "memory", "speed")
_LEVEL_KEYS = ("name", "count", "bandwidth", "latency")


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises: PlanError naming the file and the key.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"there is no cluster file {path}", remedy="see docs/cli.md for its form") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path} is no TOML file: {error}", where=str(path)) from None
    try:
        return _cluster(document)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{path.name}: {what}", where=str(path), remedy="see docs/cli.md for its form") from None


def _cluster(document: Mapping[str, Any]) -> Cluster:
    _known(document, ("source", "device", "level"), "key")
    given = document.get("device", {})
    devices = given if isinstance(given, list) else [given]
    for entry in devices:
        _known(entry, _DEVICE_KEYS, "key of [device]")
    for entry in document["level"]:
        _known(entry, _LEVEL_KEYS, "key of [[level]]")
    return Cluster(
        levels=tuple(
            Level(
                str(entry["name"]),
                int(entry["count"]),
                parse_rate(entry["bandwidth"]),
                parse_seconds(entry.get("latency", "0s")),
            )
            for entry in document["level"]
        ),
        devices=tuple(
            ClusterDevice(
                str(entry.get("name", "device")),
                parse_bytes(str(entry["memory"])) if "memory" in entry else 0,
                float(entry.get("speed", 1.0)),
            )
            for entry in devices
        ),
        source=str(document.get("source", "datasheet")),
    )


def _known(table: Mapping[str, Any], keys: tuple[str, ...], kind: str) -> None:
    for key in table:
        if key not in keys:
            raise ValueError(unknown_choice(kind, key, keys))


def cluster_of_figures(num_ranks: int, device: Device, memory_bytes: int | None, link: float | None) -> Cluster:
    """Return a flat cluster from ``--gpu-memory`` and ``--link``; what is not given is as on this machine."""
    here = this_machine(num_ranks, device)
    level, found = here.levels[0], here.devices[0]
    if link is not None:
        level = Level("link", num_ranks, link, LINK_LATENCY_SECONDS)
    if memory_bytes is not None:
        found = ClusterDevice(found.name, memory_bytes)
    return Cluster((level,), (found,), "command line")


def this_machine(num_ranks: int, device: Device) -> Cluster:
    """Return this machine as a cluster: an assumption about its links, and the memory that it has now.

    On a CPU the ranks share what is available; on GPUs each has the memory of the device that was profiled.
    """
    if device.kind == "cuda":
        level = Level("gpus of one host", num_ranks, GPU_BANDWIDTH, GPU_LATENCY_SECONDS)
        return Cluster((level,), (ClusterDevice(device.name, device.memory_bytes),), "assumed")
    import psutil

    memory = psutil.virtual_memory().available // num_ranks
    level = Level("host", num_ranks, HOST_BANDWIDTH, HOST_LATENCY_SECONDS)
    return Cluster((level,), (ClusterDevice(device.name, memory),), "assumed")
