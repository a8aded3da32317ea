"""Run the nodes one by one: values, rough times, and the bytes that each keeps for the backward.

The times of single nodes are too short to be added up; they only decide how the time of a segment is divided among its
nodes (``NodeTimer``). Nodes that differ only in the values of their weights are timed once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopipe import sparse
from autopipe.casts import CastObserver
from autopipe.devices import arguments_on, autocast_on
from autopipe.errors import AutopipeError, ProfileError
from autopipe.ir.graph import Node
from autopipe.ir.profile import NodeWork
from autopipe.measure.clock import LONG_SECONDS, Clock
from autopipe.measure.live import Workspace
from autopipe.measure.piece import (
    Piece,
    StateCopies,
    grad_of,
    storage_of,
    tensors_of,
    with_history,
)
from autopipe.measure.work import WorkCounter

_REPEATS = 3


@dataclass
class Values:
    """The values that are still needed, without their autograd history."""

    by_name: dict[str, Any]
    grads: dict[str, tuple[bool, ...]] = field(default_factory=dict)  # by tensor of a value: does a gradient flow?

    def fresh(self, name: str, *, private: bool = False) -> Any:
        """Return a value as a stage receives it, with its tensors as leaves. ``private``: copy the memory."""
        flags = iter(self.grads.get(name, ()))

        def leaf(tensor: Tensor) -> Tensor:
            detached = tensor.detach().clone() if private else tensor.detach()
            return detached.requires_grad_(next(flags, False))

        return pytree.tree_map_only(Tensor, leaf, self.by_name[name])

    def store(self, name: str, value: Any) -> None:
        """Keep a result without its history."""
        self.note(name, value)
        self.by_name[name] = pytree.tree_map_only(Tensor, Tensor.detach, value)

    def note(self, name: str, value: Any) -> None:
        """Record through which tensors of a value a gradient flows."""
        self.grads[name] = tuple(tensor.requires_grad for tensor in tensors_of(value))


@contextlib.contextmanager
def region(node: fx.Node, device: torch.device, *, grad: bool) -> Iterator[None]:
    """Enter the grad mode and autocast of the user's code at a node. ``grad=False`` disables gradients in any case."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad and grad_of(node)))
        for kind, dtype, enabled, cache in autocast_on(device, node.meta):
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


def call(node: fx.Node, values: Mapping[str, Any], state: StateCopies) -> Any:
    """Run one node."""

    def argument(source: fx.Node) -> Any:
        return state.attribute(str(source.target)) if source.op == "get_attr" else values[source.name]

    args, kwargs = (fx.node.map_arg(part, argument) for part in arguments_on(state.device, node.args, node.kwargs))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function = state.attribute(str(node.target)) if node.op == "call_module" else node.target
    assert callable(function)
    return function(*args, **kwargs)


def inputs_of(nodes: Sequence[fx.Node]) -> list[str]:
    """Return the values that nodes read and do not compute, in order of first use."""
    computed = {node.name for node in nodes}
    read = [source for node in nodes for source in node.all_input_nodes if source.op != "get_attr"]
    return list(dict.fromkeys(source.name for source in read if source.name not in computed))


