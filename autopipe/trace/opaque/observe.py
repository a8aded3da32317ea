"""Observe the inputs and outputs of modules on real batches of several sizes, and what their forwards change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopipe.draws import Draws, flat_checkpoints
from autopipe.trace.record.faked_model import first_names
from autopipe.trace.record.model_snapshot import left_as_it_was
from autopipe.trace.record.values import version_of
from autopipe.workload import Item, Workload
from autopipe.workload.batches.layouts import copied_item
from autopipe.workload.cutting.objects import register_objects

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_NUMBERS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "equal", "allclose")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class Leaf:
    """A tensor that a module received or returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    order: tuple[int, ...]  # dimensions by memory order, slowest first
    alias: int = -1  # index of the input that shares its memory, or -1
    strided: bool = True


@dataclass(frozen=True)
class Part:
    """An entry of a result."""

    leaves: tuple[Any, ...]  # a ``Leaf`` for each tensor; other values unchanged
    structure: Any  # the nesting of the leaves


@dataclass
class Call:
    """One call of a module."""

    inputs: list[Leaf]  # its tensors
    plain: bool  # whether the inputs are tensors and plain values, in lists, tuples and dicts
    outputs: list[Part] = field(default_factory=list)  # the result, one part for each entry of a container
    container: Any = None  # the structure around the entries
    changed: tuple[int, ...] = ()  # indices of inputs that were changed in place
    left: tuple[tuple[str, str], ...] = ()  # (path, attribute) of attributes that were bound to tensors


@dataclass
class Observed:
    """The observed runs of one model."""

    calls: list[dict[str, list[Call]]] = field(default_factory=list)  # for each run: path -> its calls, in order
    written: dict[str, set[str]] = field(default_factory=dict)  # path -> first names of the buffers that it writes
    parameters: dict[str, set[str]] = field(default_factory=dict)  # path -> the parameters that it writes
    # path -> the parameters and buffers of other modules that it reads
    foreign: dict[str, set[str]] = field(default_factory=dict)


def observe(workload: Workload, model: nn.Module, items: list[Item], seed: int) -> Observed:
    """Run the model on each of ``items`` and record the inputs and outputs of its modules. The model is restored.

    Memory: the inputs of a module are held until it returns; no autograd graph is kept afterwards.
    """
    observed = Observed()
    for index, item in enumerate(items):
        batch = copied_item(item)
        calls: dict[str, list[Call]] = {}
        with contextlib.ExitStack() as stack:
            for context in (left_as_it_was(model), _watched(model, calls, observed), flat_checkpoints()):
                stack.enter_context(context)
            stack.enter_context(Draws(seed + index, 0, index))
            stack.enter_context(torch.enable_grad())
            workload.loss(model, batch)
        observed.calls.append(calls)
    return observed


@contextlib.contextmanager
def _watched(model: nn.Module, calls: dict[str, list[Call]], observed: Observed) -> Iterator[None]:
    names = first_names(model)[0]
    hooks: list[Any] = []
    watches: list[_Watch] = []
    for path, module in model.named_modules():
        if not path or (not module._modules and type(module).__module__.startswith("torch.nn.modules.")):
            continue
        watch = _Watch(path, module, names, calls, observed)
        watches.append(watch)
        hooks.append(module.register_forward_pre_hook(watch.before, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(watch.after, with_kwargs=True))
    try:
        with _Reads(names, watches):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Reads(TorchFunctionMode):
    """Records the parameters and buffers of other modules that a running module reads."""

    def __init__(self, names: Mapping[int, str], watches: list[_Watch]) -> None:
        super().__init__()
        self.names, self.watches = names, watches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for value in (*args, *(kwargs or {}).values()) for leaf in _entries(value)]
        known = [leaf for leaf in given if isinstance(leaf, Tensor) and id(leaf) in self.names]
        # reading a shape or a device does not read the content
        if known and (func.__name__ in _NUMBERS or any(isinstance(leaf, Tensor) for leaf in _entries(result))):
            for watch in self.watches:
                watch.read(known)
        return result


