"""Run a graph as a team of members would, in one process: all of them node by node, with their parts added in order.

It reads an ``Axis`` and nothing else, so it is independent of the code that is generated for a team. It verifies axes,
and it is what a team is compared with. Of a random draw, every member makes the whole mask and takes its part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional

from autopipe import draws
from autopipe.ir.graph import Graph
from autopipe.ir.teams.axes import MULTIHEAD, Axis, Place, Rewrite
from autopipe.team import attention_with_mask
from autopipe.trace.axes.find import attribute
from autopipe.trace.axes.sums_over_members import COMBINED, Combination, cut, entered, summed
from autopipe.trace.graph.replay import context_of

Each = list[Any]  # one value for each member

_Arguments = list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class TeamOutcome:
    """A forward and backward pass of a team."""

    outputs: tuple[list[Tensor], ...]  # for each output of the graph: of each member
    gradients: dict[str, list[Tensor | None]]  # for each parameter: of each member, of its part


class Members:
    """A team of ``team`` members that shard ``axes``, a set without conflicts (``ir.teams.axis_sets``)."""

    def __init__(self, graph: Graph, module: fx.GraphModule, axes: Sequence[Axis], team: int) -> None:
        self._graph = graph
        self._module = module
        self._team = team
        self._cuts = {p.name: (axis, p) for axis in axes for p in (*axis.parameters, *axis.state)}
        self._carried = {place.name: (axis, place) for axis in axes for place in axis.values}
        self._rewrites: dict[str, list[tuple[Axis, Rewrite]]] = {}
        for axis in axes:
            for rewrite in axis.rewrites:
                self._rewrites.setdefault(rewrite.node, []).append((axis, rewrite))
        self._entries = {
            (entry.value, node): (axis.name, entry.value)
            for axis in axes
            for entry in axis.entries
            for node in entry.readers
        }
        self._sums = {entry.node: (axis, entry.how) for axis in axes for entry in axis.sums}
        self._draws = {node: axis for axis in axes for node in axis.draws}
        self._names: dict[int, str] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._names.setdefault(id(tensor), graph.aliases.get(name, name))
        self._state: dict[str, Each] = {}
        self._values: dict[str, Each] = {}
        self._entered: dict[tuple[str, str], Each] = {}
        self._where = 0, 0, 0

    def run(self, leaves: Mapping[str, Tensor], where: tuple[int, int, int]) -> TeamOutcome:
        """Run one microbatch. ``where``: (run seed, minibatch, microbatch). The model's state does not change."""
        self._where, self._values, self._entered, self._state = where, {}, {}, {}
        outputs: tuple[list[Tensor], ...] = ()
        for node in self._module.graph.nodes:
            if node.op == "output":
                outputs = tuple(self._values[value.name] for value in node.args[0])
            elif node.op == "placeholder":
                self._values[node.name] = [leaves[node.name].clone() for _ in range(self._team)]
            elif node.op == "get_attr":
                self._values[node.name] = self._tensor(attribute(self._module, node.target), node.target)
            else:
                self._values[node.name] = self._called(node)
        losses = [loss for loss in outputs[0] if loss.requires_grad]
        if losses:
            torch.autograd.backward(losses)
        names = [name for name in self._graph.parameters if name in self._state]
        return TeamOutcome(outputs, {name: [tensor.grad for tensor in self._state[name]] for name in names})

    def _tensor(self, value: Any, target: str) -> Each:
        """Return each member's part of a parameter, buffer or constant."""
        if not isinstance(value, Tensor):
            return [value] * self._team
        name = self._names.get(id(value), target)
        if name not in self._state:
            axis_place = self._cuts.get(name)
            parts = []
            for member in range(self._team):
                part = value.detach()
                if axis_place is not None:
                    part = cut(part, axis_place[1], axis_place[0].size, member, self._team)
                parts.append(part.clone().requires_grad_(value.requires_grad))
            self._state[name] = parts
        return self._state[name]

    # --- one call -----------------------------------------------------------------------------------------------------

    def _called(self, node: fx.Node) -> Each:
        run = self._function(node)
        arguments = [self._arguments(node, member) for member in range(self._team)]
        with context_of(node.meta):
            if node.name in self._sums:
                axis, how = self._sums[node.name]
                operand = self._place_of_classes(node)
                call = Combination(node, run, arguments, axis, self._team, operand, self._reseeded(node))
                return multihead(call) if how == MULTIHEAD else COMBINED[how](call)
            if node.name in self._draws:
                axis = self._draws[node.name]
                place = self._carried[node.name][1]
                with self._seeded(node):
                    return _drawn(node, self._module, arguments, place, axis.size, self._team, self._reseeded(node))
            each: Each = []
            for args, kwargs in arguments:
                with self._seeded(node):
                    each.append(run(len(each), args, kwargs))
            return each

    def _function(self, node: fx.Node) -> Callable[[int, tuple[Any, ...], dict[str, Any]], Any]:
        """Return the call of a node for a member."""
        if node.op == "call_method":
            return lambda member, args, kwargs: getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_function":
            function: Any = node.target
            return lambda member, args, kwargs: function(*args, **kwargs)
        module = self._module.get_submodule(str(node.target))
        own = {name: self._tensor(t, f"{node.target}.{name}") for name, t in _state_of(module)}

        def called(member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not own:
                return module(*args, **kwargs)
            return functional_call(module, {name: each[member] for name, each in own.items()}, args, kwargs)

        return called

    def _arguments(self, node: fx.Node, member: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a member's call: entered where they enter, and with its sizes."""

        def value(operand: fx.Node) -> Any:
            key = self._entries.get((operand.name, node.name))
            if key is None:
                return self._values[operand.name][member]
            if key not in self._entered:
                self._entered[key] = entered(self._values[operand.name])
            return self._entered[key][member]

        return self._rewritten(node.name, fx.map_arg(node.args, value), dict(fx.map_arg(node.kwargs, value)))

    def _rewritten(
        self, node: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for axis, rewrite in self._rewrites.get(node, ()):
            first, *rest = rewrite.path
            if isinstance(first, int):
                args = _replaced(args, [first, *rest], axis, self._team)
            else:
                kwargs[first] = _replaced(kwargs[first], rest, axis, self._team)
        return args, kwargs

    def _place_of_classes(self, node: fx.Node) -> Place | None:
        """Return where the first operand of a call carries the axis."""
        first = node.args[0] if node.args else None
        carried = self._carried.get(first.name) if isinstance(first, fx.Node) else None
        return carried[1] if carried is not None else None

    def _reseeded(self, node: fx.Node) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return lambda: self._seeded(node)

    @contextlib.contextmanager
    def _seeded(self, node: fx.Node) -> Any:
        position, count = node.meta.get("random", (0, 0))
        with contextlib.ExitStack() as stack:
            if node.meta.get("opaque"):
                stack.enter_context(draws.inside(self._where, position))
            elif count:
                stack.enter_context(draws.at(self._where, position, count))
            yield


def _state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _replaced(value: Any, path: Sequence[int | str], axis: Axis, team: int) -> Any:
    """Return an argument with the number at ``path`` as a member has it."""
    if not path:
        return axis.local(value, team)
    at = int(path[0])
    if isinstance(value, slice):
        bounds = [value.start, value.stop, value.step]
        bounds[at] = _replaced(bounds[at], path[1:], axis, team)
        return slice(*bounds)
    items = list(value)
    items[at] = _replaced(items[at], path[1:], axis, team)
    return type(value)(items) if isinstance(value, (list, tuple)) else items


def multihead(combination: Combination) -> list[tuple[Tensor, None]]:
    """Return the output of each member. The module runs with its own masks and layout, but not with all heads."""
    parts, biases = [], []
    for member, (args, kwargs) in enumerate(combination.arguments):
        mode = _OwnHeads(combination, member)
        with mode:
            parts.append(combination.run(member, args, kwargs)[0])
        biases.append(mode.bias)
    totals = summed(parts)
    return [(total if bias is None else total + bias, None) for total, bias in zip(totals, biases, strict=True)]


class _OwnHeads(torch.overrides.TorchFunctionMode):
    """Replaces the function that the module calls by one for the heads of a member, without the last bias."""

    def __init__(self, combination: Combination, member: int) -> None:
        super().__init__()
        self._combination = combination
        self._member = member
        self.bias: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        named = dict(zip(_NAMES, args, strict=False)) | (kwargs or {})
        self.bias = named["out_proj_bias"]
        return self._own(named), None

    def _own(self, named: dict[str, Any]) -> Tensor:
        """Return the partial output [length, batch, width] of the member's heads."""
        count = named["num_heads"] // self._combination.team
        projected = _projected(named)
        query, key, value = (x.reshape(*x.shape[:-1], count, -1).permute(1, 2, 0, 3) for x in projected)
        is_causal = named["is_causal"] and named["key_padding_mask"] is None and not named["need_weights"]
        mask = None if is_causal else named["attn_mask"]
        if named["key_padding_mask"] is not None:
            padding = named["key_padding_mask"][:, None, None, :]
            mask = padding if mask is None else mask + padding
        rate = named["dropout_p"] if named["training"] else 0.0
        if rate:
            output = attention_with_mask(self._mask_for, query, key, value, mask, rate, is_causal)
        else:
            output = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        return functional.linear(output.permute(2, 0, 1, 3).flatten(-2), named["out_proj_weight"])

    def _mask_for(self, like: Tensor, rate: float) -> Tensor:
        count = like.shape[1]
        shape = (like.shape[0], count * self._combination.team, *like.shape[2:])
        with self._combination.seeded():
            mask = functional.dropout(torch.ones(shape, dtype=like.dtype), rate, training=True)
        return mask[:, self._member * count : (self._member + 1) * count]


def _projected(named: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return queries, keys and values: one product if they are projections of one tensor, as the module does."""
    inputs, bias = (named["query"], named["key"], named["value"]), named["in_proj_bias"]
    if named["in_proj_weight"] is None:
        weights = [named[f"{letter}_proj_weight"] for letter in "qkv"]
    elif inputs[0] is inputs[1] is inputs[2]:
        return functional.linear(inputs[0], named["in_proj_weight"], bias).chunk(3, -1)
    else:
        weights = named["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(functional.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True))


_NAMES = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
)  # fmt: skip


def _drawn(
    node: fx.Node,
    module: nn.Module,
    arguments: _Arguments,
    place: Place,
    size: int,
    team: int,
    seeded: Callable[[], contextlib.AbstractContextManager[None]],
) -> list[Tensor]:
    """Return the results of dropout, or of attention with dropout, for each member."""
    results = []
    for member, (args, kwargs) in enumerate(arguments):

        def mask_for(like: Tensor, rate: float, member: int = member) -> Tensor:
            shape = list(like.shape)
            shape[place.dimension] *= team
            with seeded():
                mask = functional.dropout(torch.ones(shape, dtype=like.dtype), rate, training=True)
            return cut(mask, place, size, member, team)

        if node.op == "call_module":
            rate = module.get_submodule(str(node.target)).p
            results.append(args[0] * mask_for(args[0], float(rate)))  # type: ignore[arg-type]  # of nn.Dropout
        elif getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
            results.append(attention_with_mask(mask_for, *args, **kwargs))
        else:
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            results.append(args[0] * mask_for(args[0], rate))
    return results
