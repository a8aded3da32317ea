"""Convert the recorded ``fx.Graph`` to an ``ir.Graph``: what each call reads, changes, shares and draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe import sparse
from autopipe.errors import TraceError
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.tensor import DTYPE_BYTES, TensorSpec
from autopipe.trace.explain import AFTER_STEP
from autopipe.trace.graph.naming import is_part
from autopipe.trace.lines.of_nodes import own_text, source_text, where_text
from autopipe.trace.record.argument_text import arguments_text
from autopipe.trace.record.follow import Followed
from autopipe.trace.record.symbols import Symbols
from autopipe.trace.record.targets import qualified_name
from autopipe.trace.record.values import storage_key


def describe(followed: Followed, name: str) -> Graph:
    """Return the ``ir.Graph`` of a recording; every call receives its ``Node`` as ``meta["node"]``.

    Raises: TraceError if the forward changes a parameter or a plain tensor of the model in place.
    """
    return _Describer(followed).graph(name)


GUARD = "autopipe.guards.expect"


class _Describer:
    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self.constants = followed.recorder.constants
        self.position: dict[str, int] = {}
        self.owner: dict[int, str] = {}  # memory -> value that owns it
        self.changes: dict[int, list[str]] = {}  # memory -> calls that changed it, in order
        self.buffer_names: dict[int, list[str]] = {}
        self.parameter_names: dict[int, str] = {}
        parameters = {n for n, _ in followed.faked_model.model.named_parameters()}
        for first, fake in followed.faked_model.fake.items():
            key = storage_key(fake)
            if key is None:
                continue
            if first in parameters:
                self.parameter_names[key] = first
            else:
                self.buffer_names.setdefault(key, []).append(first)
        self.is_parameter = parameters
        self.constant_memory = {storage_key(fake) for fake in followed.recorder.writer.known.constant_fakes}

    def graph(self, name: str) -> Graph:
        model, symbols = self.followed.faked_model.model, self.followed.symbols
        inputs: list[Input] = []
        nodes: list[Node] = []
        outputs: tuple[str, ...] = ()
        for fx_node in self.followed.graph.nodes:
            if fx_node.op == "placeholder":
                spec = tensor_spec(fx_node.meta, symbols)
                if spec is None:
                    raise TraceError(
                        f"input {fx_node.name} is a {fx_node.meta['val'].dtype} tensor that cannot be sent"
                    )
                number = self.followed.recorder.numbers.inputs.get(fx_node.name)
                inputs.append(number or Input(fx_node.name, spec))
                self._own(fx_node)
            elif fx_node.op == "output":
                outputs = tuple(value.name for value in fx_node.args[0])
            elif fx_node.op != "get_attr":
                nodes.append(self._node(fx_node, len(nodes)))
        described = _with_input_only(nodes, {entry.name for entry in inputs})
        graph = Graph(
            name=name,
            inputs=tuple(inputs),
            symbols=tuple(
                Symbol(f"s{index}", place[0].name, place[1], size)
                for index, (place, size) in enumerate(zip(self.followed.places, self.followed.sizes, strict=True))
                if place is not None
            ),
            nodes=tuple(described),
            outputs=outputs,
            parameters={n: _state_spec(p) for n, p in model.named_parameters()},
            buffers={n: _state_spec(b) for n, b in model.named_buffers()},
            aliases=dict(self.followed.faked_model.aliases),
        )
        by_name = {node.name: node for node in described}
        for fx_node in self.followed.graph.nodes:
            if fx_node.name in by_name:
                fx_node.meta["node"] = by_name[fx_node.name]
        return graph

    def _node(self, node: fx.Node, index: int) -> Node:
        self.position[node.name] = index
        meta = node.meta
        module = self.followed.faked_model.model.get_submodule(str(node.target)) if node.op == "call_module" else None
        _refuse_sparse(node, module)
        _refuse_sparse_parts(node)
        read = [entry for entry in node.all_input_nodes if entry.op == "get_attr"]
        state = [str(entry.target) for entry in read if entry.target not in self.constants]
        if module is not None:
            names = self.followed.faked_model.names
            state += [names[id(t)] for t in (*module.parameters(), *module.buffers())]
        state = list(dict.fromkeys(state))
        inputs = tuple(entry.name for entry in node.all_input_nodes if entry.op != "get_attr")
        _refuse_sparse_written(meta)
        changed = [key for key in map(storage_key, meta.get("changed", ())) if key is not None]
        written = self._written(changed, meta)
        after = self._after(node, inputs, state)
        for key in dict.fromkeys(changed):
            self.changes.setdefault(key, []).append(node.name)
        stack = meta.get("stack", ())
        first, count = meta.get("random", (0, 0))
        return Node(
            name=node.name,
            kind=node.op,
            target=str(node.target) if node.op != "call_function" else qualified_name(node.target),
            inputs=inputs,
            spec=tensor_spec(meta, self.followed.symbols),
            arguments=arguments_text(node, self.constants, module),
            after=after,
            parameters=tuple(entry for entry in state if entry in self.is_parameter),
            buffers=tuple(entry for entry in state if entry not in self.is_parameter),
            buffers_written=written,
            constants=tuple(dict.fromkeys(str(entry.target) for entry in read if entry.target in self.constants)),
            mutates=tuple(entry.name for entry in meta.get("mutates", ())),
            storage=self._own(node),
            num_random=count,
            random_position=first if count else 0,
            glued=is_part(node),
            opaque=bool(meta.get("opaque")),
            checkpoint=meta.get("checkpoint", 0),
            context=context_text(meta),
            module_path=stack[-1][0] if stack else "",
            module_type=stack[-1][1] if stack else "",
            source=source_text(meta),
            own_source=own_text(meta),
        )

    def _written(self, changed: Iterable[int], meta: Mapping[str, Any]) -> tuple[str, ...]:
        written: list[str] = []
        for key in changed:
            if key in self.parameter_names:
                raise TraceError(
                    f"the forward changes parameter {self.parameter_names[key]} in place",
                    where=where_text(meta),
                    remedy=AFTER_STEP,
                )
            if key in self.constant_memory:
                raise TraceError(
                    "the forward changes a tensor in place that is neither parameter nor buffer",
                    where=where_text(meta),
                    remedy="register it with register_buffer in the model, or in a loss that is an nn.Module itself "
                    "(loss = criterion, not a function that calls it), so that checkpoints and stages include it",
                )
            written += self.buffer_names.get(key, [])
        return tuple(dict.fromkeys(written))

    def _after(self, node: fx.Node, inputs: tuple[str, ...], state: Iterable[str]) -> tuple[str, ...]:
        """Return the calls that changed the inputs of this call and are not inputs themselves."""
        changes = []
        for entry in node.all_input_nodes:
            position = self.position.get(entry.name, -1)
            for name in self.changes.get(storage_key(entry.meta.get("val")) or 0, ()):
                if self.position[name] > position and name not in inputs:
                    changes.append(name)
        for buffer in state:
            fake = self.followed.faked_model.fake.get(buffer)
            changes += [name for name in self.changes.get(storage_key(fake) or 0, ()) if name not in inputs]
        return tuple(sorted(dict.fromkeys(changes), key=self.position.__getitem__))

    def _own(self, node: fx.Node) -> str:
        """Return the value whose memory the result of a node shares, or "" for its own memory or the model's."""
        if node.meta.get("fresh"):  # the clone of an input replaces the fake of the input
            self.owner[storage_key(node.meta["val"]) or 0] = node.name
            return ""
        if "val" in node.meta:
            key = storage_key(node.meta["val"])
            if key is None or key in self.parameter_names or key in self.buffer_names:
                return ""
            owner = self.owner.setdefault(key, node.name)
            return "" if owner == node.name else owner
        for user in node.users:
            if is_part(user):
                key = storage_key(user.meta.get("val"))
                if key is not None and key in self.owner:
                    return self.owner[key]
        return ""


