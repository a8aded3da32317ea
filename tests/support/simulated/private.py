"""The simulated devices as PrivateUse1, under the name ``testdev``: they show where code says "cuda" without asking."""

from __future__ import annotations

import contextlib
import types
from pathlib import Path
from typing import Any

import torch

from . import devices

NAME = "testdev"


def install(library: Path) -> None:
    """Register ``torch.testdev``."""
    torch.utils.rename_privateuse1_backend(NAME)
    simulated = devices.load(library)
    module: Any = types.ModuleType(f"torch.{NAME}")

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        number = None if device is None else torch.device(device).index
        return int(simulated.current()) if number is None else number

    def generator(device: Any = None) -> torch.Generator:
        chosen: torch.Generator = module.default_generators[index(device)]
        return chosen

    def seed_all(seed: int) -> None:
        for each in module.default_generators:
            each.manual_seed(seed)

    class Device(contextlib.ContextDecorator):
        def __init__(self, device: Any) -> None:
            self.idx = index(device)

        def __enter__(self) -> None:
            self.before = simulated.set_current(self.idx)

        def __exit__(self, *_: Any) -> None:
            simulated.set_current(self.before)

    module.simulated = simulated
    module.default_generators = tuple(simulated.default_generator(i) for i in range(simulated.count()))
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = simulated.count, simulated.current
    module.set_device = lambda device: simulated.set_current(index(device)) and None
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.init = module.empty_cache = lambda: None
    module.manual_seed = lambda seed: generator().manual_seed(seed) and None
    module.manual_seed_all = seed_all
    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state) and None
    module.synchronize = lambda device=None: None
    module.memory_allocated = lambda device=None: simulated.memory(index(device))["used"]
    module.max_memory_allocated = lambda device=None: simulated.memory(index(device))["peak"]
    module.reset_peak_memory_stats = lambda device=None: simulated.reset_peak(index(device))
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.Stream, module.Event, module.device = torch.Stream, torch.Event, Device
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    module.simulated_recurrent = devices.host_recurrent(NAME, "AutogradPrivateUse1")
