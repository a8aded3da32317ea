"""Buffers that a forward or a loss binds to new tensors: ``self.center = self.center * 0.9 + ...``.

Every call would begin with another tensor, and a stage has one. So the new value is copied into the buffer, as soon as
nothing reads the old value any more. What autograd may keep of the old value for the backward pass is a clone of it,
because the copy would change it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopipe import sparse
from autopipe.errors import TraceError
from autopipe.trace.explain import AFTER_STEP
from autopipe.trace.lines.of_nodes import where_text
from autopipe.trace.record.faked_model import FakedModel
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.values import storage_key

# of a node: where it is in the user's code
_PLACE = ("source", "own", "frame", "at", "caller", "stack", "checkpoint", "autocast")
_WITHOUT_GRADIENT = ("detach", "detach_", "data")


def copy_into_buffers(recorder: Recorder, faked_model: FakedModel, loss: Tensor) -> Mapping[str, fx.Node]:
    """Record the copy of each new value into its buffer. Return the nodes of the new values, by name of the buffer.

    Raises: TraceError if a new value has another shape or dtype, or a gradient that a later loss would need.
    """
    known, bound = recorder.writer.known, dict(faked_model.reassigned_buffers())
    for name, now in faked_model.new_parameters().items():
        raise TraceError(
            f"parameter {name} is bound to a new tensor in the forward",
            where=_made_at(recorder, now),
            remedy=AFTER_STEP,
        )
    for name, now in bound.items():
        fake = faked_model.fake[name]
        if sparse.is_sparse(fake) or sparse.is_sparse(now):
            raise TraceError(
                f"buffer {name} is sparse, and the forward binds it to a new tensor",
                where=_made_at(recorder, now),
                remedy="make it dense (to_dense()); the forward may only read sparse tensors",
            )
        if now.shape != fake.shape or now.dtype != fake.dtype:
            raise TraceError(
                f"buffer {name} is bound to a tensor of another shape or dtype in the forward",
                where=_made_at(recorder, now),
                remedy="if the first forward sets it, run the model on one batch before build_model returns it; "
                "otherwise keep its shape and dtype, or store the value outside the module",
            )
        if now.requires_grad and known.has(fake) and known.node(fake) in _differentiated(known.node(loss)):
            raise TraceError(
                f"buffer {name} is bound to a tensor with a gradient: the backward pass of the next call would go "
                "through the graph of this one, which is freed by then",
                where=_made_at(recorder, now),
                remedy="detach() the new value, or compute it under torch.no_grad()",
            )
    with torch.no_grad():
        memory = {storage_key(faked_model.fake[name]) for name in bound}
        values = {name: now.clone() if storage_key(now) in memory else now for name, now in bound.items()}
        for name, value in values.items():
            faked_model.fake[name].copy_(value)
    return {name: known.node(value) for name, value in values.items()}


def place_copies(graph: fx.Graph, faked_model: FakedModel, values: Mapping[str, fx.Node]) -> None:
    """Move each copy to behind the last call that reads the old value or changes the new one."""
    for name, value in values.items():
        buffer = storage_key(faked_model.fake[name])
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        copy = next(node for node in reversed(nodes) if buffer in _changed(node))
        before = [node for node in nodes if node is not copy]
        reads = [node for node in before if _reads(node, name, buffer, faked_model)]
        last = value
        for node in before:
            if node in reads or node is value or storage_key(value.meta["val"]) in _changed(node):
                last = node
        while last.next.target is operator.getitem and last.next.args[0] is last:  # the parts of a result
            last = last.next
        last.append(copy)
        copy.meta.update({key: value.meta[key] for key in _PLACE if key in value.meta})
        if not any(buffer in _changed(node) for node in before):
            _read_clone(copy.args[0], reads)


def _changed(node: fx.Node) -> set[int]:
    keys = (storage_key(tensor) for tensor in node.meta.get("changed", ()))
    return {key for key in keys if key is not None}


def _reads(node: fx.Node, name: str, buffer: int | None, faked_model: FakedModel) -> bool:
    """Return whether a call reads the memory of a buffer, directly, through a view, or as a module."""
    if any(storage_key(entry.meta.get("val")) == buffer for entry in node.all_input_nodes):
        return True
    if node.op != "call_module":
        return False
    module = faked_model.model.get_submodule(str(node.target))
    return any(faked_model.names.get(id(tensor)) == name for tensor in module.buffers())


def _keeps_values(node: fx.Node) -> bool:
    """Return whether autograd may keep the operands of a call."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return bool(node.meta.get("grad")) and ("val" not in node.meta or any(_needs_gradient(leaf) for leaf in leaves))


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _read_clone(buffer: Any, readers: Sequence[fx.Node]) -> None:
    """Let the readers of a buffer read a clone of it, if autograd may keep it or a view of it."""
    direct = [node for node in readers if buffer in node.all_input_nodes]
    if not direct or not any(_keeps_values(node) for node in readers):
        return
    first = direct[0]
    with first.graph.inserting_before(first):
        clone = first.graph.call_method("clone", (buffer,))
    clone.meta = {key: first.meta[key] for key in _PLACE if key in first.meta}
    clone.meta.update({"grad": True, "random": (0, 0), "val": buffer.meta["val"].clone()})
    for node in direct:
        node.replace_input_with(buffer, clone)


def _differentiated(loss: fx.Node) -> set[fx.Node]:
    """Return the nodes through which the backward pass of a loss would go if all of them had gradients."""
    nodes: set[fx.Node] = {loss}
    memory: set[int | None] = set()
    for node in reversed(loss.graph.nodes):
        if node not in nodes and memory.isdisjoint(_changed(node)):
            continue
        name = str(node.args[-1] if node.target is getattr else node.target)
        if name in _WITHOUT_GRADIENT or not node.meta.get("grad"):
            continue
        inputs = [entry for entry in node.all_input_nodes if _is_real(entry.meta.get("val"))]
        nodes.update(inputs)
        memory.update(storage_key(entry.meta.get("val")) for entry in inputs)
    return nodes


def _is_real(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _made_at(recorder: Recorder, value: Tensor) -> str:
    """Return ``file:line: source line`` of the call that produced a value, or ""."""
    known = recorder.writer.known
    return where_text(known.node(value).meta) if known.has(value) else ""


__all__ = ["copy_into_buffers", "place_copies"]
