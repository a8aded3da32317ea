"""Build a model without memory for its parameters, whose values are loaded from a file afterwards.

Each parameter is allocated and then replaced by one on the ``meta`` device, so that at most the parameters of one
module exist at a time. Buffers stay real: the build computes tables and masks, and files do not contain non-persistent
buffers.

The initialization of a parameter on ``meta`` draws no random numbers, so a *random* buffer differs from that of a real
build. ``shifted`` reveals such buffers: it draws extra numbers with every parameter, and only they change.

Source: the idea of ``init_empty_weights`` of Hugging Face accelerate. Unlike there, tied parameters stay tied.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary


@contextlib.contextmanager
def parameters_without_memory(*, shifted: bool = False) -> Iterator[None]:
    """Register every parameter of modules of this thread on the ``meta`` device.

    One thread at a time may be in the block; other threads are not affected.
    """
    register = nn.Module.register_parameter
    replaced = WeakTensorKeyDictionary()
    builder = threading.get_ident()

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        other_thread = threading.get_ident() != builder
        if other_thread or parameter is None or parameter.is_meta or type(parameter) is not nn.Parameter:
            register(module, name, parameter)
            return
        if shifted:
            torch.rand(3)
        if parameter not in replaced:
            replaced[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, replaced[parameter])

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
