"""What a call of the model returns, and what its forward sets attributes of modules to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.script.devices import CPU
from autopipe.script.refusals import refused
from autopipe.trace.record.containers import attributes
from autopipe.trace.state.snapshots.places import slots


@dataclass(frozen=True)
class Output:
    """One output of the call: a tensor, or a plain value in its place."""

    constant: Any = None  # unless it is a tensor
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # None: not a tensor
    grad: bool = False  # whether it needs a gradient
    name: str = ""  # of its grad_fn
    device: torch.device = CPU


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module that the forward sets in every call."""

    module: int  # its place in ``model.modules()``
    name: str
    places: tuple[int, ...]  # of its values among the outputs
    form: pytree.TreeSpec  # of the value


def bind_attributes(model: nn.Module, attributes: tuple[Attribute, ...], values: list[Any]) -> None:
    """Set them as the forward does. ``values``: of the outputs."""
    modules = list(model.modules()) if attributes else []
    for attribute in attributes:
        value = pytree.tree_unflatten([values[place] for place in attribute.places], attribute.form)
        vars(modules[attribute.module])[attribute.name] = value


def with_attributes(outputs: list[Any], sets: dict[tuple[int, str], Any]) -> tuple[list[Any], tuple[Attribute, ...]]:
    """Return the outputs and what attributes are set to as one list, each tensor once, and the attributes."""
    every, attributes = list(outputs), []
    for (module, name), value in sets.items():
        leaves, form = pytree.tree_flatten(value)
        places = []
        for leaf in leaves:
            same = (i for i, entry in enumerate(every) if entry is leaf and isinstance(leaf, Tensor))
            places.append(next(same, len(every)))
            if places[-1] == len(every):
                every.append(leaf)
        attributes.append(Attribute(module, name, tuple(places), form))
    return every, tuple(attributes)


class Hidden:
    """Stands for an object with tensors that the call returned, in which they cannot be replaced by lazy ones."""

    def __init__(self, kind: str) -> None:
        self.__dict__["_kind"] = kind

    def _refuse(self, *args: Any) -> Any:
        raise refused(
            f"the {self.__dict__['_kind']} that the model returns has tensors, and no form that torch's pytree knows",
            "torch.utils._pytree.register_dataclass, or a tuple or dict",
        )

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __len__ = __call__ = __eq__ = __reduce_ex__ = _refuse
    __hash__ = object.__hash__


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (str, bytes, int, float, complex, type, nn.Module)):
        return False
    if isinstance(value, dict):
        return any(_holds_tensors(entry, depth - 1) for entry in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_tensors(entry, depth - 1) for entry in value)
    own = (*slots(value).values(), *(attributes(value) or {}).values())
    return any(_holds_tensors(entry, depth - 1) for entry in own)


def output_of(value: Any) -> Output:
    """Return the form of an output of the recording."""
    if not isinstance(value, Tensor):
        return Output(Hidden(type(value).__qualname__) if _holds_tensors(value) else value)
    name = value.grad_fn.name() if value.grad_fn is not None else ""
    form = tuple(value.shape), tuple(value.stride()), value.dtype
    return Output(None, *form, value.requires_grad, name, value.device)
