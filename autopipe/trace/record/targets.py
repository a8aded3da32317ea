"""Convert a called function to the form in which it is written: an operator, a method, or a public function.

``x + y`` reaches a ``TorchFunctionMode`` as ``Tensor.add``, ``x.T`` as the getter of a descriptor, ``F.linear`` as
``torch._C._nn.linear``. Each is converted to its familiar form, with a name that is the same in every process.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "true_divide": operator.truediv, "matmul": operator.matmul, "neg": operator.neg, "pow": operator.pow,
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    "__eq__": operator.eq, "__ne__": operator.ne, "__invert__": operator.invert, "__floordiv__": operator.floordiv,
    "__mod__": operator.mod, "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor,
    "__iand__": operator.iand, "__ior__": operator.ior, "__ixor__": operator.ixor, "__pow__": operator.pow,
    "__ipow__": operator.ipow, "__imod__": operator.imod, "__ifloordiv__": operator.ifloordiv,
    "__lshift__": operator.lshift, "__rshift__": operator.rshift, "__matmul__": operator.matmul,
    "__getitem__": operator.getitem, "__setitem__": operator.setitem, "__delitem__": operator.delitem,
}  # fmt: skip
_REVERSED = {
    "__radd__": operator.add, "__rsub__": operator.sub, "__rmul__": operator.mul, "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv, "__rfloordiv__": operator.floordiv, "__rpow__": operator.pow,
    "__rmod__": operator.mod, "__rmatmul__": operator.matmul, "__rand__": operator.and_, "__ror__": operator.or_,
    "__rxor__": operator.xor, "__rlshift__": operator.lshift, "__rrshift__": operator.rshift,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call in its written form."""

    kind: str  # that of ``ir.graph.Node``
    target: Any  # in the form of ``torch.fx``
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the written form of a call that a ``TorchFunctionMode`` received."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return Call("call_function", getattr, (args[0], property_name(func)), {})
    if _is_tensor_method(func, name):
        if name in _REVERSED:
            return Call("call_function", _REVERSED[name], (args[1], args[0]), {})
        if name in _OPERATORS and not kwargs and len(args) <= 3:
            return Call("call_function", _OPERATORS[name], args, {})
        return Call("call_method", name, args, kwargs)
    return Call("call_function", func, args, kwargs)


def property_name(func: Any) -> str:
    """Return the name of the attribute that a ``__get__`` or ``__set__`` belongs to."""
    return str(getattr(func.__self__, "__name__", func.__self__))


def _is_tensor_method(func: Any, name: str) -> bool:
    method = getattr(torch.Tensor, name, None)
    owner = getattr(func, "__qualname__", "").split(".")[0]  # x ** 2 is a wrapper of TensorBase.pow
    return method is func or (method is not None and owner in ("Tensor", "TensorBase"))


@functools.cache
def _public_names() -> dict[int, str]:
    """Return id of a function -> its public name in torch, for functions of private modules."""
    names: dict[int, str] = {}
    places = {
        "torch": torch,
        "torch.nn.functional": torch.nn.functional,
        "torch.special": torch.special,
        "torch.fft": torch.fft,
        "torch.linalg": torch.linalg,
    }
    for place, module in places.items():
        for name in sorted(vars(module)):
            value = getattr(module, name)
            if callable(value) and not isinstance(value, type) and not name.startswith("_"):
                names.setdefault(id(value), f"{place}.{name}")
    return names


def qualified_name(target: Any) -> str:
    """Return the dotted name under which a function is written: the public name if torch has one.

    A custom autograd function is its class with ``.apply``.
    """
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{str(target).replace('::', '.')}"
    public = _public_names().get(id(target))
    if public is not None:
        return public
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and getattr(owner, "__module__", None) and owner.__name__ != "_VariableFunctionsClass":
        return f"{owner.__module__}.{owner.__qualname__}.{target.__name__}"
    module = getattr(target, "__module__", None) or "torch"
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", type(target).__name__))
    if module in ("_operator", "builtins"):
        return name if module == "builtins" else f"operator.{target.__name__}"
    return f"{module}.{name.removeprefix('_VariableFunctionsClass.')}"
