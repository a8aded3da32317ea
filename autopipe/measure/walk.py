"""Walks over the nodes one by one: values, what each costs roughly, and what each keeps for the backward.

The times of single nodes are too short to add up to anything; they only say how a measured run of nodes divides among
them (``Weights``). Nodes that are the same but for their weights' values are timed once.
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
from autopipe.errors import AutopipeError, ProfileError
from autopipe.ir.graph import Node
from autopipe.ir.profile import NodeWork
from autopipe.measure.clock import Clock
from autopipe.measure.live import Workspace
from autopipe.measure.piece import State, autocast_of, carrying, grad_of, storage_of, tensors_of
from autopipe.measure.work import WorkCounter

_REPEATS = 3


@dataclass
class Values:
    """The values that are alive, without their history. ``grads``: through which of a value's tensors one flows."""

    by_name: dict[str, Any]
    grads: dict[str, tuple[bool, ...]] = field(default_factory=dict)

    def fresh(self, name: str, *, private: bool = False) -> Any:
        """Return a value as a stage would receive it, its tensors leaves; ``private``: as copies of the memory."""
        flags = iter(self.grads.get(name, ()))

        def leaf(tensor: Tensor) -> Tensor:
            found = tensor.detach().clone() if private else tensor.detach()
            return found.requires_grad_(next(flags, False))

        return pytree.tree_map_only(Tensor, leaf, self.by_name[name])

    def store(self, name: str, value: Any) -> None:
        """Keep a result, cut off from its history."""
        self.note(name, value)
        self.by_name[name] = pytree.tree_map_only(Tensor, Tensor.detach, value)

    def note(self, name: str, value: Any) -> None:
        """Keep only through which of a value's tensors a gradient flows."""
        self.grads[name] = tuple(tensor.requires_grad for tensor in tensors_of(value))