def _with_input_only(nodes: list[Node], inputs: set[str]) -> list[Node]:
    """Find the nodes that depend only on the batch and constants.

    A value that a call with parameters writes to is excluded, and so is any value that shares its memory.
    """
    written = {buffer for node in nodes for buffer in node.buffers_written}
    roots = {node.name: node.storage or node.name for node in nodes}
    tainted: set[str] = set()
    while True:
        known = set(inputs)
        for node in nodes:
            # a guard has no readers; it keeps its place, so that one stage runs it
            free = node.target != GUARD and not (
                node.parameters or node.num_random or node.buffers_written or written & set(node.buffers)
            )
            if free and roots[node.name] not in tainted and known.issuperset((*node.inputs, *node.after)):
                known.add(node.name)
        writers = {
            roots.get(value, value) for node in nodes if node.name not in known for value in node.mutates
        } - tainted
        if not writers:
            return [dataclasses.replace(node, input_only=node.name in known) for node in nodes]
        tainted |= writers


# index of `sparse` as a positional argument
_SPARSE = {"embedding": 6, "embedding_bag": 7}


def _refuse_sparse(node: fx.Node, module: nn.Module | None) -> None:
    """Refuse sparse gradients: stages add, send, clip and compare dense gradients only.

    Raises: TraceError with the user's line.
    """
    place = _SPARSE.get(getattr(node.target, "__name__", ""), len(node.args))
    given = node.kwargs.get("sparse", node.args[place] if place < len(node.args) else False)
    if getattr(module, "sparse", None) is True or given is True:
        raise TraceError(
            f"{node.target if module is not None else 'an embedding'} produces sparse gradients (sparse=True)",
            where=where_text(node.meta),
            remedy="remove sparse=True, which trains the same with SGD without momentum or weight decay, and with "
            "Adagrad; an optimizer for sparse gradients (SparseAdam) leaves the state of unread rows as it is, and a "
            "dense one does not: another training",
        )


