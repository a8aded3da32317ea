"""Building a model without memory for its parameters: what they hold is read from a file afterwards.

Each parameter exists for a moment, as large as it is, and is then exchanged for one on the ``meta`` device, so that at
most one module's parameters are there at a time. Buffers are real: tables and masks are computed in a build, and no
file holds those that are not persistent.

What initialises a parameter on ``meta`` draws no random numbers, so a *random* buffer comes out differently than in a
real build. ``shifted`` shows which ones are: it draws numbers beside every parameter, and only they change by it.

Source: the same idea as ``init_empty_weights`` of Hugging Face accelerate; here two names of one parameter stay one.
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
    """Let every parameter that this thread's modules register be one of the ``meta`` device.

    One thread at a time may be in it; to the others nothing changes.
    """
    register = nn.Module.register_parameter
    exchanged = WeakTensorKeyDictionary()
    builder = threading.get_ident()

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        elsewhere = threading.get_ident() != builder
        if elsewhere or parameter is None or parameter.is_meta or type(parameter) is not nn.Parameter:
            register(module, name, parameter)
            return
        if shifted:
            torch.rand(3)
        if parameter not in exchanged:
            exchanged[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, exchanged[parameter])

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
