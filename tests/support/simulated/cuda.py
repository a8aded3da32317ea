"""Add to a build of torch without CUDA what its Python asks CUDA for, answered by the simulated devices."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch

from . import devices

MEMORY = 80 << 30
"""Bytes of a device without a limit."""


def install(library: Path) -> None:
    """Make ``torch.cuda`` answer for the simulated devices."""
    simulated = devices.load(library)
    cuda: Any = torch.cuda
    cuda.simulated = simulated

    class Properties:
        def __init__(self, device: int) -> None:
            memory = simulated.memory(device)
            self.name, self.major, self.minor = "simulated GPU", 9, 0
            self.multi_processor_count = memory["multiprocessors"]
            self.total_memory = memory["limit"] if memory["limit"] >= 0 else MEMORY
            # one for all: ranks then exchange tensors through host memory, as those that share a GPU do
            self.uuid, self.gcnArchName = "simulated", ""
            self.pci_bus_id = self.pci_device_id = self.pci_domain_id = 0
            self.is_integrated = self.is_multi_gpu_board = 0
            self.L2_cache_size, self.max_threads_per_multi_processor, self.warp_size = 1 << 20, 2048, 32

    class Runtime:
        cudaError = types.SimpleNamespace(success=0)

        @staticmethod
        def cudaMemGetInfo(device: int | None = None) -> tuple[int, int]:
            memory = simulated.memory(simulated.current() if device is None else device)
            total = memory["limit"] if memory["limit"] >= 0 else MEMORY
            return total - memory["used"], total

        @staticmethod
        def cudaGetErrorString(error: int) -> str:
            return str(error)

        @staticmethod
        def cudaHostRegister(*_: Any) -> int:
            return 0

    def start() -> None:
        cuda.default_generators = tuple(simulated.default_generator(i) for i in range(simulated.count()))
        cuda._get_device_properties = Properties

    def statistics(device: int) -> dict[str, Any]:
        memory = simulated.memory(device)
        used, peak = memory["used"], memory["peak"]
        kind = {"current": used, "peak": peak, "allocated": used, "freed": 0}
        nothing = dict.fromkeys(kind, 0)
        bytes_ = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
        counts = ("allocation", "segment", "active", "inactive_split")
        zeros = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
        return {
            **{name: dict.fromkeys(("all", "small_pool", "large_pool"), kind) for name in (*bytes_, *counts)},
            **dict.fromkeys(zeros, 0),
            "max_split_size": -1,
            "oversize_allocations": nothing,
            "oversize_segments": nothing,
        }

    answers = {
        "getDeviceCount": simulated.count,
        "init": start,
        "getDevice": simulated.current,
        "setDevice": lambda device: simulated.set_current(device) and None,
        "exchangeDevice": simulated.set_current,
        "maybeExchangeDevice": simulated.set_current,
        "isInBadFork": lambda: False,
        "synchronize": lambda: None,
        "memoryStats": statistics,
        "resetPeakMemoryStats": simulated.reset_peak,
        "resetAccumulatedMemoryStats": lambda device: None,
        "emptyCache": lambda: None,
        "getArchFlags": lambda: "sm_90",
        "getCompiledVersion": lambda: 12080,
        "ipc_collect": lambda: None,
        "canDeviceAccessPeer": lambda one, other: True,
        "set_sync_debug_mode": lambda mode: None,
        "get_sync_debug_mode": lambda: 0,
        "hasPrimaryContext": lambda device: True,
        "isCurrentStreamCapturing": lambda: False,
        "getCurrentStream": lambda device: (0, device, 1),
        "getDefaultStream": lambda device: (0, device, 1),
        "setStream": lambda **_: None,
        "setMemoryFraction": lambda fraction, device: None,
        "memorySnapshot": lambda *_: {"segments": []},
        "getCurrentRawStream": lambda device: 0,
        "getAllocatorBackend": lambda: "native",
    }
    for name, answer in answers.items():
        setattr(torch._C, f"_cuda_{name}", answer)
    torch._C._cudart = Runtime  # type: ignore[attr-defined]
    torch._C._CudaDeviceProperties = Properties  # type: ignore[misc,assignment]
    cuda._cudart, cuda._get_device_properties, cuda._is_in_bad_fork = Runtime, Properties, lambda: False
    # two functions: torch.compile registers a handler for each
    cuda._exchange_device = lambda device: simulated.set_current(device)
    cuda._maybe_exchange_device = lambda device: simulated.set_current(device)
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: False
    _add_streams(cuda, simulated)
    torch.version.cuda = "12.8"
    torch.backends.cuda.is_built = lambda: True
    _allow_storages()
    cuda.simulated_recurrent = devices.host_recurrent("cuda", "AutogradCUDA")
    # the seed of a `torch.manual_seed` before the first use arrives when CUDA starts
    cuda._lazy_call(lambda: None)


def _add_streams(cuda: Any, simulated: Any) -> None:
    def device_of(device: Any) -> torch.device:
        if isinstance(device, int):
            return torch.device("cuda", device)
        index = None if device is None else torch.device(device).index
        return torch.device("cuda", simulated.current() if index is None else index)

    class Stream(torch.Stream):
        cuda_stream = 0

        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
            return super().__new__(cls, device_of(device))

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return torch.Event("cuda", enable_timing=enable_timing)

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Any:
            return self.stream and self.stream.__enter__()

        def __exit__(self, *error: Any) -> Any:
            return self.stream and self.stream.__exit__(*error)

    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream = cuda.default_stream = Stream
    cuda.stream = cuda.StreamContext = StreamContext


def _allow_storages() -> None:
    create = torch.UntypedStorage.__new__

    def untyped(cls: Any, *arguments: Any, device: Any = None, **named: Any) -> Any:
        if device is None:
            return create(cls, *arguments, **named)
        if torch.device(device).type != "cuda":
            return create(cls, *arguments, device=device, **named)
        size = arguments[0] if arguments and isinstance(arguments[0], int) else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = untyped  # type: ignore[method-assign,assignment]
