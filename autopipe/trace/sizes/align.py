"""Compare two recordings of one model call by call: whether the calls are the same, and which constants differ.

``LiveComparison`` compares while the second recording runs. Most models with their own batch norm diverge in evaluation
mode at the first layer, and the rest of that recording would be wasted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autopipe.errors import TraceError
from autopipe.trace.explain import OTHER_CALLS, type_name
from autopipe.trace.lines.of_nodes import short_where_text
from autopipe.trace.record.argument_text import tensor_digest
from autopipe.trace.record.follow import Followed
from autopipe.trace.record.targets import qualified_name


class GraphsDiffer(Exception):  # noqa: N818  # the caller turns it into a note or another attempt
    """The two recordings are not the same calls. ``where``: the user's line of the first differing call, or ""."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(f"{what} at {where}" if where else what)
        self.where = where


_MAX_MISMATCHES = 16  # consecutive calls that the other recording does not have


class LiveComparison:
    """Ends a recording that diverges from an existing one. The new one may lack calls whose result is unused.

    This only saves time: ``aligned`` compares every recording that passes.
    """

    def __init__(self, other: Followed) -> None:
        # reads of the model's tensors are not reported as calls
        self._calls = [node for node in other.calls if node.op not in ("placeholder", "get_attr")]
        self._kept = set(other.graph.nodes)
        self._next = 0
        self._mismatches: list[fx.Node] = []

    def __call__(self, node: fx.Node) -> None:
        """Compare the next call. Raises: TraceError (``OTHER_CALLS``) where the two recordings diverge."""
        for index in range(self._next, len(self._calls)):
            call = self._calls[index]
            if (call.op, call.target) == (node.op, node.target):
                self._next = index + 1
                self._mismatches.clear()
                return
            if call in self._kept:
                break
        self._mismatches.append(node)
        if len(self._mismatches) > _MAX_MISMATCHES:
            raise TraceError(OTHER_CALLS, where=short_where_text(self._mismatches[0].meta))


def aligned(ours: Followed, theirs: Followed) -> dict[fx.Node, fx.Node]:
    """Return node of ``theirs`` -> node of ``ours``.

    Raises: GraphsDiffer if the calls are not the same, or not on the same values.
    """
    left, right = list(ours.graph.nodes), list(theirs.graph.nodes)
    same: dict[fx.Node, fx.Node] = {}
    for a, b in zip(left, right, strict=False):
        same[b] = a
        if a.op != b.op or not _same_target(a, b, ours, theirs):
            raise GraphsDiffer("another call", _where(a, b))
        if a.all_input_nodes != [same.get(node) for node in b.all_input_nodes]:
            raise GraphsDiffer("another call", _where(a, b))
    if len(left) != len(right):
        raise GraphsDiffer(f"{len(right)} calls instead of {len(left)}")
    return same


def _where(left: fx.Node, right: fx.Node) -> str:
    return short_where_text(left.meta) or short_where_text(right.meta)


def _same_target(left: fx.Node, right: fx.Node, ours: Followed, theirs: Followed) -> bool:
    if left.op == "get_attr":
        a = ours.recorder.constants.get(str(left.target))
        b = theirs.recorder.constants.get(str(right.target))
        if a is not None and b is not None:
            return tensor_digest(a) == tensor_digest(b)
    if callable(left.target) and callable(right.target):
        return qualified_name(left.target) == qualified_name(right.target)
    return left.op == "output" or left.target == right.target


def merged(raw: Any, other: Any, base: Any, same: dict[fx.Node, fx.Node], choose: Callable[[Any, Any], Any]) -> Any:
    """Walk two argument trees; return ``base``'s entry where they agree and ``choose(raw, other)`` where they differ.

    ``base`` is ``raw`` or a rewritten form of it. ``same``: node of the other recording -> node of ours.
    """
    if isinstance(raw, (list, tuple)) and isinstance(other, (list, tuple)) and len(raw) == len(other):
        items = [merged(a, b, c, same, choose) for a, b, c in zip(raw, other, base, strict=True)]
        return items if isinstance(raw, list) else tuple(items)
    if isinstance(raw, dict) and isinstance(other, dict) and raw.keys() == other.keys():
        return {key: merged(raw[key], other[key], base[key], same, choose) for key in raw}
    if isinstance(raw, slice) and isinstance(other, slice):
        ends = [(s.start, s.stop, s.step) for s in (raw, other, base)]
        return slice(*(merged(a, b, c, same, choose) for a, b, c in zip(*ends, strict=True)))
    if isinstance(other, fx.Node):
        return base if same.get(other) is raw else choose(raw, same.get(other))
    return base if _equal(raw, other) else choose(raw, other)


def _equal(left: Any, right: Any) -> bool:
    return type_name(left) == type_name(right) and (bool(left == right) or repr(left) == repr(right) == "nan")
