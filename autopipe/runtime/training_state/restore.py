"""Restore training state: write the values of a checkpoint into the objects that the user's hooks have built."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import random
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from autopipe.runtime.training_state.describe import FACTORIES, attributes_of
from autopipe.runtime.training_state.nodes import Node, name_of

_MAKERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_CHANGED_IN_PLACE = (list, dict, set, collections.OrderedDict, collections.deque, torch.Tensor, np.ndarray)
_MISSING: Any = object()


class MisfitError(Exception):
    """A value of the checkpoint does not fit what the hooks build now.

    ``path``: of the value. ``why``: the reason, as the rest of a sentence.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.path, self.why = path, why


def restore(
    tree: Mapping[str, Node],
    roots: Mapping[str, object],
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write the values of a description into ``roots``. ``tensors``: those that it names, by name.

    Raises: MisfitError if the two do not have the same structure.
    """
    reader = _Restorer(parameters, tensors)
    present = {name for name, value in roots.items() if value is not None}
    for name in (*tree, *present):
        if (name in tree) != (name in present):
            where = (
                "is in the checkpoint, and the hooks return none now" if name in tree else "is not in the checkpoint"
            )
            raise MisfitError(f"the {name}", where)
    with torch.no_grad():
        for name, node in tree.items():
            reader.value(node, roots[name], name)


class _Restorer:
    def __init__(self, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
        self.parameters, self.tensors = parameters, tensors
        self.storages = {p.untyped_storage().data_ptr() for p in parameters.values() if p.numel()}
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.seen: dict[str, Any] = {}
        # what values were written into, by id
        self.taken: dict[int, Any] = {}
        self.group: dict[str, Any] = {}
        self.inside: nn.Parameter | None = None

    def value(self, node: Node, live: Any, path: str) -> Any:
        """Return the value of a node. A mutable ``live`` value is changed in place."""
        if not isinstance(node, dict):
            return node
        kind = node["is"]
        if kind == "live":
            if live is _MISSING:
                raise MisfitError(
                    path, "was created during training, and the object that it belongs to is in another stage now"
                )
            return live
        if kind == "same":
            if node["as"] not in self.seen:
                raise MisfitError(path, f"is the same object as {node['as']}, which does not exist")
            return self.seen[node["as"]]
        if type(live) in _CHANGED_IN_PLACE and self.taken.setdefault(id(live), (path, live))[0] != path:
            live = _MISSING  # the hook has one object where the checkpoint has two
        result = getattr(self, f"_{kind}")(node, live, path)
        self.seen[path] = result
        return result

    # -- values ----------------------------------------------------------------------------------------------------

    def _float(self, node: Node, live: Any, path: str) -> Any:
        return float(node["value"])

    def _complex(self, node: Node, live: Any, path: str) -> Any:
        return complex(node["value"])

    def _bytes(self, node: Node, live: Any, path: str) -> Any:
        return bytes.fromhex(node["hex"])

    def _enum(self, node: Node, live: Any, path: str) -> Any:
        if not isinstance(live, enum.Enum) or name_of(type(live)) != node["class"]:
            raise self._other(node["class"], live, path)
        return type(live)[node["name"]]

    def _code(self, node: Node, live: Any, path: str) -> Any:
        if live is _MISSING:
            result = _constant(node["name"])
            if result is None:
                raise MisfitError(path, f"is {node['name']}, which was created during training")
            return result
        return live

    def _parameter(self, node: Node, live: Any, path: str) -> Any:
        if node["name"] not in self.parameters:
            raise MisfitError(path, f"is the parameter {node['name']}, which another stage has now")
        return self.parameters[node["name"]]

    def _scalar(self, node: Node, live: Any, path: str) -> Any:
        return np.frombuffer(bytes.fromhex(node["hex"]), dtype=np.dtype(node["dtype"]))[0]

    def _array(self, node: Node, live: Any, path: str) -> Any:
        flat = np.frombuffer(self.tensors[node["name"]].numpy().tobytes(), dtype=np.dtype(node["dtype"]))
        loaded = flat.reshape(node["shape"]).copy()
        same = isinstance(live, np.ndarray) and live.shape == loaded.shape and live.dtype == loaded.dtype
        if same and live.flags.writeable:
            live[...] = loaded
            return live
        return loaded

    def _tensor(self, node: Node, live: Any, path: str) -> Any:
        loaded = self.tensors[node["name"]]
        device = self._device(node, loaded)
        if "trained" in node:
            if isinstance(live, nn.Parameter) and live.shape == loaded.shape and live.dtype == loaded.dtype:
                return live.copy_(loaded)
            return nn.Parameter(loaded.to(device, copy=True), requires_grad=bool(node["trained"]))
        if (
            isinstance(live, torch.Tensor)
            and not isinstance(live, nn.Parameter)
            and (live.shape, live.dtype, live.device) == (loaded.shape, loaded.dtype, device)
            and live.untyped_storage().data_ptr() not in self.storages
            and live.stride() == tuple(node.get("strides", loaded.stride()))
        ):
            return live.copy_(loaded)
        if "strides" in node and _dense(node["shape"], node["strides"]):
            return torch.empty_strided(node["shape"], node["strides"], dtype=loaded.dtype, device=device).copy_(loaded)
        return loaded.to(device, copy=True)

    def _device(self, node: Node, loaded: torch.Tensor) -> torch.device:
        """Return the device for a tensor: that of the parameters, or the CPU (where torch keeps the step of AdamW)."""
        host = node.get("host", False)
        if not host and loaded.dim() == 0 and self.device.type != "cpu":
            host = not (self.group.get("fused") or self.group.get("capturable"))
        return torch.device("cpu") if host else self.device

    def _generator(self, node: Node, live: Any, path: str) -> Any:
        result = live if isinstance(live, torch.Generator) else torch.Generator(node["device"])
        if result.device.type != node["device"]:
            raise MisfitError(path, f"is a generator of {node['device']}, and is one of {result.device.type} now")
        result.set_state(self.tensors[node["name"]])
        return result

    def _random(self, node: Node, live: Any, path: str) -> Any:
        state = self.value(node["state"], _MISSING, f"{path}.state")
        if node["class"] == name_of(random.Random):
            result = live if type(live) is random.Random else random.Random()  # noqa: S311 - not for secrets
            result.setstate(state)
            return result
        if node["class"] == name_of(np.random.RandomState):
            numpy = live if isinstance(live, np.random.RandomState) else np.random.RandomState()
            numpy.set_state(state)
            return numpy
        name = state["bit_generator"]
        if not isinstance(live, np.random.Generator) or type(live.bit_generator).__name__ != name:
            if name not in _BIT_GENERATORS:
                raise MisfitError(path, f"draws from {name}, which is not known")
            live = np.random.Generator(getattr(np.random, name)())
        live.bit_generator.state = state
        return live

    # -- containers ------------------------------------------------------------------------------------------------

    def _items(self, node: Node, live: Any, path: str) -> list[Any]:
        before = list(live) if isinstance(live, (list, tuple, collections.deque)) else []
        padded = [*before, *([_MISSING] * (len(node["items"]) - len(before)))]
        return [self.value(item, padded[index], f"{path}[{index}]") for index, item in enumerate(node["items"])]

    def _list(self, node: Node, live: Any, path: str) -> Any:
        self._same_class(node, live, path)
        if isinstance(live, list):
            self.seen[path] = live  # a list may hold itself
            live[:] = self._items(node, live, path)
            return live
        return self._items(node, live, path)

    def _tuple(self, node: Node, live: Any, path: str) -> Any:
        self._same_class(node, live, path)
        items = self._items(node, live, path)
        if "class" not in node:
            return tuple(items)
        return type(live)._make(items) if hasattr(live, "_make") else type(live)(items)

    def _set(self, node: Node, live: Any, path: str) -> Any:
        self._same_class(node, live, path)
        items = self._items(node, live, path)
        if isinstance(live, set):
            live.clear()
            live.update(items)
            return live
        return set(items)

    def _frozenset(self, node: Node, live: Any, path: str) -> Any:
        self._same_class(node, live, path)
        return frozenset(self._items(node, live, path))

    def _deque(self, node: Node, live: Any, path: str) -> Any:
        self._same_class(node, live, path)
        items = self._items(node, live, path)
        if isinstance(live, collections.deque) and live.maxlen == node["maxlen"]:
            live.clear()
            live.extend(items)
            return live
        return collections.deque(items, node["maxlen"])

    def _dict(self, node: Node, live: Any, path: str) -> Any:
        result = self._dictionary(node, live, path)
        before = dict(result)
        pairs = [(self.value(key, _MISSING, path), value) for key, value in node["items"]]
        restored = {k: self.value(v, before.get(k, _MISSING), f"{path}[{k!r}]") for k, v in pairs}
        result.clear()
        result.update(restored)
        return result

    def _by_parameter(self, node: Node, live: Any, path: str) -> Any:
        result = self._dictionary(node, live, path)
        before = dict(result)
        restored = {}
        for name, value in node["items"]:
            if name not in self.parameters:
                raise MisfitError(path, f"has a value for {name}, which the optimizer does not step now")
            parameter = self.parameters[name]
            restored[parameter] = self.value(value, before.get(parameter, _MISSING), f"{path}[{name}]")
        result.clear()
        result.update(restored)
        return result

    def _dictionary(self, node: Node, live: Any, path: str) -> Any:
        """Return the dict to fill: that of the hook, or a new one of a known class."""
        name = node["class"]
        if isinstance(live, dict) and name in (type(live).__name__, name_of(type(live))):
            self.seen[path] = live
            return live
        if name == "defaultdict" and node.get("factory", "") in ("", *FACTORIES):
            result: Any = collections.defaultdict(FACTORIES.get(node.get("factory", "")))
        elif name in _MAKERS and name != "defaultdict":
            result = _MAKERS[name]()
        else:
            raise self._other(name, live, path)
        self.seen[path] = result
        return result

    def _groups(self, node: Node, live: Any, path: str) -> Any:
        wanted = [group["params"] for group in node["groups"]]
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        groups = [group for group in live if isinstance(group, dict)] if isinstance(live, list) else []
        present = [[names.get(id(p), "?") for p in group.get("params", ())] for group in groups]
        if present != wanted:
            raise MisfitError(path, f"groups the parameters differently: {_grouping(wanted)} -> {_grouping(present)}")
        self.seen[path] = live
        for index, (group, stored) in enumerate(zip(groups, node["groups"], strict=True)):
            place = f"{path}[{index}]"
            self.seen[place] = group
            self.seen[f"{place}['params']"] = group["params"]
            before = dict(group)
            self.group = group
            values = {
                key: self.value(value, before.get(key, _MISSING), f"{place}[{key!r}]")
                for key, value in stored["values"].items()
            }
            for key in before:
                if key not in ("params", "param_names"):
                    del group[key]
            group.update(values)
        if groups:
            self.group = groups[0]
        return live

    def _hooks(self, node: Node, live: Any, path: str) -> Any:
        present = list(live.values()) if isinstance(live, dict) else []
        if len(present) != len(node["items"]):
            raise MisfitError(path, f"has {len(node['items'])} hooks in the checkpoint, and {len(present)} now")
        for index, (item, hook) in enumerate(zip(node["items"], present, strict=True)):
            self.value(item, hook, f"{path}[{index}]")
        return live

    # -- objects and functions -------------------------------------------------------------------------------------

    def _object(self, node: Node, live: Any, path: str) -> Any:
        if live is _MISSING or name_of(type(live)) != node["class"]:
            raise self._other(node["class"], live, path)
        self.seen[path] = live
        before = attributes_of(live)
        for key, value in node["attributes"]:
            restored = self.value(value, before.get(key, _MISSING), f"{path}.{key}")
            if restored is not before.get(key, _MISSING):
                _set(live, key, restored)
        stored = {key for key, _ in node["attributes"]}
        for key in before:
            if key not in stored:
                object.__delattr__(live, key)
        return live

    def _function(self, node: Node, live: Any, path: str) -> Any:
        if not isinstance(live, types.FunctionType) or name_of(live) != node["name"]:
            raise self._other(node["name"], live, path)
        self.seen[path] = live
        for name, cell in zip(live.__code__.co_freevars, live.__closure__ or (), strict=True):
            if name in node["cells"]:
                before = _MISSING
                with contextlib.suppress(ValueError):
                    before = cell.cell_contents
                restored = self.value(node["cells"][name], before, f"{path}.{name}")
                if restored is not before:
                    cell.cell_contents = restored
        live.__defaults__ = self.value(node["defaults"], live.__defaults__, f"{path}.__defaults__")
        live.__kwdefaults__ = self.value(node["keywords"], live.__kwdefaults__, f"{path}.__kwdefaults__")
        for key, value in node["attributes"].items():
            vars(live)[key] = self.value(value, vars(live).get(key, _MISSING), f"{path}.{key}")
        return live

    def _method(self, node: Node, live: Any, path: str) -> Any:
        if live is _MISSING or getattr(live, "__name__", "") != node["name"]:
            raise self._other(node["name"], live, path)
        self.value(node["self"], getattr(live, "__self__", _MISSING), f"{path}.__self__")
        return live

    def _partial(self, node: Node, live: Any, path: str) -> Any:
        if not isinstance(live, functools.partial):
            raise self._other("functools.partial", live, path)
        function = self.value(node["function"], live.func, f"{path}.func")
        arguments = self.value(node["arguments"], live.args, f"{path}.args")
        keywords = self.value(node["keywords"], live.keywords, f"{path}.keywords")
        live.__setstate__((function, arguments, keywords, vars(live) or None))  # type: ignore[attr-defined]
        return live

    def _same_class(self, node: Node, live: Any, path: str) -> None:
        if "class" in node and (live is _MISSING or name_of(type(live)) != node["class"]):
            raise self._other(node["class"], live, path)

    def _other(self, name: str, live: Any, path: str) -> MisfitError:
        if live is _MISSING:
            return MisfitError(
                path, f"is {name}, created during training: the hook builds none, and code is not stored"
            )
        present = name_of(live) if isinstance(live, types.FunctionType) else name_of(type(live))
        return MisfitError(path, f"was {name} and is {present} now")


def _set(live: Any, key: str, value: Any) -> None:
    if key in getattr(live, "__dict__", {}) or not hasattr(type(live), key):
        live.__dict__[key] = value
    else:
        object.__setattr__(live, key, value)


def _constant(text: str) -> Any:
    """Return a dtype or a device by its text, None for anything else."""
    if text.startswith("torch."):
        constant = getattr(torch, text.removeprefix("torch."), None)
        return constant if isinstance(constant, (torch.dtype, torch.memory_format, torch.layout)) else None
    with contextlib.suppress(RuntimeError):
        return torch.device(text)
    return None


def _dense(shape: list[int], strides: list[int]) -> bool:
    """Return whether strides fill memory without gaps and without overlap."""
    size = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _grouping(groups: list[list[str]]) -> str:
    return " + ".join(f"{len(group)} from {group[0]}" if group else "0" for group in groups) or "none"