@contextlib.contextmanager
def region(node: fx.Node, *, grad: bool) -> Iterator[None]:
    """Run as the user's code does at this node; ``grad`` False turns gradients off whatever the node says."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad and grad_of(node)))
        for device, dtype, enabled, cache in autocast_of(node):
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


def call(node: fx.Node, values: Mapping[str, Any], state: State) -> Any:
    """Run one node."""

    def argument(source: fx.Node) -> Any:
        return state.attribute(str(source.target)) if source.op == "get_attr" else values[source.name]

    args = fx.node.map_arg(node.args, argument)
    kwargs = fx.node.map_arg(node.kwargs, argument)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function = state.attribute(str(node.target)) if node.op == "call_module" else node.target
    assert callable(function)
    return function(*args, **kwargs)


def inputs_of(nodes: Sequence[fx.Node]) -> list[str]:
    """Return the values that a run of nodes reads and does not make, in order of first use."""
    made = {node.name for node in nodes}
    read = [source for node in nodes for source in node.all_input_nodes if source.op != "get_attr"]
    return list(dict.fromkeys(source.name for source in read if source.name not in made))


def describe(value: Any) -> Any:
    """Return what of a value decides how long its use takes, as something to compare."""
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


def signature(node: fx.Node, values: Values, state: State) -> Any:
    """Return what decides how long a node takes. Equal signatures are measured once."""
    reads: list[Any] = []

    def argument(source: fx.Node) -> str:
        if source.op == "get_attr":
            found = state.attribute(str(source.target))
            reads.append((describe(found), isinstance(found, nn.Parameter) and found.requires_grad))
        else:
            reads.append((describe(values.by_name[source.name]), values.grads.get(source.name, ())))
        return f"%{len(reads)}"

    args, kwargs = fx.node.map_arg(node.args, argument), fx.node.map_arg(node.kwargs, argument)
    target: Any = str(node.target)
    if node.op == "call_module":
        module = state.attribute(target)
        held = (*module.named_parameters(), *module.named_buffers())
        tensors = [(name, describe(tensor), tensor.requires_grad) for name, tensor in held]
        target = type(module).__qualname__, repr(module), module.training, tuple(tensors)
    elif node.op == "call_function":
        target = torch.typename(node.target) + getattr(node.target, "__qualname__", str(node.target))
    return node.op, target, describe(args), describe(kwargs), tuple(reads), grad_of(node), str(autocast_of(node))


@dataclass
class Weights:
    """Rough forward and backward seconds of single nodes, their workspace and work. ``timed``: signature -> seconds.

    ``workspace``: signature -> bytes. ``work``: signature -> operations and bytes. Nodes of one kind are measured once.
    """

    clock: Clock
    timed: dict[Any, tuple[float, float]] = field(default_factory=dict)
    workspace: dict[Any, int] = field(default_factory=dict)
    work: dict[Any, NodeWork] = field(default_factory=dict)
    overhead: float = 0.0

    def calibrate(self) -> None:
        """Measure what a backward costs that does nothing, to take it off the others."""
        tiny = torch.zeros(1, device=self.clock.device, requires_grad=True)
        grad = torch.ones_like(tiny)
        seconds = []
        for _ in range(10):
            nothing = tiny.view(1)
            seconds.append(self.clock.time(functools.partial(torch.autograd.grad, nothing, tiny, grad))[1])
        self.overhead = min(seconds)

    def step(self, node: fx.Node, about: Node, values: Values, root: nn.Module) -> tuple[Any, float, float]:
        """Run one node, keep its value, and return its signature and seconds."""
        state = State(root, self.clock.device)
        key = signature(node, values, state)
        names = inputs_of([node])
        repeats = 1 if key in self.timed else _REPEATS
        forward, backward, result = float("inf"), float("inf"), None
        given: dict[str, Any] = {}
        if key not in self.workspace:
            self.workspace[key], self.work[key] = self._counted(node, *self._given(names, about, values), state)
        for _ in range(repeats):
            given, leaves = self._given(names, about, values)
            with region(node, grad=True):
                result, f = self.clock.time(functools.partial(call, node, given, state))
            b = 0.0 if key in self.timed else self._backward(result, [*leaves, *_trained(state)])
            forward, backward = min(forward, f), min(backward, b)
        self.timed.setdefault(key, (forward, backward))
        if about.mutates:
            for name in about.mutates:
                if name in given:
                    values.note(name, given[name])
            values.note(node.name, result)
            with region(node, grad=False):  # once on the values themselves, so that all who share the memory see it
                values.by_name[node.name] = call(node, values.by_name, state)
        else:
            values.store(node.name, result)
        return key, *self.timed[key]

    @staticmethod
    def _given(names: Sequence[str], about: Node, values: Values) -> tuple[dict[str, Any], list[Tensor]]:
        """Return what a node is called with, and through which tensors of it a gradient flows."""
        given = {name: values.fresh(name, private=bool(about.mutates)) for name in names}
        leaves = [tensor for value in given.values() for tensor in tensors_of(value) if tensor.requires_grad]
        # a leaf cannot be changed in place
        return (no_leaf(given, True) if about.mutates else given), leaves

    def _counted(
        self, node: fx.Node, given: dict[str, Any], leaves: list[Tensor], state: State
    ) -> tuple[int, NodeWork]:
        """Return what the node's forward holds and gives back, or its backward holds at once, whichever is more.

        And how much both compute and move.
        """
        with Workspace(self.clock.device) as forward, WorkCounter() as ahead, region(node, grad=True):
            result = call(node, given, state)
        with Workspace(self.clock.device) as backward:
            run = _backward_of(result, [*leaves, *_trained(state)])
            with WorkCounter() as behind:
                if run is not None:
                    run()
        return max(forward.peak - forward.left, backward.peak), NodeWork(ahead.counted, behind.counted)

    def _backward(self, result: Any, leaves: list[Tensor]) -> float:
        run = _backward_of(result, leaves)
        if run is None:
            return 0.0
        _, seconds = self.clock.time(run)
        return max(seconds - self.overhead, 1e-6)


def _backward_of(result: Any, leaves: list[Tensor]) -> Callable[[], Any] | None:
    """Return the backward of a result with gradients of ones, to be run once; None where no gradient flows."""
    outputs = carrying(result)
    if not outputs or not leaves:
        return None
    grads = [torch.ones_like(output) for output in outputs]
    return functools.partial(torch.autograd.grad, outputs, leaves, grads, allow_unused=True)


def _trained(state: State) -> list[Tensor]:
    return [parameter for parameter in state.parameters if parameter.requires_grad]


class Saved:
    """Counts the bytes that each node keeps for the backward: memory counted once, parameters not at all."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.keepers: dict[int, str] = {}  # memory -> the node that is the first to keep it
        self._held: list[Tensor] = []  # so that no memory is given out twice while it is being counted

    def run(self, nodes: Sequence[fx.Node], values: dict[str, Any], state: State, counted: set[int]) -> None:
        """Run nodes with gradients, adding results to ``values``; ``counted``: memory that is counted already."""
        for node in nodes:
            self.bytes[node.name] = 0

            def pack(tensor: Tensor, name: str = node.name) -> Tensor:
                memory = storage_of(tensor)
                if memory not in counted and memory not in state.storages():
                    counted.add(memory)
                    self.keepers[memory] = name
                    self.bytes[name] += sum(part.untyped_storage().nbytes() for part in sparse.stored(tensor))
                self._held.append(tensor.detach())
                return tensor

            with region(node, grad=True), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                values[node.name] = call(node, values, state)


def no_leaf(value: Any, private: bool) -> Any:
    """Return a value whose memory may be changed in place (``private``): a leaf that requires a gradient may not."""
    return pytree.tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad else t, value) if private else value


@contextlib.contextmanager
def explained(node: Node, microbatch_size: int) -> Iterator[None]:
    """Turn what a node raises into a ProfileError with the user's line."""
    where = node.place or node.module_path
    try:
        yield
    except AutopipeError:
        raise
    except torch.OutOfMemoryError as error:
        raise ProfileError(
            f"the nodes from {node.name} on do not fit the device, even by themselves, "
            f"at a microbatch of {microbatch_size}",
            where=where,
            remedy="profile smaller microbatches: --microbatch-sizes 1,2",
        ) from error
    except Exception as error:
        raise ProfileError(
            f"measuring {node.name} ({node.target}) at a microbatch of {microbatch_size} failed: "
            f"{type(error).__name__}: {error}",
            where=where,
            remedy="run the model with that batch size by itself",
        ) from error
