"""Rewrite a captured graph to that of a member: sizes divided, and what members exchange as calls of its own.

Every value keeps its name, so that boundaries, ties and draws are those of the complete model. Values are added where
members exchange: ``NAME_entered`` is a value as the calls of an axis read it, and ``NAME_part`` is what one member adds
to ``NAME``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from autopipe import team
from autopipe.errors import TraceError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.teams.axes import (
    ADDED,
    ADDED_BEFORE_BIAS,
    CROSS_ENTROPY,
    LOG_SOFTMAX,
    LOOKED_UP,
    MULTIHEAD,
    PICKED,
    Axis,
    Place,
    Rewrite,
    shards_of,
    share,
)
from autopipe.ir.tensor import TensorSpec
from autopipe.team import STAGE
from autopipe.trace.axes.find import attribute
from autopipe.trace.record.argument_text import arguments_text
from autopipe.trace.result import Capture
from autopipe.trace.teams.arguments import Arguments, along, dropout_rate, floor_divided, rewritten


def of_team(capture: Capture, axes: Sequence[Axis], size: int) -> Capture:
    """Return the capture of each member of a team of ``size`` that shards ``axes``, a set without conflicts.

    Its module has the user's modules and tensors, complete: a stage cuts them when it adopts them.

    Raises: TraceError for an axis that no generated code can shard yet; ValueError if an axis cannot be divided.
    """
    return _Localiser(capture, axes, size).capture()


class _Localiser:
    def __init__(self, capture: Capture, axes: Sequence[Axis], size: int) -> None:
        self._of, self._axes, self._size = capture, axes, size
        self._carried = {place.name: (axis, place) for axis in axes for place in axis.values}
        self._rewrites: dict[str, list[tuple[Axis, Rewrite]]] = {}
        for axis in axes:
            for rewrite in axis.rewrites:
                self._rewrites.setdefault(rewrite.node, []).append((axis, rewrite))
        self._entries = {(entry.value, node): axis for axis in axes for entry in axis.entries for node in entry.readers}
        self._sums = {entry.node: entry.how for axis in axes for entry in axis.sums}
        # with padding: node that adds over the axis -> the size of the axis
        self._padded = {entry.node: {"size": axis.size} for axis in axes if axis.size % size for entry in axis.sums}
        self._draws = {node: axis for axis in axes for node in axis.draws}
        self._described = {node.name: node for node in capture.graph.nodes}
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}  # of the whole graph -> of a member's
        self._entered: dict[tuple[str, str], fx.Node] = {}  # (value, axis) -> the value as the axis's calls read it
        self._read: dict[str, fx.Node] = {}  # parameters of modules that other functions read instead
        self._divisions: dict[str, fx.Node] = {}  # a size -> that size divided by the members
        self._nodes: list[Node] = []
        self._evaluation: dict[str, Arguments] = {}

    def capture(self) -> Capture:
        for node in self._of.module.graph.nodes:
            self._copy(node)
        graph = self._localised(self._of.graph)
        module = fx.GraphModule(self._of.module, self._graph, type(self._of.module).__name__)
        for node in module.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                node.meta["node"] = next(entry for entry in graph.nodes if entry.name == node.name)
        return dataclasses.replace(
            self._of,
            graph=graph,
            module=module,
            evaluation=self._evaluation,
            team=self._size,
            shards=shards_of(self._axes),
        )

    def _localised(self, whole: Graph) -> Graph:
        places = {place.name: (axis, place) for axis in self._axes for place in (*axis.parameters, *axis.state)}

        def local(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
            return {name: self._cut(spec, *places[name]) if name in places else spec for name, spec in specs.items()}

        return dataclasses.replace(
            whole,
            nodes=tuple(self._nodes),
            parameters=local(whole.parameters),
            buffers=local(whole.buffers),
            complete=whole.model_digest,
            partial=tuple(name for axis in self._axes for name in axis.partial),
            whole_shapes=tuple(
                (name, spec.concrete({}))
                for name, spec in (*whole.parameters.items(), *whole.buffers.items())
                if name in places
            ),
            axes=(),
            whole=(),
        )

    def _cut(self, spec: TensorSpec, axis: Axis, place: Place) -> TensorSpec:
        shape = list(spec.shape)
        whole = shape[place.dimension]
        padded = axis.size % self._size and whole == axis.size
        shape[place.dimension] = share(axis.size, self._size) if padded else floor_divided(whole, self._size)
        return dataclasses.replace(spec, shape=tuple(shape))

    def _copy(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr", "output"):
            self._values[node] = self._graph.node_copy(node, lambda value: self._values[value])
            return
        arguments = self._arguments(node, node.args, node.kwargs)
        evaluated = self._of.evaluation.get(node.name)
        in_evaluation = arguments if evaluated is None else self._arguments(node, *evaluated)
        if self._sums.get(node.name) == ADDED:
            part = self._part(node, arguments)
            if evaluated is not None:
                self._evaluation[part.name] = in_evaluation
            self._put(node, team.summed, ((STAGE, part), {}))
            return
        if self._sums.get(node.name) == MULTIHEAD:
            self._multihead(node, arguments)
            return
        target, call = self._own_call(node, arguments)
        self._put(node, target, call)
        if evaluated is not None or target is team.dropped:
            self._evaluation[node.name] = self._own_call(node, in_evaluation, training=False)[1]

    def _own_call(self, node: fx.Node, arguments: Arguments, *, training: bool = True) -> tuple[Any, Arguments]:
        """Return what a member calls for a node: the target, and its arguments."""
        how = self._sums.get(node.name)
        if how is not None:
            return _CALLS[how](self, node, arguments)
        if node.name in self._draws:
            return self._drawn(node, arguments, training)
        return node.target, arguments

    # --- arguments ----------------------------------------------------------------------------------------------------

    def _arguments(self, node: fx.Node, own: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a member's call: values as they enter, and local sizes."""

        def value(operand: fx.Node) -> fx.Node:
            axis = self._entries.get((operand.name, node.name))
            return self._values[operand] if axis is None else self._enter(operand, axis)

        arguments = fx.map_arg(own, value), dict(fx.map_arg(named, value))
        for axis, rewrite in self._rewrites.get(node.name, ()):
            arguments = rewritten(arguments, rewrite.path, functools.partial(self._divided, axis))
        return arguments

    def _divided(self, axis: Axis, count: Any) -> Any:
        """Return a size divided by the members. One that is computed from the batch is divided when it is known."""
        if not isinstance(count, fx.Node):
            return axis.local(count, self._size)
        if count.name not in self._divisions:
            divided = self._graph.create_node(
                "call_function", operator.floordiv, (count, self._size), name=f"{count.name}_of_member"
            )
            divided.meta = {key: entry for key, entry in count.meta.items() if key != "random"}
            self._describe(divided, self._described.get(count.name), None, storage="")
            self._divisions[count.name] = divided
        return self._divisions[count.name]

    def _enter(self, operand: fx.Node, axis: Axis) -> fx.Node:
        key = operand.name, axis.name
        if key not in self._entered:
            number = sum(value == operand.name for value, _ in self._entered)
            name = f"{operand.name}_entered" + (f"_{number + 1}" if number else "")
            value = self._values[operand]
            arguments: Any = (STAGE, value)
            entered = self._graph.create_node("call_function", team.entered, arguments, name=name)
            entered.meta = {key: entry for key, entry in operand.meta.items() if key != "random"}
            self._entered[key] = entered
            spec = self._described[operand.name].spec if operand.name in self._described else None
            if operand.op == "placeholder":
                spec = next(entry.spec for entry in self._of.graph.inputs if entry.name == operand.name)
            self._describe(entered, self._described.get(operand.name), spec, storage=operand.name)
        return self._entered[key]

    # --- calls --------------------------------------------------------------------------------------------------------

    def _put(self, node: fx.Node, target: Any, arguments: Arguments) -> None:
        """Add a member's call of a node."""
        op = node.op if target is node.target else "call_function"
        call = self._values[node] = self._graph.create_node(op, target, *arguments, name=node.name)
        call.meta = dict(node.meta)
        about = self._described[node.name]
        self._describe(call, about, self._local(node.name, about.spec))
        if target in (team.summed, team.summed_heads):
            call.meta.pop("random", None)
            self._nodes[-1] = dataclasses.replace(self._nodes[-1], parameters=(), num_random=0, storage="", glued=False)

    def _part(self, node: fx.Node, arguments: Arguments, target: Any = None) -> fx.Node:
        """Add the call of a node whose result is summed over the members. ``target``: what a member calls instead."""
        op = node.op if target is None else "call_function"
        part = self._graph.create_node(op, target or node.target, *arguments, name=f"{node.name}_part")
        part.meta = {key: entry for key, entry in node.meta.items() if key != "val"}
        about = self._described[node.name]
        self._describe(part, about, about.spec)
        return part

    def _local(self, name: str, spec: TensorSpec | None) -> TensorSpec | None:
        return self._cut(spec, *self._carried[name]) if spec is not None and name in self._carried else spec

    def _describe(self, call: fx.Node, about: Node | None, spec: TensorSpec | None, storage: str | None = None) -> None:
        """Describe a call as that of the complete model, with its own target and arguments."""
        about = about or Node(call.name, call.op, "", (), spec)
        module = self._of.module.get_submodule(str(call.target)) if call.op == "call_module" else None
        function: Any = call.target
        own = call.op == "call_function" and getattr(function, "__module__", "") == team.__name__
        self._nodes.append(
            dataclasses.replace(
                about,
                name=call.name,
                kind=call.op,
                target=f"{team.__name__}.{function.__name__}" if own else about.target,
                inputs=tuple(value.name for value in call.all_input_nodes if value.op != "get_attr"),
                spec=spec,
                arguments=arguments_text(call, self._of.constants, module),
                storage=about.storage if storage is None else storage,
                parameters=() if storage is not None else about.parameters,
                num_random=0 if storage is not None else about.num_random,
                glued=False if storage is not None else about.glued,
            )
        )

    def _state(self, node: fx.Node, names: Sequence[str]) -> list[fx.Node | None]:
        """Return reads of the parameters of the module that a node calls."""
        module = self._module(node)
        if module._forward_hooks or module._forward_pre_hooks:
            raise TraceError(
                f"module {node.target} has forward hooks, and its call adds over the members of a team",
                remedy="remove the hooks, or train without tensor parallelism",
            )
        return [
            self._attribute(f"{node.target}.{name}") if attribute(module, name) is not None else None for name in names
        ]

    def _attribute(self, target: str) -> fx.Node:
        if target not in self._read:
            self._read[target] = self._graph.create_node("get_attr", target)
        return self._read[target]

    def _module(self, node: fx.Node) -> nn.Module:
        return self._of.module.get_submodule(str(node.target))

    def _multihead(self, node: fx.Node, arguments: Arguments) -> None:
        """Add the calls of a member's heads, and of their sum over the team."""
        args, kwargs = arguments
        given = dict(zip(_OF_MULTIHEAD, args, strict=False)) | kwargs
        module: Any = self._module(node)
        packed, *separate = self._state(node, ("in_proj_weight", *(f"{letter}_proj_weight" for letter in "qkv")))
        in_bias, out_weight, out_bias = self._state(node, ("in_proj_bias", "out_proj.weight", "out_proj.bias"))
        padding = given.get("key_padding_mask")
        # as in the module: without padding, the kernel makes a causal mask itself
        is_causal = given.get("is_causal", False) and padding is None and not given.get("need_weights", True)
        options = {
            "dropout_p": module.dropout if module.training else 0.0,
            "batch_first": module.batch_first,
            "attn_mask": None if is_causal else given.get("attn_mask"),
            "key_padding_mask": padding,
            "is_causal": is_causal,
        }
        in_weight = tuple(separate) if packed is None else packed
        operands = *(given[name] for name in _OF_MULTIHEAD[:3]), in_weight, in_bias, out_weight
        own = (STAGE, *operands, module.num_heads // self._size)
        part = self._part(node, (own, options), team.multihead)
        self._evaluation[part.name] = own, {**options, "dropout_p": 0.0}
        self._put(node, team.summed_heads, ((STAGE, part, out_bias, module.batch_first), {}))
        aliases = self._of.graph.aliases
        bias = () if out_bias is None else (aliases.get(str(out_bias.target), str(out_bias.target)),)
        of_part = tuple(name for name in self._described[node.name].parameters if name not in bias)
        spec = next(self._described[user.name].spec for user in node.users)
        assert spec is not None
        if module.batch_first:
            spec = dataclasses.replace(spec, shape=(spec.shape[1], spec.shape[0], *spec.shape[2:]))
        self._nodes[-2:] = [
            dataclasses.replace(self._nodes[-2], parameters=of_part, spec=dataclasses.replace(spec, order=())),
            dataclasses.replace(self._nodes[-1], parameters=bias),
        ]

    def _before_bias(self, node: fx.Node, arguments: Arguments) -> tuple[Callable[..., Any], Arguments]:
        args, kwargs = arguments
        if node.op == "call_module":
            return team.summed_linear, ((STAGE, args[0], *self._state(node, ("weight", "bias"))), {})
        names = ("input", "weight", "bias") if getattr(node.target, "__name__", "") == "linear" else _OF_ADDMM
        operands = [*args, *(kwargs[name] for name in names[len(args) :])]
        target = team.summed_linear if names is not _OF_ADDMM else team.summed_addmm
        return target, ((STAGE, *operands), {})

    def _looked_up(self, node: fx.Node, arguments: Arguments) -> tuple[Callable[..., Any], Arguments]:
        args, kwargs = arguments
        if node.op == "call_module":
            padding: Any = self._module(node).padding_idx
            weight = self._state(node, ("weight",))[0]
        else:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        operands = (STAGE, args[0], weight, *(() if padding is None else (padding,)))
        return team.looked_up, (operands, self._padded.get(node.name, {}))

    def _cross_entropy(self, node: fx.Node, arguments: Arguments) -> tuple[Callable[..., Any], Arguments]:
        return team.vocabulary_cross_entropy, self._loss(node, arguments)

    def _picked(self, node: fx.Node, arguments: Arguments) -> tuple[Callable[..., Any], Arguments]:
        return team.vocabulary_nll, self._loss(node, arguments)

    def _loss(self, node: fx.Node, arguments: Arguments) -> Arguments:
        args, kwargs = arguments
        if node.op == "call_module":
            kwargs = {name: getattr(self._module(node), name) for name in ("ignore_index", "reduction")}
        operands = [args[0], args[1] if len(args) > 1 else kwargs["target"], self._classes(node)]
        named = {k: v for k, v in kwargs.items() if k in ("ignore_index", "reduction")}
        return (STAGE, *operands), named | self._padded.get(node.name, {})

    def _log_softmax(self, node: fx.Node, arguments: Arguments) -> tuple[Callable[..., Any], Arguments]:
        args, kwargs = arguments
        dtype = kwargs.get("dtype")
        named = ({} if dtype is None else {"dtype": dtype}) | self._padded.get(node.name, {})
        return team.vocabulary_log_softmax, ((STAGE, args[0], self._classes(node)), named)

    def _classes(self, node: fx.Node) -> int:
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        return self._carried[operand.name][1].dimension

    def _drawn(self, node: fx.Node, arguments: Arguments, training: bool) -> tuple[Callable[..., Any], Arguments]:
        args, kwargs = arguments
        place = along(self._carried[node.name][1], self._draws[node.name].size)
        if getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
            return team.attended, ((STAGE, place, *args), kwargs)
        rate = dropout_rate(node, self._of.module, arguments) if training else 0.0
        return team.dropped, ((STAGE, args[0], rate, place), {})


_OF_MULTIHEAD = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
)  # fmt: skip
_OF_ADDMM = ("input", "mat1", "mat2")
_CALLS: dict[str, Callable[[_Localiser, fx.Node, Arguments], tuple[Callable[..., Any], Arguments]]] = {
    ADDED_BEFORE_BIAS: _Localiser._before_bias,
    LOOKED_UP: _Localiser._looked_up,
    CROSS_ENTROPY: _Localiser._cross_entropy,
    LOG_SOFTMAX: _Localiser._log_softmax,
    PICKED: _Localiser._picked,
}
"""How a call adds over its axis -> the function of ``autopipe.team`` and its arguments."""

__all__ = ["of_team"]