def describe(value: Any) -> Any:
    """Return the properties of a value that decide how long its use takes, in a form that can be compared."""
    if isinstance(value, Tensor):
        strides = str(value.layout) if sparse.is_sparse(value) else value.stride()
        return tuple(value.shape), strides, str(value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *map(describe, value)
    if isinstance(value, dict):
        return "dict", *((str(key), describe(entry)) for key, entry in value.items())
    if isinstance(value, slice):
        return "slice", describe(value.start), describe(value.stop), describe(value.step)
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else str(type(value)) + str(value)


def signature(node: fx.Node, values: Values, state: StateCopies) -> Any:
    """Return what decides how long a node takes. Nodes of equal signatures are measured once."""
    reads: list[Any] = []

    def argument(source: fx.Node) -> str:
        if source.op == "get_attr":
            value = state.attribute(str(source.target))
            reads.append((describe(value), isinstance(value, nn.Parameter) and value.requires_grad))
        else:
            reads.append((describe(values.by_name[source.name]), values.grads.get(source.name, ())))
        return f"%{len(reads)}"

    args, kwargs = fx.node.map_arg(node.args, argument), fx.node.map_arg(node.kwargs, argument)
    target: Any = str(node.target)
    if node.op == "call_module":
        module = state.attribute(target)
        named = (*module.named_parameters(), *module.named_buffers())
        tensors = [(name, describe(tensor), tensor.requires_grad) for name, tensor in named]
        target = type(module).__qualname__, repr(module), module.training, tuple(tensors)
    elif node.op == "call_function":
        target = torch.typename(node.target) + getattr(node.target, "__qualname__", str(node.target))
    return (
        node.op,
        target,
        describe(args),
        describe(kwargs),
        tuple(reads),
        grad_of(node),
        str(autocast_on(state.device, node.meta)),
    )


@dataclass
class NodeTimer:
    """Times single nodes, and counts their workspace and work. Nodes of one signature are measured once."""

    clock: Clock
    cast_once: frozenset[int] = frozenset()  # ids of the parameters that a stage may replace by a cast
    replaced: dict[int, torch.dtype] = field(default_factory=dict)  # id of each that a cast replaces -> its dtype
    timed: dict[Any, tuple[float, float]] = field(default_factory=dict)  # signature -> forward and backward seconds
    workspace: dict[Any, int] = field(default_factory=dict)  # signature -> bytes
    work: dict[Any, NodeWork] = field(default_factory=dict)  # signature -> operations and bytes
    # signature -> for each parameter, in order of first use, the dtype of the only cast through which it is read
    casts: dict[Any, tuple[torch.dtype | None, ...]] = field(default_factory=dict)
    overhead: float = 0.0  # seconds of a backward that does nothing

    def calibrate(self) -> None:
        """Measure the overhead of a backward, which is subtracted from all others."""
        tiny = torch.zeros(1, device=self.clock.device, requires_grad=True)
        grad = torch.ones_like(tiny)
        seconds = []
        for _ in range(10):
            nothing = tiny.view(1)
            seconds.append(self._kernels(functools.partial(torch.autograd.grad, nothing, tiny, grad))[1])
        self.overhead = self.clock.typical(seconds)

    def step(self, node: fx.Node, about: Node, values: Values, root: nn.Module) -> tuple[Any, float, float]:
        """Run one node, keep its value, and return its signature and seconds."""
        state = StateCopies(root, self.clock.device)
        key = signature(node, values, state)
        names = inputs_of([node])
        if self.cast_once and autocast_on(state.device, node.meta):
            if key not in self.casts:
                self.casts[key] = self._casts(node, self._arguments(names, about, values)[0], state)
            pairs = zip(state.originals, self.casts[key], strict=True)
            casts = {id(p): dtype for p, dtype in pairs if dtype is not None and id(p) in self.cast_once}
            state = StateCopies(root, self.clock.device, casts)
        repeats = 1 if key in self.timed else _REPEATS
        forwards, backwards, result = list[float](), list[float](), None
        arguments: dict[str, Any] = {}
        if key not in self.workspace:
            self.workspace[key], self.work[key] = self._counted(node, *self._arguments(names, about, values), state)
        for _ in range(repeats):
            arguments, leaves = self._arguments(names, about, values)
            with region(node, self.clock.device, grad=True):
                result, f = self._kernels(functools.partial(call, node, arguments, state))
            forwards.append(f)
            backwards.append(0.0 if key in self.timed else self._backward(result, [*leaves, *_trained(state)]))
            if forwards[-1] + backwards[-1] > LONG_SECONDS / 4:  # it ran before, when its work was counted
                break
        self.timed.setdefault(key, (self.clock.typical(forwards), self.clock.typical(backwards)))
        if about.mutates:
            for name in about.mutates:
                if name in arguments:
                    values.note(name, arguments[name])
            values.note(node.name, result)
            with region(
                node, self.clock.device, grad=False
            ):  # once on the values themselves, so that all that share the memory see it
                values.by_name[node.name] = call(node, values.by_name, state)
        else:
            values.store(node.name, result)
        self.replaced.update(state.replaced)
        return key, *self.timed[key]

    def _kernels(self, run: Callable[[], Any]) -> tuple[Any, float]:
        return self.clock.time(run, kernels_only=True)  # the host calls a single node more slowly than a stage does

    @staticmethod
    def _arguments(names: Sequence[str], about: Node, values: Values) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the inputs of a node, and the tensors among them through which a gradient flows."""
        arguments = {name: values.fresh(name, private=bool(about.mutates)) for name in names}
        leaves = [tensor for value in arguments.values() for tensor in tensors_of(value) if tensor.requires_grad]
        # a leaf cannot be changed in place
        return (writable(arguments, True) if about.mutates else arguments), leaves

    @staticmethod
    def _casts(node: fx.Node, arguments: dict[str, Any], state: StateCopies) -> tuple[torch.dtype | None, ...]:
        with CastObserver() as observer, region(node, state.device, grad=True):
            call(node, arguments, state)
        dtypes = {id(parameter): cast.dtype for parameter, cast in observer.only_cast()}
        return tuple(dtypes.get(id(copied)) for copied in state.parameters)

    def _counted(
        self, node: fx.Node, arguments: dict[str, Any], leaves: list[Tensor], state: StateCopies
    ) -> tuple[int, NodeWork]:
        """Return the temporary memory of the forward or the backward, whichever is larger, and the work of both."""
        with (
            Workspace(self.clock.device) as forward,
            WorkCounter() as forward_work,
            region(node, self.clock.device, grad=True),
        ):
            result = call(node, arguments, state)
        with Workspace(self.clock.device) as backward:
            run = _backward_of(result, [*leaves, *_trained(state)])
            with WorkCounter() as backward_work:
                if run is not None:
                    run()
        workspace = max(forward.peak - forward.left, backward.peak)
        return workspace, NodeWork(forward_work.counted, backward_work.counted)

    def _backward(self, result: Any, leaves: list[Tensor]) -> float:
        run = _backward_of(result, leaves)
        if run is None:
            return 0.0
        _, seconds = self._kernels(run)
        return max(seconds - self.overhead, 1e-6)


def _backward_of(result: Any, leaves: list[Tensor]) -> Callable[[], Any] | None:
    """Return a function that runs the backward of a result once, with gradients of ones; None if none flows."""
    outputs = with_history(result)
    if not outputs or not leaves:
        return None
    grads = [torch.ones_like(output) for output in outputs]
    return functools.partial(torch.autograd.grad, outputs, leaves, grads, allow_unused=True)


def _trained(state: StateCopies) -> list[Tensor]:
    return [parameter for parameter in state.parameters if parameter.requires_grad]


def timed_pass(clock: Clock, piece: Piece, values: Values, *, private: bool) -> tuple[float, float]:
    """Time a forward and a backward of a piece, as a stage runs them. ``private``: it may change its inputs."""
    inputs = [writable(values.fresh(name, private=private), private) for name in piece.inputs]
    results, forward = clock.time(lambda: piece(inputs))
    outputs = with_history(results)
    if not outputs:
        return forward, 0.0
    grads = [torch.ones_like(output) for output in outputs]
    _, backward = clock.time(lambda: torch.autograd.backward(outputs, grads))
    return forward, backward


class SavedBytes:
    """Counts the bytes that each node keeps for the backward: shared memory once, without parameters."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.keepers: dict[int, str] = {}  # memory -> the node that is the first to keep it
        self._alive: list[Tensor] = []  # keeps memory allocated, so that no address is reused during the count

    def run(self, nodes: Sequence[fx.Node], values: dict[str, Any], state: StateCopies, counted: set[int]) -> None:
        """Run nodes with gradients, and add their results to ``values``. ``counted``: memory not to count again."""
        for node in nodes:
            self.bytes[node.name] = 0

            def pack(tensor: Tensor, name: str = node.name) -> Tensor:
                memory = storage_of(tensor)
                if memory not in counted and memory not in state.storages():
                    counted.add(memory)
                    self.keepers[memory] = name
                    self.bytes[name] += sum(part.untyped_storage().nbytes() for part in sparse.stored(tensor))
                self._alive.append(tensor.detach())
                return tensor

            with (
                region(node, state.device, grad=True),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            ):
                values[node.name] = call(node, values, state)


def writable(value: Any, private: bool) -> Any:
    """Return a value whose memory may be changed in place if ``private``: autograd forbids that for its leaves."""
    return pytree.tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad else t, value) if private else value


@contextlib.contextmanager
def explained(node: Node, microbatch_size: int) -> Iterator[None]:
    """Turn an exception of a node into a ProfileError with the user's line."""
    where = node.place or node.module_path
    try:
        yield
    except AutopipeError:
        raise
    except torch.OutOfMemoryError as error:
        raise ProfileError(
            f"out of memory: the nodes from {node.name} on do not fit the device, even alone, "
            f"at a microbatch of {microbatch_size}",
            where=where,
            remedy="profile smaller microbatches: --microbatch-sizes 1,2",
        ) from error
    except Exception as error:
        raise ProfileError(
            f"measuring {node.name} ({node.target}) at a microbatch of {microbatch_size} failed: "
            f"{type(error).__name__}: {error}",
            where=where,
            remedy="run the model alone with that batch size",
        ) from error
