"""State dicts -> description: what an optimizer and its scheduler store, by the names of the parameters."""

from __future__ import annotations

import bisect
import collections
import enum
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import _TYPES
from torch import nn
from torch.optim import Optimizer

from autopipe.runtime.training_state.nodes import Node, UnstorableError, name_of
from autopipe.strides import extent

_MOST_NODES = 5_000_000
_CONTAINERS: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
FACTORIES = {"dict": dict, "list": list, "int": int, "float": float, "set": set}


@dataclass(slots=True)
class Description:
    """Nodes and the tensors that they name."""

    # under ``optimizer`` and ``scheduler``
    tree: dict[str, Node]
    # not copied
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def describe(
    roots: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], suffix: str = "", *, values: bool = True
) -> Description:
    """Describe the state_dict of each of ``roots``, such as an optimizer and its scheduler; None is left out.

    ``parameters`` are those that the optimizer steps, under the model's own names. ``suffix`` makes the names of
    tensors unique that belong to the stage rather than to one parameter. Without ``values``, tensors and generators
    are described by their type alone, which is enough to compare what two hooks build. Functions, classes and objects
    in a state_dict are left to the hook, which builds them again.

    Raises: UnstorableError for the first value that JSON and tensors cannot hold.
    """
    present = {name: root for name, root in roots.items() if root is not None}
    writer = _Describer(parameters, suffix, values)
    for root in present.values():
        writer.of_hook.add(id(root))
        if isinstance(root, Optimizer):
            writer.of_hook.update(map(id, (root.state, root.param_groups, *root.param_groups)))
    tree = {}
    for name, root in present.items():
        attributes = [[key, writer.node(value, f"{name}.{key}")] for key, value in named_state(root, name).items()]
        tree[name] = {"is": "state", "class": name_of(type(root)), "attributes": attributes}
    return Description(tree, writer.tensors)


def named_state(root: Any, path: str) -> dict[str, Any]:
    """Return the state_dict of an optimizer or a scheduler. An optimizer's has parameters in place of their numbers.

    Raises: UnstorableError if its state_dict fails or has other keys than text.
    """
    try:
        state = dict(root.state_dict())
    except Exception as error:
        raise UnstorableError(path, f"has no state_dict: {type(error).__name__}: {error}") from error
    if bad := [key for key in state if not isinstance(key, str)]:
        raise UnstorableError(path, f"has a state_dict with the key {bad[0]!r}; keys must be text")
    if not isinstance(root, Optimizer) or not numbered(state):
        return state
    parameters = parameters_of(root)
    of_parameters = {parameters[key]: value for key, value in state["state"].items() if key in parameters}
    others = {key: value for key, value in state["state"].items() if key not in parameters}
    groups = [
        {**group, "params": [parameters[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    return {**state, "state": of_parameters, "param_groups": groups} | ({"shared": others} if others else {})


def numbered(state: Mapping[str, Any]) -> bool:
    """Return whether a state_dict numbers the parameters as ``torch.optim.Optimizer.state_dict`` does."""
    return isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)


def parameters_of(optimizer: Optimizer) -> dict[Any, nn.Parameter]:
    """Return number in a state_dict -> parameter."""
    unique = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return dict(enumerate(unique.values()))


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
        self.of_hook: set[int] = set()  # ids of objects that the hook has built and that stay
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
        if isinstance(value, np.generic):
            return {"is": "scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        if isinstance(value, (torch.dtype, torch.device)):
            return {"is": "code", "name": str(value)}
        if id(value) in self.names:
            return {"is": "parameter", "name": self.names[id(value)]}
        if id(value) in self.seen and kind not in (tuple, frozenset, torch.Size):
            return {"is": "same", "as": self.seen[id(value)]}
        self.seen[id(value)] = path
        self.alive.append(value)
        if id(value) not in self.of_hook:
            if isinstance(value, torch.Tensor):
                return self.tensor(value, path)
            if kind in _DICTS:
                return self.dictionary(value, path)
            if kind in _CONTAINERS:
                return self.container(value, path)
            if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
                return self.generator(value, path)
            if isinstance(value, np.ndarray):
                return self.array(value, path)
        return {"is": "code", "name": name_of(value if isinstance(value, type) else kind)}

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
        node["name"] = self.add(path, value.detach())
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

    def add(self, path: str, tensor: torch.Tensor) -> str:
        name = path if self.inside else path + self.suffix
        self.tensors[name] = tensor
        return name

    def array(self, value: np.ndarray[Any, Any], path: str) -> Node:
        if value.dtype.hasobject or type(value) is not np.ndarray:
            raise UnstorableError(path, f"is an array of {value.dtype}")
        node: Node = {"is": "array", "dtype": value.dtype.str, "shape": list(value.shape)}
        if self.values:
            data = bytearray(value.tobytes())
            content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            node["name"] = self.add(path, content)
        return node

    def generator(self, value: Any, path: str) -> Node:
        if isinstance(value, torch.Generator):
            described: Node = {"is": "generator", "device": value.device.type}
            if self.values:
                described["name"] = self.add(path, value.get_state())
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
        kind = type(value)
        if kind is list and self.is_groups(value):
            return self.groups(value, path)
        node: Node = {"is": _CONTAINERS[kind]}
        if kind is collections.deque:
            node["maxlen"] = value.maxlen
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        node["items"] = [self.node(item, f"{path}[{index}]") for index, item in enumerate(items)]
        return node

    def is_groups(self, value: list[Any]) -> bool:
        """Return whether a list has the form of ``param_groups``."""
        return bool(value) and all(
            type(group) is dict
            and isinstance(group.get("params"), list)
            and all(id(p) in self.names for p in group["params"])
            for group in value
        )

    def groups(self, value: list[dict[str, Any]], path: str) -> Node:
        groups = []
        for index, group in enumerate(value):
            values = {
                key: self.node(entry, f"{path}[{index}][{key!r}]")
                for key, entry in group.items()
                if key not in ("params", "param_names")
            }
            groups.append({"params": [self.names[id(p)] for p in group["params"]], "values": values})
        return {"is": "groups", "groups": groups}

    def dictionary(self, value: dict[Any, Any], path: str) -> Node:
        node: Node = {"is": "dict", "class": type(value).__name__}
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            node["factory"] = getattr(value.default_factory, "__name__", "")
        if value and all(id(key) in self.names for key in value):
            return {**node, "is": "by_parameter", "items": [self.of_parameter(k, v, path) for k, v in value.items()]}
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
