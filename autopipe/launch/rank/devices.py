"""Which GPU a rank computes on, and whether the ranks can use NCCL, which allows one rank per GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import RunError, counted
from autopipe.launch.rank.numa import bind_to_device
from autopipe.launch.request import WorkerSpec
from autopipe.runtime.events import Reporter

SHARED_GPU = "AUTOPIPE_SHARED_GPU"
"""Environment variable: ``host`` lets ranks share a GPU and exchange tensors through host memory, ``nccl`` over NCCL
(versions that support it, with NCCL_MULTI_RANK_GPU_ENABLE=1)."""

_SETTINGS = {
    # waiting receives occupy fewer multiprocessors
    "NCCL_MAX_P2P_NCHANNELS": "8",
    # the communicators of two ranks each are intended
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    # gloo connects the ranks that talk, not all pairs
    "TORCH_GLOO_LAZY_INIT": "1",
    # blocks of memory grow in place, which avoids most of the fragmentation
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # the last operations of NCCL, written for torch's analyzer if one of them times out
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}

_QUEUES, _QUEUES_OF_SHARED = 32, 8
"""The most that CUDA supports, and its default. A GPU has room for a few processes with 32: 20 on an H200 did not
start, with 8 they did."""


def apply_settings(logs: Path) -> None:
    """Set the environment of a rank on a GPU, before CUDA starts. ``logs``: where NCCL's last operations are written.

    The user's environment takes precedence, except over the number of hardware queues: CUDA_DEVICE_MAX_CONNECTIONS=1,
    a frequent setting for tensor parallelism, makes a pipeline deadlock.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / "nccl-rank-"))  # torch appends the rank
    # one queue for each stream: in a shared one, a receive that waits can block the send that its peer waits for
    queues = _QUEUES_OF_SHARED if os.environ.get(SHARED_GPU) == "host" else _QUEUES
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)


def take_gpu(rank: int, local_rank: int, excluded: Sequence[int] = ()) -> int:
    """Select the GPU of a rank, and return its index. The ranks of a host take those that are not ``excluded`` in turn.

    Raises: RunError if the host has no such GPU, or CUDA cannot start on it.
    """
    usable = usable_gpus(excluded)
    if not usable:
        raise RunError(
            f"rank {rank} has no usable GPU: {counted(torch.cuda.device_count(), 'GPU')} visible, "
            f"excluded: {list(excluded) or 'none'}",
            remedy="check CUDA_VISIBLE_DEVICES and autopipe doctor on that host, or train with --device cpu",
        )
    index = usable[local_rank % len(usable)]
    try:
        torch.cuda.set_device(index)
    except RuntimeError as error:  # also torch.AcceleratorError
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"rank {rank} cannot start CUDA on GPU {index}: {reason}",
            where=f"rank {rank}: local rank {local_rank}, GPU {index}",
            remedy="see nvidia-smi for the processes of that GPU: if there are many, or they use all of its memory, "
            f"end some of them, or start fewer ranks; more ranks can share a GPU with {SHARED_GPU}=host",
        ) from error
    bind_to_device(_pci_address(index))
    return index


def usable_gpus(excluded: Sequence[int]) -> list[int]:
    """Return the indices of the GPUs that ranks may use."""
    return [index for index in range(torch.cuda.device_count()) if index not in excluded]


def choose_gpu(spec: WorkerSpec, excluded: Sequence[int], store: Any, reporter: Reporter) -> bool:
    """Select this rank's GPU, and return whether the ranks use NCCL. The ranks agree through ``store``.

    ``excluded``: the indices of GPUs that no rank may use.

    Raises: RunError if ranks share a GPU although each of them could have one, or if CUDA cannot start on it.
    """
    index, usable = take_gpu(spec.rank, spec.local_rank, excluded), usable_gpus(excluded)
    reporter.event("device", index=index, others=len(usable) - 1)
    sharing, shared = agree_on_devices(store, spec.world_size, _identity(index))
    permitted = os.environ.get(SHARED_GPU, "")
    if shared and not permitted and spec.local_world_size <= len(usable):
        raise RunError(
            f"rank {spec.rank} would share its GPU with another rank, although {counted(len(usable), 'GPU')} can be "
            f"used here, for {counted(spec.local_world_size, 'rank')}",
            where=f"rank {spec.rank}: local rank {spec.local_rank}, GPU {index}",
            remedy="let the launcher set the local rank (LOCAL_RANK, SLURM_LOCALID), or make one GPU visible to each "
            f"rank; to share GPUs on purpose, set {SHARED_GPU}=host",
        )
    use_nccl = not sharing or permitted == "nccl"
    if spec.rank == 0:
        reason = f"{sharing} of {spec.world_size} ranks share a GPU with another" if sharing else "each has its own GPU"
        reporter.event("note", text=f"ranks exchange tensors {_BY[use_nccl]}: {reason}")
    return use_nccl


_BY = {True: "over NCCL, and through host memory while kernels are loaded", False: "through host memory"}


def agree_on_devices(store: Any, world_size: int, identity: str) -> tuple[int, bool]:
    """Return how many ranks have a device of an earlier rank, and whether another rank has this rank's device.

    Every rank calls this with the identity of its device. Each makes at most seven operations on the store.
    """
    if store.add(f"device/{identity}", 1) > 1:
        store.add("devices/shared", 1)
    if store.add("devices/known", 1) == world_size:
        store.set("devices/complete", str(store.add("devices/shared", 0)))
    sharing = int(store.get("devices/complete"))
    return sharing, store.add(f"device/{identity}", 0) > 1


def _pci_address(index: int) -> str:
    """Return the address of a GPU as the kernel writes it, "" if torch does not know it."""
    properties = torch.cuda.get_device_properties(index)
    parts: list[int] = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return "" if -1 in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def _identity(index: int) -> str:
    """Return what tells a GPU from every other one of the cluster."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # of the host; the same in all of its containers
    host = boot.read_text().strip() if boot.exists() else os.uname().nodename
    properties = torch.cuda.get_device_properties(index)
    return f"{host}/{properties.uuid}"
