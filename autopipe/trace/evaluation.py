"""The same model in evaluation mode: which arguments of the recorded calls differ."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from autopipe.errors import TraceError
from autopipe.trace.borrowed import Snapshot
from autopipe.trace.canonical import tensor_digest
from autopipe.trace.explain import type_name
from autopipe.trace.follow import Followed, follow, source_text
from autopipe.trace.targets import qualified_name
from autopipe.workload import Item, Workload

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def evaluation(
    workload: Workload, model: nn.Module, item: Item, training: Followed
) -> tuple[dict[str, Arguments], str]:
    """Return node -> its arguments in evaluation mode where they differ, and why the graph cannot serve, or "".

    Where the user's code never asks for the mode (only torch.nn's modules do), nothing differs.
    """
    if not training.reads_training:
        return {}, ""
    before = Snapshot(model)
    model.eval()
    try:
        result: tuple[dict[str, Arguments], str] = follow(workload, model, item, lambda found: _differences(training, found), answer=training.recorder.reads is not None)
    except TraceError as error:
        return {}, f"in evaluation mode the model cannot be followed: {error.what}"
    finally:
        before.restore()
    return result


def _differences(training: Followed, other: Followed) -> tuple[dict[str, Arguments], str]:
    ours, theirs = list(training.graph.nodes), list(other.graph.nodes)
    same: dict[fx.Node, fx.Node] = {}
    found: dict[str, Arguments] = {}
    for left, right in zip(ours, theirs, strict=False):
        if left.op != right.op or not _same_target(left, right, training, other):
            return {}, _structure(left, right)
        same[right] = left
    if len(ours) != len(theirs):
        return {}, f"evaluation mode makes {len(theirs)} calls, training {len(ours)}"
    for left, right in zip(ours, theirs, strict=True):
        args = fx.map_arg(right.args, lambda node: same[node])
        kwargs = fx.map_arg(dict(right.kwargs), lambda node: same[node])
        if left.all_input_nodes != [same[node] for node in right.all_input_nodes]:
            return {}, _structure(left, right)
        if not _equal(left.args, args) or not _equal(dict(left.kwargs), kwargs):
            found[left.name] = tuple(args), dict(kwargs)
    return found, ""


def _same_target(left: fx.Node, right: fx.Node, ours: Followed, theirs: Followed) -> bool:
    if left.op == "get_attr":
        a, b = (found.recorder.constants.get(str(node.target)) for found, node in ((ours, left), (theirs, right)))
        if a is not None and b is not None:
            return tensor_digest(a) == tensor_digest(b)
    if callable(left.target) and callable(right.target):
        return qualified_name(left.target) == qualified_name(right.target)
    return bool(left.op == "output" or left.target == right.target)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, slice) and isinstance(right, slice):
        return _equal((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    return type_name(left) == type_name(right) and bool(left == right or (left != left and right != right))


def _structure(left: fx.Node, right: fx.Node) -> str:
    place = source_text(left.meta) or source_text(right.meta)
    return f"evaluation mode goes another way{f' at {place}' if place else ''}"


