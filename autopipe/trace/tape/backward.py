"""The user's Python in the backward pass: hooks of gradients, and the backward of an autograd function.

It may count or set what the next forward reads. So the backward pass of a model that has any runs on fakes, too.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_OF_TORCH = ("torch", "builtins", "math", "_operator")


class Inner(TorchFunctionMode):
    """Notes the calls in a function of the user's own, with their numbers; not those that fakes make themselves."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        numbers = [repr(leaf) for leaf in leaves if isinstance(leaf, (bool, int, float, complex, str))]
        forms = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
        self.calls.append((getattr(func, "__name__", ""), numbers, forms))
        return func(*args, **(kwargs or {}))


def run_backward(loss: Tensor) -> None:
    """Run the backward pass of a loss, and keep its graph. ``Tensor.backward`` would pause the modes of torch."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), True, False, (), allow_unreachable=True, accumulate_grad=True
    )


def share_hooks(real: Tensor, fake: Tensor) -> bool:
    """Let the hooks of a parameter run for its fake. Return whether it has any."""
    has_any = False
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(real, name, None)
        if hooks:
            has_any = True
            if getattr(fake, name, None) is not hooks:
                setattr(fake, name, hooks)
    return has_any


def has_hooks(modules: Iterable[tuple[str, nn.Module]]) -> bool:
    """Return whether a module has hooks of the backward pass."""
    return any(module._backward_hooks or module._backward_pre_hooks for _, module in modules)


def reads_more_than_its_arguments(function: type) -> bool:
    """Return whether the backward of an autograd function may read or write anything but its arguments."""
    backward: Any = vars(function).get("backward") or vars(function).get("vjp")
    return not _is_closed(getattr(backward, "__func__", backward))


def _is_closed(function: Any) -> bool:
    if not isinstance(function, types.FunctionType):
        return False
    for instruction in dis.get_instructions(function):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_DEREF", "IMPORT_NAME"):
            return False
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = function.__globals__.get(instruction.argval, vars(builtins).get(instruction.argval))
            place = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if not str(place).startswith(_OF_TORCH):
                return False
    return not any(isinstance(constant, types.CodeType) for constant in function.__code__.co_consts)
