"""One pass over the user's loss with fake tensors -> what was recorded, tidied up.

After the pass a few things are made explicit that Python did by assignment: a buffer bound to a new tensor becomes a
copy into the buffer, and a batch that is changed in place is cloned first, so that every stage can start from its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from autopipe.errors import TraceError
from autopipe.trace.borrowed import Borrowed
from autopipe.trace.explain import explained, place, short_path
from autopipe.trace.patches import following
from autopipe.trace.reads import FollowingShapeEnv, Reads
from autopipe.trace.recorder import Recorder
from autopipe.trace.symbols import Symbols
from autopipe.workload import Item, Workload


@dataclass
class Followed:
    """What one pass found. ``recorder.graph`` is the graph; ``reads_training``: the user's code asks for the mode."""

    recorder: Recorder
    borrowed: Borrowed
    symbols: Symbols
    hints: dict[str, int]
    reads_training: bool

    @property
    def graph(self) -> fx.Graph:
        """The recorded calls."""
        return self.recorder.graph


def follow(
    workload: Workload,
    model: nn.Module,
    item: Item,
    finish: Callable[[Followed], Any],
    *,
    watch: bool = False,
    answer: bool = False,
) -> Any:
    """Run ``workload.loss(model, item)`` with fake tensors and return ``finish(found)``, called while they still live.

    Dimension 0 of every leaf with as many entries as the first one is symbolic. ``watch``: refuse at the very line that
    draws from Python's or numpy's random numbers. ``answer``: keep data-dependent decisions as this batch makes them.

    Raises: TraceError with the user's line, and the smallest edit, when the model cannot be followed.
    """
    leaves = workload.leaves(item)
    sized = [leaf for leaf in leaves.values() if leaf.dim() > 0]
    if not sized:
        raise TraceError("the batch holds no tensor with a dimension", remedy="give samples-first tensors")
    batch = sized[0].shape[0]
    shape_env = FollowingShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    symbols = Symbols(shape_env)
    borrowed = Borrowed(model, mode, sized[0].device)
    with borrowed:
        recorder = Recorder(borrowed, symbols, watch=watch)
        fakes = {name: _fake_leaf(mode, name, leaf, batch) for name, leaf in leaves.items()}
        for name, fake in fakes.items():
            recorder.add_input(name, fake)
        if answer:
            recorder.reads = Reads(borrowed, leaves, workload.spec.seed)
            shape_env.on_answer = recorder.answered
        with _running(recorder, mode) as reads:
            loss, weight = workload.loss(model, workload.with_leaves(item, fakes))
            _copy_reassigned(recorder, borrowed)
            recorder.set_output((loss,) if weight is None else (loss, weight))
        _check_random(workload, model, item, borrowed, watch=watch, answer=answer)
        _check_batch(symbols, shape_env, batch)
        hints = {symbols.names[symbol]: batch for symbol in symbols.source}
        _clone_changed_inputs(recorder.graph)
        remove_unused(recorder.graph)
        return finish(Followed(recorder, borrowed, symbols, hints, reads.seen))


@contextlib.contextmanager
def _running(recorder: Recorder, mode: FakeTensorMode) -> Any:
    try:
        with following(recorder) as reads, mode, recorder.random, enable_python_dispatcher(), recorder:
            yield reads
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        raise explained(error, recorder.construct) from error
    finally:
        if recorder.reads is not None:
            with recorder.borrowed.returned():
                recorder.reads.restore()


def _fake_leaf(mode: FakeTensorMode, name: str, leaf: Tensor, batch: int) -> Tensor:
    """Return the fake of an input; an object of its own even where the user passes one tensor twice."""
    real = torch.empty_like(leaf, requires_grad=leaf.requires_grad)
    sizes = [
        DimDynamic.DUCK if dimension == 0 and size == batch else DimDynamic.STATIC
        for dimension, size in enumerate(leaf.shape)
    ]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(real, source=LocalSource(name), symbolic_context=context)


def _check_random(workload: Workload, model: nn.Module, item: Item, borrowed: Borrowed, *, watch: bool, answer: bool) -> None:
    """Refuse a model that flips coins outside of torch: one way would be kept for ever."""
    generator = borrowed.snapshot.random_drawn()
    if not generator or watch:
        return
    borrowed.snapshot.restore()
    where = ""
    try:
        follow(workload, model, item, lambda found: None, watch=True, answer=answer)
    except TraceError as error:
        where = error.where
    raise TraceError(
        f"the model draws from {generator} in its forward, so another step takes another way",
        where=where,
        remedy="draw with torch and apply the result as a factor, or set the probability to 0 (layerdrop=0.0)",
    )


def _check_batch(symbols: Symbols, shape_env: FollowingShapeEnv, batch: int) -> None:
    for symbol, (node, dimension) in symbols.source.items():
        value = symbols.simplified(symbol)
        if value != symbol:
            raise TraceError(
                f"the model only takes batches of {value} samples: dimension {dimension} of {node.name} was taken for "
                f"a number (the batch had {batch})",
                where=shape_env.fixed_at.get(symbol, ""),
                remedy="compute with x.shape[0] as it is: no int(), no range() over it, no comparison with a number",
            )


def _copy_reassigned(recorder: Recorder, borrowed: Borrowed) -> None:
    """Write ``self.buffer = value`` as ``self.buffer.copy_(value)``."""
    for name, now in borrowed.reassigned_buffers().items():
        fake = borrowed.fake[name]
        if now is None or now.shape != fake.shape or now.dtype != fake.dtype:
            raise TraceError(
                f"buffer {name} is bound to a tensor of another shape or dtype in the forward",
                remedy="keep its shape and dtype, or keep the value out of the module",
            )
        with torch.no_grad():
            fake.copy_(now)


def _clone_changed_inputs(graph: fx.Graph) -> None:
    """Give an input that is changed in place a clone, which is changed instead."""
    changed = [n for node in graph.nodes for n in node.meta.get("mutates", ()) if _root_input(n) is not None]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs:
        if not any(_root_input(entry) is node for entry in changed):
            continue
        with graph.inserting_after(inputs[-1]):
            clone = graph.call_method("clone", (node,))
        clone.meta = {**node.meta, "stack": (), "grad": True, "autocast": (), "random": (0, 0)}
        clone.meta["val"] = node.meta["val"]
        clone.meta["fresh"] = True
        node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
        for other in graph.nodes:
            if "mutates" in other.meta:
                other.meta["mutates"] = [clone if entry is node else entry for entry in other.meta["mutates"]]


def _root_input(node: fx.Node) -> fx.Node | None:
    """Return the input whose memory a value has, or None."""
    key = storage_key(node.meta.get("val"))
    if key is None:
        return None
    for other in node.graph.nodes:
        if other.op != "placeholder":
            return None
        if storage_key(other.meta["val"]) == key:
            return other
    return None


def storage_key(value: Any) -> int | None:
    """Return what tells one memory from another, None where a value has none."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def remove_unused(graph: fx.Graph) -> None:
    """Remove what nobody reads and what changes nothing. Positions of random draws are already counted."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node.meta.get("changed") or node.meta.get("keep"):
            continue
        graph.erase_node(node)


def source_text(meta: Mapping[str, Any]) -> str:
    """Return ``file:line`` of a node, "" where unknown."""
    if "source" not in meta:
        return ""
    filename, line = meta["source"]
    return f"{short_path(filename)}:{line}"


def where_text(meta: Mapping[str, Any]) -> str:
    """Return ``file:line: source line`` of a node, "" where unknown."""
    return place(*meta["source"]) if "source" in meta else ""
