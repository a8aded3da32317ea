"""Objects -> description. Every value that an optimizer and its scheduler reach is described, or refused by name."""

from __future__ import annotations

import bisect
import collections
import enum
import functools
import logging
import math
import pathlib
import random
import re
import threading
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import _TYPES
from torch import nn
from torch.utils.hooks import RemovableHandle

from autopipe.runtime.training_state.nodes import Node, UnstorableError, name_of
from autopipe.strides import extent

_MOST_NODES = 5_000_000
_IMMUTABLE, _HEAP_TYPE = 1 << 8, 1 << 9  # Py_TPFLAGS_IMMUTABLETYPE, Py_TPFLAGS_HEAPTYPE
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
FACTORIES = {"dict": dict, "list": list, "int": int, "float": float, "set": set}
# no training state: those of the hook are used
_CODE = (type, types.ModuleType, logging.Logger, weakref.ReferenceType, RemovableHandle, property, staticmethod)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONSTANTS = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    pathlib.PurePath,
    types.CodeType,
    re.Pattern,
)


@dataclass(slots=True)
class Description:
    """Nodes and the tensors that they name."""

    # under ``optimizer`` and ``scheduler``
    tree: dict[str, Node]
    # not copied
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def describe(
    roots: Mapping[str, object], parameters: Mapping[str, nn.Parameter], suffix: str = "", *, values: bool = True
) -> Description:
    """Describe every value that ``roots`` reach.

    ``parameters`` are those that the optimizer steps, under the model's own names. ``suffix`` makes the names of
    tensors unique that belong to the stage rather than to one parameter. Without ``values``, tensors and generators
    are described by their type alone, which is enough to compare what two hooks build.

    Raises: UnstorableError for the first value that JSON and tensors cannot hold.
    """
    writer = _Describer(parameters, suffix, values)
    tree = {name: writer.node(value, name) for name, value in roots.items() if value is not None}
    return Description(tree, writer.tensors)