def _entries(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


class _Watch:
    """Records the calls of one module."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        names: Mapping[int, str],
        calls: dict[str, list[Call]],
        observed: Observed,
    ) -> None:
        self.path, self.names, self.observed = path, names, observed
        self.parts = list(module.named_modules())
        self._own = {id(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors}
        self.calls = calls.setdefault(path, [])
        self._open: list[tuple[Call, list[Tensor], list[int], Any]] = []
        observed.written.setdefault(path, set()).update(
            names[id(tensor)]
            for part in module.modules()
            if isinstance(part, _NormBase) and part.training
            for tensor in (part.running_mean, part.running_var, part.num_batches_tracked)
            if tensor is not None and id(tensor) in names
        )

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        register_objects((args, kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = Call([_leaf(tensor, ()) for tensor in tensors], all(_is_plain(leaf) for leaf in leaves))
        self._open.append((call, tensors, [version_of(tensor) for tensor in tensors], self._state()))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, tensors, versions, state = self._open.pop()
        register_objects(output)
        entries, call.container = pytree.tree_flatten(output, is_leaf=lambda value: value is not output)
        for entry in entries:
            leaves, structure = pytree.tree_flatten(entry)
            seen = (_leaf(leaf, tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            call.outputs.append(Part(tuple(seen), structure))
        call.changed = tuple(i for i, (t, v) in enumerate(zip(tensors, versions, strict=True)) if version_of(t) != v)
        self._compare(call, state)
        self.calls.append(call)

    def read(self, tensors: list[Tensor]) -> None:
        """Record tensors of the model that are read while the module runs and are not among its arguments."""
        if not self._open:
            return
        given = {id(tensor) for tensor in self._open[-1][1]}
        foreign = {self.names[id(tensor)] for tensor in tensors if id(tensor) not in given | self._own}
        self.observed.foreign.setdefault(self.path, set()).update(foreign)

    def _state(self) -> tuple[list[tuple[Any, str, Any, int]], list[tuple[str, dict[str, Any]]]]:
        """Return the parameters and buffers of the module and its submodules, and their other attributes.

        Each tensor comes with its version counter.
        """
        tensors: list[tuple[Any, str, Any, int]] = []
        attributes = []
        for path, part in self.parts:
            for registry in (part._parameters, part._buffers):
                for key, tensor in registry.items():
                    tensors.append((registry, key, tensor, 0 if tensor is None else version_of(tensor)))
            kept = {key: value for key, value in vars(part).items() if key not in _REGISTRIES}
            attributes.append((path, kept))
        return tensors, attributes

    def _compare(self, call: Call, before: Any) -> None:
        tensors, attributes = before
        for registry, key, tensor, version in tensors:
            if tensor is None or (registry.get(key) is tensor and version_of(tensor) == version):
                continue
            kept = self.observed.parameters if isinstance(tensor, nn.Parameter) else self.observed.written
            if id(tensor) in self.names:
                kept.setdefault(self.path, set()).add(self.names[id(tensor)])
        parts = dict(self.parts)
        call.left = tuple(
            (path, key)
            for path, kept in attributes
            for key, value in vars(parts[path]).items()
            if key not in _REGISTRIES and kept.get(key) is not value and _holds_tensor(value)
        )


def _leaf(tensor: Tensor, inputs: Any) -> Leaf:
    strided = tensor.layout == torch.strided and not tensor.is_nested
    strides = tensor.stride() if strided else ()
    order = tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))
    memory = _memory(tensor)
    alias = -1 if memory is None else next((i for i, t in enumerate(inputs) if _memory(t) == memory), -1)
    shape = tuple(int(size) for size in tensor.shape) if not tensor.is_nested else ()
    return Leaf(shape, tensor.dtype, tensor.device, tensor.requires_grad, order, alias, strided)


def _memory(tensor: Tensor) -> int | None:
    """Return a key of the memory of a tensor; None if it has none of its own, as inside of torch.func.vmap."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _is_plain(leaf: Any) -> bool:
    """Return whether an input can be that of a node. A tensor of torch.func exists only inside of its call."""
    if isinstance(leaf, Tensor):
        return not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
    return isinstance(leaf, _PLAIN)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
