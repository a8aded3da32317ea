"""The description of a host before ranks start there, and the result of a check of it.

No torch: its version is that of the installed package.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from typing import Any

import psutil

from autopipe import __version__
from autopipe.cores import usable_cores
from autopipe.units import MIB

_SMI = ("--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits")
_SMI_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check before a run, and the fix for a problem."""

    name: str
    state: str  # ok, note (nothing has to be done), or problem
    detail: str = field(metadata={"key": "found"})  # under this key in the document of ``doctor``
    fix: str = ""  # for a problem
    host: str = ""  # "": this machine


def collect(*, devices: bool) -> dict[str, Any]:
    """Return versions, memory, cores and addresses, and with ``devices`` the GPUs, which takes a moment.

    ``reached_at``, ``reached_from``: the addresses of both ends of the ssh connection, "" without one.
    """
    reached_from, reached_at = _connection(os.environ.get("SSH_CONNECTION", ""))
    return {
        "autopipe": __version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "machine": platform.machine(),
        "host_name": socket.gethostname(),
        "memory_bytes": psutil.virtual_memory().available,
        "cores": usable_cores(),
        "reached_at": reached_at,
        "reached_from": reached_from,
        "gpus": gpus() if devices else [],
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _connection(text: str) -> tuple[str, str]:
    """Return (client's address, own) from sshd's variable: client address, client port, server address, server port."""
    words = text.split()
    return (words[0].partition("%")[0], words[2].partition("%")[0]) if len(words) == 4 else ("", "")


def gpus() -> list[tuple[str, int, int]]:
    """Return (name, free bytes, bytes) of each GPU from the driver's own tool; nothing without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, *_SMI], capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    devices = []
    for line in done.stdout.splitlines():
        name, _, figures = line.partition(",")
        free, _, total = figures.partition(",")
        if free.strip().isdigit() and total.strip().isdigit():
            devices.append((name.strip(), int(free) * MIB, int(total) * MIB))
    return devices
