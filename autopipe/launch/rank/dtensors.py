"""Tell torch's dispatcher which values are DTensors without ``torch.distributed.tensor``, which takes long to import.

The dispatcher compares each argument that is a subclass of a tensor, such as the fake tensors of a capture, with the
class ``DTensor``. It imports the class once, and then keeps it (torch/csrc/autograd/python_variable.cpp,
``get_dtensor_class``). It is given a class here that has the same instances and attributes as the actual one: before
that is imported, there are no DTensors.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_MODULE = "torch.distributed.tensor"


class _OfDTensors(type):
    """The class of ``DTensor``: instances and attributes are those of torch's class."""

    def __instancecheck__(cls, value: object) -> bool:
        actual = getattr(sys.modules.get(_MODULE), "DTensor", cls)
        return actual is not cls and isinstance(value, actual)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name != "__torch_dispatch__":  # a debugger looks for them
            raise AttributeError(name)
        from torch.distributed.tensor import DTensor

        return getattr(DTensor, name)


class _DTensor(metaclass=_OfDTensors):
    """Takes the place of torch's class."""


def defer_dtensors() -> None:
    """Let the dispatcher keep the class of this module, unless the actual one is imported already."""
    import torch

    if _MODULE in sys.modules or not torch.distributed.is_available():
        return

    class Probe(torch.Tensor):
        """A tensor for which the dispatcher asks: operations return nothing."""

        @classmethod
        def __torch_dispatch__(cls, *arguments: Any, **options: Any) -> None:
            return None

    package: Any = ModuleType(_MODULE)
    package.DTensor = _DTensor
    sys.modules[_MODULE] = package
    try:
        probe = torch.Tensor._make_wrapper_subclass(Probe, (1,))
        torch.ops.aten.alias.default(probe)
    finally:
        del sys.modules[_MODULE]
