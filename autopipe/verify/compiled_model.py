"""The user's model as ``torch.compile`` generates it, in plain training.

The compiler does not run under a dispatch mode, and does not draw the random numbers of eager code. So the graphs that
it follows are cut at their random operations::

    linear, gelu | dropout | add, linear | dropout | ...      compiled | seeded, eager | compiled | ...

Code that it does not follow, such as a recurrent layer, runs as it is. If such code draws, the masks would be others:
``UncompilableError``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.draws import Draws, flat_checkpoints, is_random
from autopipe.ir.graph import Graph
from autopipe.verify.plain import Subject
from autopipe.workload import Workload


class UncompilableError(Exception):
    """The model cannot be compiled as a whole with the random numbers of plain training."""


class CompiledModel(Subject):
    """The user's model, compiled. ``graph``: what was captured of it.

    Raises: UncompilableError, also in ``loss``; the errors of the compiler and of the model.
    """

    def __init__(self, workload: Workload, device: torch.device, graph: Graph) -> None:
        super().__init__(workload, device)
        self._num_random = sum(node.num_random for node in graph.nodes)
        if self._num_random and any(node.opaque for node in graph.nodes):
            raise UncompilableError("a module that runs as it is draws random numbers")
        self._draws: Draws | None = None
        self.num_graphs = 0
        call = functools.partial(_called, self.model._call_impl)
        self.model._compiled_call_impl = torch.compile(call, backend=self._generated, dynamic=False)

    def loss(self, part: Any, draws: tuple[int, int, int] | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a microbatch."""
        self._draws = None if draws is None else Draws(*draws)
        with flat_checkpoints():
            loss = self.workload.loss(self.model, part)
        if not self.num_graphs:
            raise UncompilableError("the compiler follows no call of the model")
        if self._draws is not None and self._draws.position != self._num_random:
            raise UncompilableError("code that the compiler does not follow draws random numbers")
        return loss

    def _generated(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        _inline_checkpoints(graph)
        random = _random_nodes(graph, inputs)
        number, part_of = 0, {}
        previous: Node | None = None
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            number += previous is not None and (node in random or previous in random)
            part_of[node], previous = number, node
        from torch.fx.passes.split_module import split_module

        parts = split_module(graph, graph, part_of.__getitem__)
        drawing = {f"submod_{part_of[node]}" for node in random}
        for name, part in list(parts.named_children()):
            setattr(parts, name, _Seeded(part, self._seeds) if name in drawing else _Generated(part))
        forward: Callable[..., Any] = parts.forward
        return forward

    def _seeds(self) -> Draws:
        if self._draws is None:
            raise UncompilableError("a model that draws nothing draws random numbers")
        return self._draws


def _called(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a model: the compiler begins at this function, for it begins at no code of torch, such as Sequential's."""
    return call(*arguments, **named)


def _inline_checkpoints(graph: GraphModule) -> None:
    """Replace calls of ``checkpoint()`` by what they call: a call is one node, and keeps no random number apart."""
    checkpoints = torch.ops.higher_order.tag_activation_checkpoint
    while calls := [node for node in graph.graph.nodes if node.target is checkpoints]:
        call = calls[0]
        body, *arguments = call.args
        assert isinstance(body, Node)
        inner = graph.get_submodule(str(body.target))
        assert isinstance(inner, GraphModule)
        places = [node for node in inner.graph.nodes if node.op == "placeholder"]
        with graph.graph.inserting_before(call):
            values: Any = graph.graph.graph_copy(inner.graph, dict(zip(places, arguments, strict=True)))
        for user in list(call.users):  # each takes one of the results
            user.replace_all_uses_with(values[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(call)
    graph.recompile()


class _Seeded(nn.Module):
    """Runs a random operation with the seed of its position in the model."""

    def __init__(self, operation: nn.Module, seeds: Callable[[], Draws]) -> None:
        super().__init__()
        self.operation, self._seeds = operation, seeds

    def forward(self, *values: Any) -> Any:
        with self._seeds():
            return self.operation(*values)


class _Generated(nn.Module):
    """Compiles a part of a graph for the first tensors that it gets, and runs it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self._run: Callable[..., Any] | None = None

    def forward(self, *values: Any) -> Any:
        if self._run is None:
            self._run = generated(self.part, list(values))
        return self._run(*values)


def generated(part: Any, inputs: list[Any]) -> Callable[..., Any]:
    """Return the code that the compiler generates, for inputs like these."""
    from torch._dynamo import lookup_backend

    code: Callable[..., Any] = lookup_backend("inductor")(part, inputs)
    return code


class _Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Records whether a random operation runs."""

    drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.drew |= is_random(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def _random_nodes(graph: GraphModule, inputs: Sequence[Any]) -> set[Node]:
    """Return the calls that draw, of a graph that is run on tensors without values."""
    from torch._guards import detect_fake_mode
    from torch._subclasses import FakeTensorMode

    fakes = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    drawing: set[Node] = set()

    class Walk(Interpreter):
        def run_node(self, n: Node) -> Any:
            listening = _Listening()  # type: ignore[no-untyped-call]  # untyped in torch
            with listening:
                value = super().run_node(n)
            if listening.drew:
                drawing.add(n)
            return value

    tensors = [
        fakes.from_tensor(value) if isinstance(value, torch.Tensor) and not _is_fake(value) else value
        for value in inputs
    ]
    with fakes:
        Walk(graph).run(*tensors)
    return drawing


def _is_fake(value: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return isinstance(value, FakeTensor)
