"""Restore training state: give the values of a checkpoint to the optimizer and scheduler that the hooks have built."""

from __future__ import annotations

import collections
import contextlib
import enum
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from autopipe.runtime.training_state.describe import FACTORIES, named_state, numbered, parameters_of
from autopipe.runtime.training_state.nodes import LIVE, Node, UnstorableError, name_of

_MAKERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
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
    roots: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Load the state_dicts of a description into ``roots``. ``tensors``: those that it names, by name.

    Raises: MisfitError if the two do not have the same structure, or a ``load_state_dict`` fails.
    """
    present = {name: root for name, root in roots.items() if root is not None}
    for name in (*tree, *present):
        if (name in tree) != (name in present):
            where = (
                "is in the checkpoint, and the hooks return none now" if name in tree else "is not in the checkpoint"
            )
            raise MisfitError(f"the {name}", where)
    reader = _Restorer(parameters, tensors)
    with torch.no_grad():
        for name, node in tree.items():
            if node == LIVE:  # all stages had what the hooks built
                continue
            root = present[name]
            try:
                state = reader.state(node, named_state(root, name), name)
            except UnstorableError as error:
                raise MisfitError(error.path, error.why) from error
            try:
                _load(root, state)
            except Exception as error:
                raise MisfitError(
                    f"the {name}", f"does not load its own state: load_state_dict: {type(error).__name__}: {error}"
                ) from error


def _load(root: Any, state: dict[str, Any]) -> None:
    """Load a state_dict that has parameters in place of their numbers.

    ``Optimizer.load_state_dict`` casts what an optimizer has for a parameter to the parameter's dtype, and calls the
    type of whatever can be iterated. So the values of an optimizer that does not override it are set as they are.
    """
    if not isinstance(root, Optimizer) or not numbered(state):
        root.load_state_dict(state)
        return
    others = state.pop("shared", {})
    hooks = (root._optimizer_load_state_dict_pre_hooks, root._optimizer_load_state_dict_post_hooks)
    if type(root).load_state_dict is Optimizer.load_state_dict and not any(hooks) and len(state) == 2:
        for group, stored in zip(root.param_groups, state["param_groups"], strict=True):
            own = {key: group[key] for key in ("params", "param_names") if key in group}
            group.clear()
            group.update(own | {key: value for key, value in stored.items() if key != "params"})
        root.state.clear()
        root.state.update({**state["state"], **others})
        return
    numbers = {id(parameter): number for number, parameter in parameters_of(root).items()}
    groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in state["param_groups"]]
    values = {numbers[id(parameter)]: value for parameter, value in state["state"].items()}
    root.load_state_dict({**state, "state": {**values, **others}, "param_groups": groups})


class _Restorer:
    """Nodes -> values. ``live`` is always the value at the same place in the state_dict of what the hook built."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
        self.parameters, self.tensors = parameters, tensors
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.seen: dict[str, Any] = {}
        self.loaded: dict[str, torch.Tensor] = {}
        self.group: dict[str, Any] = {}

    def state(self, node: Node, live: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the state_dict of an optimizer or a scheduler."""
        return {key: self.value(value, live.get(key, _MISSING), f"{path}.{key}") for key, value in node["attributes"]}

    def value(self, node: Node, live: Any, path: str) -> Any:
        """Return the value of a node."""
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
            raise _other(node["class"], live, path)
        return type(live)[node["name"]]

    def _code(self, node: Node, live: Any, path: str) -> Any:
        constant = _constant(node["name"])
        if constant is not None:
            return constant
        if live is _MISSING or name_of(live if isinstance(live, type) else type(live)) != node["name"]:
            raise _other(node["name"], live, path)
        return live

    def _parameter(self, node: Node, live: Any, path: str) -> Any:
        if node["name"] not in self.parameters:
            raise MisfitError(path, f"is the parameter {node['name']}, which another stage has now")
        return self.parameters[node["name"]]

    def _scalar(self, node: Node, live: Any, path: str) -> Any:
        return np.frombuffer(bytes.fromhex(node["hex"]), dtype=np.dtype(node["dtype"]))[0]

    def _array(self, node: Node, live: Any, path: str) -> Any:
        flat = np.frombuffer(self.tensors[node["name"]].numpy().tobytes(), dtype=np.dtype(node["dtype"]))
        return flat.reshape(node["shape"]).copy()

    def _tensor(self, node: Node, live: Any, path: str) -> Any:
        """Return the tensor of a name: one object, such as the learning rate that two groups share."""
        if node["name"] not in self.loaded:
            self.loaded[node["name"]] = self._own(node)
        return self.loaded[node["name"]]

    def _own(self, node: Node) -> torch.Tensor:
        loaded = self.tensors[node["name"]]
        device = self._device(node, loaded)
        if "trained" in node:
            return nn.Parameter(loaded.to(device, copy=True), requires_grad=bool(node["trained"]))
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
        result = torch.Generator(node["device"])
        result.set_state(self.tensors[node["name"]])
        return result

    def _random(self, node: Node, live: Any, path: str) -> Any:
        state = self.value(node["state"], _MISSING, f"{path}.state")
        if node["class"] == name_of(random.Random):
            plain = random.Random()  # noqa: S311 - not for secrets
            plain.setstate(state)
            return plain
        if node["class"] == name_of(np.random.RandomState):
            numpy = np.random.RandomState()
            numpy.set_state(state)
            return numpy
        name = state["bit_generator"]
        if name not in _BIT_GENERATORS:
            raise MisfitError(path, f"draws from {name}, which is not known")
        generator = np.random.Generator(getattr(np.random, name)())
        generator.bit_generator.state = state
        return generator

    # -- containers ------------------------------------------------------------------------------------------------

    def _items(self, node: Node, live: Any, path: str) -> list[Any]:
        before = list(live) if isinstance(live, (list, tuple, collections.deque)) else []
        padded = [*before, *([_MISSING] * (len(node["items"]) - len(before)))]
        return [self.value(item, padded[index], f"{path}[{index}]") for index, item in enumerate(node["items"])]

    def _list(self, node: Node, live: Any, path: str) -> Any:
        return _MAKERS[node["is"]](self._items(node, live, path))

    _tuple = _size = _set = _frozenset = _list

    def _deque(self, node: Node, live: Any, path: str) -> Any:
        return collections.deque(self._items(node, live, path), node["maxlen"])

    def _dict(self, node: Node, live: Any, path: str) -> Any:
        before = live if isinstance(live, dict) else {}
        result = self._dictionary(node, path)
        for key, value in node["items"]:
            own = self.value(key, _MISSING, path)
            result[own] = self.value(value, before.get(own, _MISSING), f"{path}[{own!r}]")
        return result

    def _by_parameter(self, node: Node, live: Any, path: str) -> Any:
        before = live if isinstance(live, dict) else {}
        result = self._dictionary(node, path)
        for name, value in node["items"]:
            if name not in self.parameters:
                raise MisfitError(path, f"has a value for {name}, which the optimizer does not step now")
            parameter = self.parameters[name]
            result[parameter] = self.value(value, before.get(parameter, _MISSING), f"{path}[{name}]")
        return result

    def _dictionary(self, node: Node, path: str) -> Any:
        name = node["class"]
        if name == "defaultdict" and node.get("factory", "") in ("", *FACTORIES):
            result: Any = collections.defaultdict(FACTORIES.get(node.get("factory", "")))
        elif name in ("dict", "OrderedDict", "Counter"):
            result = _MAKERS[name]()
        else:
            raise MisfitError(path, f"is a {name}, which is not known")
        self.seen[path] = result
        return result

    def _groups(self, node: Node, live: Any, path: str) -> Any:
        wanted = [group["params"] for group in node["groups"]]
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        groups = [group for group in live if isinstance(group, dict)] if isinstance(live, list) else []
        present = [[names.get(id(p), "?") for p in group.get("params", ())] for group in groups]
        if present != wanted:
            raise MisfitError(path, f"groups the parameters differently: {_grouping(wanted)} -> {_grouping(present)}")
        restored = []
        for index, (group, stored) in enumerate(zip(groups, node["groups"], strict=True)):
            self.group = group
            values = {
                key: self.value(value, group.get(key, _MISSING), f"{path}[{index}][{key!r}]")
                for key, value in stored["values"].items()
            }
            restored.append({"params": group["params"], **values})
        if groups:
            self.group = groups[0]
        return restored


def _other(name: str, live: Any, path: str) -> MisfitError:
    if live is _MISSING:
        return MisfitError(path, f"is {name}, created during training: the hook builds none, and code is not stored")
    return MisfitError(path, f"was {name} and is {name_of(type(live))} now")


def _constant(text: str) -> Any:
    """Return a dtype or a device by its text, None for anything else."""
    if text.startswith("torch."):
        constant = getattr(torch, text.removeprefix("torch."), None)
        return constant if isinstance(constant, torch.dtype) else None
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