class _Describer:
    def __init__(self, parameters: Mapping[str, nn.Parameter], suffix: str, values: bool) -> None:
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        # the memory that is described, by block of memory: (address, end, path), ascending
        self.memory: dict[int, list[tuple[int, int, str]]] = {}
        for name, parameter in parameters.items():
            if parameter.numel() and not parameter.is_meta and parameter.layout is torch.strided:
                self.sharer(parameter, f"the parameter {name}")
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.suffix, self.values = suffix, values
        self.tensors: dict[str, torch.Tensor] = {}
        self.seen: dict[int, str] = {}
        self.alive: list[object] = []  # keeps the objects alive, so that no id is reused
        self.inside = ""  # the parameter whose state is described
        self.count = 0

    def node(self, value: Any, path: str) -> Node:
        """Describe one value."""
        self.count += 1
        if self.count > _MOST_NODES:
            raise UnstorableError(path, f"is one of more than {_MOST_NODES} values")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"is": "float", "value": str(value)}
        if kind is complex:
            return {"is": "complex", "value": str(value)}
        if kind is bytes:
            return {"is": "bytes", "hex": value.hex()}
        if isinstance(value, enum.Enum):
            return {"is": "enum", "class": name_of(kind), "name": value.name}
        if isinstance(value, _CONSTANTS):
            return {"is": "code", "name": str(value)[:200]}
        if id(value) in self.names:
            return {"is": "parameter", "name": self.names[id(value)]}
        if isinstance(value, (tuple, frozenset, np.generic)):
            return self.immutable(value, path)
        if id(value) in self.seen:
            return {"is": "same", "as": self.seen[id(value)]}
        self.seen[id(value)] = path
        self.alive.append(value)
        return self.mutable(value, path)

    def immutable(self, value: Any, path: str) -> Node:
        if isinstance(value, np.generic):
            return {"is": "scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        return self.container(value, path)

    def mutable(self, value: Any, path: str) -> Node:
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if isinstance(value, dict):
            return self.dictionary(value, path)
        if isinstance(value, _CONTAINERS):
            return self.container(value, path)
        if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            return self.generator(value, path)
        if isinstance(value, np.ndarray):
            return self.array(value, path)
        if isinstance(value, (*_CODE, *_LOCKS)):
            return {"is": "code", "name": name_of(value if isinstance(value, type) else type(value))}
        if isinstance(value, types.MethodType):
            return {"is": "method", "name": value.__name__, "self": self.node(value.__self__, f"{path}.__self__")}
        if isinstance(value, types.FunctionType):
            return self.function(value, path)
        if isinstance(value, functools.partial):
            return {
                "is": "partial",
                "function": self.node(value.func, f"{path}.func"),
                "arguments": self.node(value.args, f"{path}.args"),
                "keywords": self.node(value.keywords, f"{path}.keywords"),
            }
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            owner = getattr(value, "__self__", None)
            if owner is None or isinstance(owner, (types.ModuleType, type, *_LOCKS)):
                return {"is": "code", "name": name_of(value)}
            return {"is": "method", "name": value.__name__, "self": self.node(owner, f"{path}.__self__")}
        return self.object(value, path)

    def tensor(self, value: torch.Tensor, path: str) -> Node:
        kind = type(value)
        if (
            kind not in (torch.Tensor, nn.Parameter)
            or value.layout is not torch.strided
            or value.dtype not in _TYPES.values()
        ):
            what = f"{value.dtype}, {value.layout}" if kind is torch.Tensor else name_of(kind)
            raise UnstorableError(path, f"is a tensor ({what}) that a checkpoint cannot hold")
        node: Node = {"is": "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if kind is nn.Parameter:  # a parameter of the optimizer, such as a copy that it averages into
            node["trained"] = value.requires_grad
        if not self.values:
            if value.numel() == 1 and not value.is_meta:
                node["value"] = str(value.detach().flatten()[0].item())
            return node
        if value.numel():
            other = self.sharer(value, path)
            if other:
                raise UnstorableError(
                    path, f"shares its memory with {other}", "clone() it, so that it has its own memory"
                )
        if not value.is_contiguous():
            node["strides"] = list(value.stride())
        if value.device.type == "cpu" and self.device.type != "cpu":
            node["host"] = True
        node["name"] = self.keep(path, value.detach())
        return node

    def sharer(self, tensor: torch.Tensor, path: str) -> str:
        """Note the memory of a strided tensor. Return the path of another one that has a part of it, or ""."""
        begin = tensor.data_ptr()
        end = begin + extent(tensor.shape, tensor.stride()) * tensor.element_size()
        spans = self.memory.setdefault(tensor.untyped_storage().data_ptr(), [])
        at = bisect.bisect(spans, (begin, end, path))
        for first, last, other in spans[max(at - 1, 0) : at + 1]:
            if first < end and begin < last and other != path:
                return other
        if all(other != path for _, _, other in spans[max(at - 1, 0) : at + 1]):
            spans.insert(at, (begin, end, path))
        return ""

    def keep(self, path: str, tensor: torch.Tensor) -> str:
        name = path if self.inside else path + self.suffix
        self.tensors[name] = tensor
        return name

    def array(self, value: np.ndarray[Any, Any], path: str) -> Node:
        if value.dtype.hasobject or type(value) is not np.ndarray:
            raise UnstorableError(path, f"is an array of {value.dtype}")
        node: Node = {"is": "array", "dtype": value.dtype.str, "shape": list(value.shape)}
        if self.values:
            node["name"] = self.keep(
                path,
                torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
                if value.nbytes
                else torch.empty(0, dtype=torch.uint8),
            )
        return node

    def generator(self, value: Any, path: str) -> Node:
        if isinstance(value, torch.Generator):
            described: Node = {"is": "generator", "device": value.device.type}
            if self.values:
                described["name"] = self.keep(path, value.get_state())
            return described
        if type(value) not in (random.Random, np.random.Generator, np.random.RandomState):
            raise UnstorableError(path, f"is a generator of class {name_of(type(value))}, whose state cannot be read")
        if isinstance(value, random.Random):
            state: Any = value.getstate()
        elif isinstance(value, np.random.Generator):
            state = value.bit_generator.state
        else:
            state = value.get_state(legacy=False)
        node: Node = {"is": "random", "class": name_of(type(value)), "state": None}
        if self.values:
            node["state"] = self.node(state, f"{path}.state")
        return node

    def container(self, value: Any, path: str) -> Node:
        kind = next(k for k in _CONTAINERS if isinstance(value, k))
        if kind is list and self.is_groups(value):
            return self.groups(value, path)
        node: Node = {"is": kind.__name__}
        if type(value) is not kind:
            node["class"] = name_of(type(value))
            if getattr(value, "__dict__", None):
                raise UnstorableError(path, f"is {name_of(type(value))}, a {kind.__name__} with attributes")
        if isinstance(value, collections.deque):
            node["maxlen"] = value.maxlen
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        node["items"] = [self.node(item, f"{path}[{index}]") for index, item in enumerate(items)]
        return node

    def is_groups(self, value: list[Any]) -> bool:
        """Return whether a list is a ``param_groups`` that has not been described."""
        return bool(value) and all(
            type(group) is dict
            and isinstance(group.get("params"), list)
            and all(id(p) in self.names for p in group["params"])
            and id(group) not in self.seen
            for group in value
        )

    def groups(self, value: list[dict[str, Any]], path: str) -> Node:
        groups = []
        for index, group in enumerate(value):
            place = f"{path}[{index}]"
            self.seen[id(group)] = place
            self.seen[id(group["params"])] = f"{place}['params']"
            self.alive.extend((group, group["params"]))
            values = {
                key: self.node(entry, f"{place}[{key!r}]")
                for key, entry in group.items()
                if key not in ("params", "param_names")
            }
            groups.append({"params": [self.names[id(p)] for p in group["params"]], "values": values})
        return {"is": "groups", "groups": groups}

    def dictionary(self, value: dict[Any, Any], path: str) -> Node:
        kind = next((k for k in reversed(_DICTS) if type(value) is k), None)
        node: Node = {"is": "dict", "class": kind.__name__ if kind else name_of(type(value))}
        if kind is None and getattr(value, "__dict__", None):
            raise UnstorableError(path, f"is {name_of(type(value))}, a dict with attributes")
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            node["factory"] = getattr(value.default_factory, "__name__", "")
        if value and all(id(key) in self.names for key in value):
            return {**node, "is": "by_parameter", "items": [self.of_parameter(k, v, path) for k, v in value.items()]}
        if path.endswith("_hooks") and all(callable(entry) for entry in value.values()):
            return {"is": "hooks", "items": [self.node(v, f"{path}[{i}]") for i, v in enumerate(value.values())]}
        node["items"] = [[self.key(key, path), self.node(v, f"{path}[{key!r}]")] for key, v in value.items()]
        return node

    def of_parameter(self, parameter: nn.Parameter, value: Any, path: str) -> list[Any]:
        name = self.names[id(parameter)]
        outer, self.inside = self.inside, name
        try:
            return [name, self.node(value, f"{path}[{name}]")]
        finally:
            self.inside = outer

    def key(self, key: Any, path: str) -> Node:
        if type(key) is int and key in self.names:
            raise UnstorableError(
                path,
                f"has id() of parameter {self.names[key]} as a key; a resumed run has another id()",
                "key it by the parameter itself, as optimizer.state is",
            )
        plain = key is None or type(key) in (bool, int, float, str, tuple) or isinstance(key, enum.Enum)
        if not plain:
            raise UnstorableError(path, f"has a key of class {name_of(type(key))}")
        return self.node(key, path)

    def function(self, value: types.FunctionType, path: str) -> Node:
        cells = {}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            cells[name] = self.node(content, f"{path}.{name}")
        attributes = {k: self.node(v, f"{path}.{k}") for k, v in vars(value).items() if k != "__wrapped__"}
        return {
            "is": "function",
            "name": name_of(value),
            "cells": cells,
            "defaults": self.node(value.__defaults__, f"{path}.__defaults__"),
            "keywords": self.node(value.__kwdefaults__, f"{path}.__kwdefaults__"),
            "attributes": attributes,
        }

    def object(self, value: Any, path: str) -> Node:
        cls = type(value)
        if cls is not types.SimpleNamespace and not all(_of_python(base) for base in cls.__mro__[:-1]):
            raise UnstorableError(path, f"is of class {name_of(cls)}, which a checkpoint cannot hold")
        attributes = [[key, self.node(entry, f"{path}.{key}")] for key, entry in attributes_of(value).items()]
        return {"is": "object", "class": name_of(cls), "attributes": attributes}


def _of_python(cls: type) -> bool:
    """Return whether a class comes from a class statement, so that attributes and slots are its complete state.

    Classes of extensions may be heap types too, with state in C (``array.array``, files since Python 3.12).
    """
    if not cls.__flags__ & _HEAP_TYPE or cls.__flags__ & _IMMUTABLE:
        return False
    return any("__dict__" in vars(base) or "__slots__" in vars(base) for base in cls.__mro__[:-1])


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object: its ``__dict__`` and its slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{base.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes
