"""What both builds of the simulated devices share once torch is imported."""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

_loaded: list[Any] = []


def load(library: Path) -> Any:
    """Return the library as a module, with the settings of the environment applied."""
    loader = importlib.machinery.ExtensionFileLoader(library.stem, str(library))
    spec = importlib.util.spec_from_loader(library.stem, loader)
    assert spec is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    simulated: Any = module
    _loaded.append(simulated)
    configure()
    # the thread of a device drops the objects of the last backward, for which it needs Python; else it ends the process
    atexit.register(time.sleep, 0.1)
    return simulated


def configure() -> None:
    """Apply the settings of the environment to the devices of this process."""
    for simulated in _loaded:
        simulated.set_count(int(os.environ.get("SIMULATED_DEVICES", "4")))
        for device in range(simulated.count()):
            simulated.limit(device, int(os.environ.get("SIMULATED_LIMIT", "-1")))
        for device, number in enumerate(filter(None, os.environ.get("SIMULATED_MULTIPROCESSORS", "").split(","))):
            simulated.multiprocessors(device, int(number))
        simulated.own_numbers(os.environ.get("SIMULATED_NUMBERS", "") != "cpu")


def host_recurrent(kind: str, key: str) -> torch.library.Library:
    """Run LSTM and GRU on the host, with their own autograd.

    They are composites that choose fused kernels on devices, for which the CPU has none.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in ("lstm.input", "lstm.data", "gru.input", "gru.data"):
        base, overload = name.split(".")
        library.impl(name, _hosted(getattr(getattr(torch.ops.aten, base), overload), kind), key)
    return library


def _hosted(operator: Any, kind: str) -> Any:
    class Hosted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, spec: Any, *values: Any) -> Any:
            copies = [
                value.cpu().detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
                for value in values
            ]
            with torch.enable_grad():
                results = operator(*pytree.tree_unflatten(copies, spec))
            ctx.copies, ctx.results = copies, results
            device = next(v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == kind)
            return tuple(result.detach().to(device) for result in results)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            trained = [value for value in ctx.copies if isinstance(value, torch.Tensor) and value.requires_grad]
            pairs = [
                (result, gradient.cpu())
                for result, gradient in zip(ctx.results, gradients, strict=True)
                if gradient is not None and result.requires_grad
            ]
            results, received = zip(*pairs, strict=True)
            hosted = iter(torch.autograd.grad(results, trained, received, allow_unused=True))
            device = next(gradient.device for gradient in gradients if gradient is not None)
            answers = [next(hosted) if isinstance(v, torch.Tensor) and v.requires_grad else None for v in ctx.copies]
            return None, *(answer if answer is None else answer.to(device) for answer in answers)

    def run(*arguments: Any) -> Any:
        values, spec = pytree.tree_flatten(arguments)
        return Hosted.apply(spec, *values)

    return run