# reads of the number of stored values, which a fake tensor does not have
_PARTS_OF_SPARSE = {"indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices"}


def _refuse_sparse_parts(node: fx.Node) -> None:
    """Refuse reads of the components of a sparse tensor: their size depends on the values.

    Raises: TraceError with the user's line.
    """
    name = str(node.target).lstrip("_")
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    if name in _PARTS_OF_SPARSE and any(isinstance(value, Tensor) and sparse.is_sparse(value) for value in sources):
        raise TraceError(
            f"{name}() of a sparse tensor: its number of entries depends on its values",
            where=where_text(node.meta),
            remedy="keep the indices and values as separate buffers, or use the complete sparse tensor",
        )


def _refuse_sparse_written(meta: Mapping[str, Any]) -> None:
    """Refuse a change of a sparse tensor: without a storage, its other readers are unknown.

    Raises: TraceError with the user's line.
    """
    if any(sparse.is_sparse(tensor) for tensor in meta.get("changed", ())):
        raise TraceError(
            "the forward changes a sparse tensor in place",
            where=where_text(meta),
            remedy="make that tensor dense (to_dense()); the forward may only read sparse tensors",
        )


def tensor_spec(meta: Mapping[str, Any], symbols: Symbols) -> TensorSpec | None:
    """Return the spec of a node's value, or None unless it is one dense tensor of a known shape."""
    value = meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    shape = meta["shape"] if "shape" in meta else [symbols.text(size) for size in value.shape]
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        return None
    known = tuple(size for size in shape if size is not None)
    return TensorSpec(known, dtype, value.requires_grad) if len(known) == len(shape) else None


def _state_spec(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(s) for s in value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad)


def context_text(meta: Mapping[str, Any]) -> str:
    """Return the context of a node as text: ``no_grad; autocast(cpu, bfloat16)``, or "" for the default."""
    parts = [] if meta.get("grad", True) else ["no_grad"]
    for device, dtype, _, cache in meta.get("autocast", ()):
        parts.append(f"autocast({device}, {str(dtype).removeprefix('torch.')}{'' if cache else ', uncached'})")
    return "; ".join(parts)
