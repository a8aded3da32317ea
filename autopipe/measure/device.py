"""The device to measure on: found, described, and its state restored afterwards."""

from __future__ import annotations

import contextlib
import gc
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from autopipe.draws import generators_outside_torch_restored
from autopipe.errors import ProfileError
from autopipe.ir.profile import Device


def find_device(name: str | torch.device) -> torch.device:
    """Return the device of ``auto``, ``cpu`` or ``cuda``.

    Raises: ProfileError if this machine has no such device.
    """
    if str(name) == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ProfileError(f"unknown device {str(name)!r}", remedy="give auto, cpu or cuda") from error
    if device.type == "cuda" and torch.version.cuda is None:
        raise ProfileError(
            f"torch {torch.__version__} was built without CUDA",
            remedy="use --device cpu, or install a build of torch with CUDA (autopipe doctor shows the build)",
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ProfileError(
            "CUDA finds no device on this host",
            remedy="use --device cpu, or run autopipe doctor to see what is missing",
        )
    if device.type not in ("cpu", "cuda"):
        raise ProfileError(f"cannot measure on {device.type}", remedy="give auto, cpu or cuda")
    return device


def describe_device(device: torch.device, threads: int) -> Device:
    """Return the description of a device for a profile, with its total memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        count = torch.cuda.device_count()
        if count == 1:  # a launcher may hide the others
            return Device("cuda", str(properties.name), int(properties.total_memory), threads)
        peers = all(torch.cuda.can_device_access_peer(0, other) for other in range(1, count))
        return Device("cuda", str(properties.name), int(properties.total_memory), threads, count, peers)
    return Device("cpu", _processor(), int(psutil.virtual_memory().total), threads)


def release(device: torch.device) -> None:
    """Return the memory of finished runs to a GPU, so that it counts as free, in one piece."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def available_bytes(device: torch.device) -> int:
    """Return the number of free bytes on a device, with those that torch's allocator keeps and no tensor uses."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return int(psutil.virtual_memory().available)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "cpu"


@contextlib.contextmanager
def quiet(device: torch.device, threads: int) -> Iterator[None]:
    """Use ``threads`` intra-op threads in the block; restore the threads and the random number generators after it."""
    before = torch.get_num_threads()
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), generators_outside_torch_restored():
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
