"""Run the user's loss once with fake tensors, and clean up the recording.

The recording makes explicit what Python did by assignment: a buffer that is bound to a new tensor becomes a copy into
the buffer (``rebound``), and a batch that is changed in place is cloned first, so that every stage can start from its
own copy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from autopipe.errors import TraceError
from autopipe.trace.explain import COIN, FIXED_BATCH, explained
from autopipe.trace.lines.draws import DrawingLine, is_drawn
from autopipe.trace.numbers import Numbers
from autopipe.trace.opaque.choose import Opaque
from autopipe.trace.record import rebound
from autopipe.trace.record.faked_model import FakedModel
from autopipe.trace.record.model_snapshot import NUMPYS, ModelSnapshot
from autopipe.trace.record.patches import TrainingReads, following
from autopipe.trace.record.real_values import RealValues
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.symbols import Symbols
from autopipe.trace.record.values import storage_key
from autopipe.trace.sizes.joined import join
from autopipe.trace.sizes.lengths import Length
from autopipe.workload import Item, Workload
from autopipe.workload.batches.items import paths
from autopipe.workload.batches.layouts import strides_like

if TYPE_CHECKING:
    from autopipe.trace.record.shape_env import FollowingShapeEnv

logger = logging.getLogger(__name__)

Forward = Callable[[Recorder, Item], tuple[Tensor, Tensor | None]]


@dataclass
class Followed:
    """The recording of one run."""

    recorder: Recorder
    faked_model: FakedModel
    symbols: Symbols
    sizes: tuple[int, ...]  # the number of samples and the lengths; empty if none of them may vary
    reads_training: bool  # whether the user's code reads ``training``
    batch: tuple[str, int] | None  # (input, dimension) that gives the number of samples, if any
    lengths: tuple[Length, ...] = ()
    calls: tuple[fx.Node, ...] = ()  # as recorded, before the cleanup

    @property
    def graph(self) -> fx.Graph:
        """The recorded calls."""
        return self.recorder.graph

    @property
    def places(self) -> list[tuple[fx.Node, int] | None]:
        """The source of each of ``sizes``: an input and its dimension. None: no dimension counts the samples."""
        inputs = {str(node.target): node for node in self.graph.nodes if node.op == "placeholder"}
        places = [self.batch, *(length.places[0] for length in self.lengths)][: len(self.sizes)]
        return [None if place is None else (inputs[place[0]], place[1]) for place in places]


def follow(
    workload: Workload,
    model: nn.Module,
    item: Item,
    *,
    batch: int | None = None,
    lengths: tuple[tuple[Length, int], ...] = (),
    watch: bool = False,
    answer: bool = False,
    forward: Forward | None = None,
    most: int = 0,
    comparison: Callable[[fx.Node], None] | None = None,
    opaque: Opaque | None = None,
) -> Followed:
    """Run ``workload.loss(model, item)`` with fake tensors, or ``forward`` in its place.

    ``batch``: the number of samples to record; None for a symbolic number. ``lengths``: each with the size at which it
    is recorded. ``watch``: stop at the first call after a draw from Python's or numpy's random generator. ``answer``:
    keep the data-dependent decisions of this batch (symbolic only). ``most``: maximum number of calls; 0 for no limit.
    ``comparison``: receives every recorded call, and may raise a TraceError that ends the recording. ``opaque``: the
    opaque modules, each call of which becomes one node.

    Raises: TraceError with the user's line and the smallest edit if the model cannot be recorded.
    """
    from autopipe.trace.record.shape_env import FollowingShapeEnv  # it imports sympy

    if getattr(workload, "varies", False):
        workload.begin()  # type: ignore[attr-defined]  # of ``numbers.WithNumbers``
    leaves = workload.leaves(item)
    sized = [leaf for leaf in leaves.values() if leaf.dim() > 0]
    if not sized:
        raise TraceError(
            "the batch has no tensor with a dimension", remedy="use tensors whose first dimension is the batch"
        )
    dimensions = workload.batch_dims(item)
    first, count = next(iter(dimensions.items()), None), workload.num_samples(item)
    if workload.is_fixed(item):
        dimensions, first = {}, None
    shape_env = FollowingShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    symbols = Symbols(shape_env)
    faked_model = FakedModel(model, mode, sized[0].device)
    with faked_model:
        recorder = Recorder(faked_model, symbols, watch=watch)
        recorder.most, recorder.comparison, recorder.modules.opaque = most, comparison, opaque
        recorder.numbers = Numbers(getattr(workload, "numbers", ()))
        recorder.modules.opened = getattr(workload, "varies", False)
        shape_env.around = lambda: recorder.modules.around
        given = {place: size for length, size in lengths for place in length.places}
        fakes = {
            name: _fake_leaf(mode, name, leaf, dimensions.get(name), batch, given) for name, leaf in leaves.items()
        }
        for name, fake in fakes.items():
            recorder.writer.add_input(name, fake)
        if answer:
            recorder.answers.keep(RealValues(faked_model, leaves, workload.spec.seed))
        shape_env.on_answer = recorder.answers.on_comparison
        with running(recorder, mode, symbolic=batch is None) as reads:
            faked = workload.with_leaves(item, fakes)
            loss, weight = workload.loss(model, faked) if forward is None else forward(recorder, faked)
            copied = rebound.copy_into_buffers(recorder, faked_model, loss)
            recorder.writer.set_output((loss,) if weight is None else (loss, weight))
        drawn = faked_model.snapshot.random_drawn()
    if drawn and not watch:
        raise _coin(workload, model, item, drawn, answer=answer, opaque=opaque)
    _check_batch(symbols, shape_env, count, item)
    calls = tuple(recorder.graph.nodes)
    clean(recorder, faked_model, copied, batch or count)
    sizes = () if first is None and not lengths else (batch or count, *(size for _, size in lengths))
    free = tuple(length for length, _ in lengths)
    return Followed(recorder, faked_model, symbols, sizes, reads.seen, first, free, calls)


def clean(recorder: Recorder, faked_model: FakedModel, copied: Mapping[str, fx.Node], count: int) -> None:
    """Make explicit in a recorded graph what Python did by assignment. ``copied``: see ``rebound``."""
    rebound.place_copies(recorder.graph, faked_model, copied)
    _clone_changed_inputs(recorder.graph)
    join(recorder.graph, count)
    remove_unused(recorder.graph)


@contextlib.contextmanager
def running(recorder: Recorder, mode: FakeTensorMode, *, symbolic: bool) -> Iterator[TrainingReads]:
    """Record inside, on fakes of a mode. Raises: TraceError for any exception."""
    # without it, some C++ operations convert a symbolic size to a number
    dispatcher = enable_python_dispatcher() if symbolic else contextlib.nullcontext()
    try:
        with following(recorder) as reads, mode, recorder.random, dispatcher, recorder:
            yield reads
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        failure = explained(error, recorder.construct, drawn=is_drawn(recorder, error))
        failure.within = failure.within or recorder.modules.within
        raise failure from error
    finally:
        if recorder.answers.reads is not None:
            with recorder.faked_model.unfaked():
                recorder.answers.reads.restore()


def _fake_leaf(
    mode: FakeTensorMode,
    name: str,
    leaf: Tensor,
    counting: int | None,
    batch: int | None,
    lengths: Mapping[tuple[str, int], int],
) -> Tensor:
    """Return the fake of an input: a separate object even if the user passes one tensor twice.

    ``counting``: the dimension that counts the samples.
    """
    if batch is not None:
        shape = [lengths.get((name, dimension), size) for dimension, size in enumerate(leaf.shape)]
        if counting is not None:
            shape[counting] = batch
        with mode:
            return _empty(leaf, shape)
    from torch._dynamo.source import LocalSource  # it takes half a second, and most models need no symbolic size
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    real = _empty(leaf, leaf.shape)
    sizes = [DimDynamic.DUCK if d == counting else DimDynamic.STATIC for d in range(leaf.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(real, source=LocalSource(name), symbolic_context=context)


def _empty(leaf: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape with the memory layout of ``leaf``."""
    strides = strides_like(leaf, shape)
    return torch.empty_strided(
        list(shape), strides, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad
    )


def _coin(
    workload: Workload, model: nn.Module, item: Item, generator: str, *, answer: bool, opaque: Opaque | None
) -> TraceError:
    """Return the error for a model that makes random decisions outside of torch, which a graph would fix."""
    before = ModelSnapshot(model)
    within: tuple[str, ...] = ()
    try:
        with DrawingLine(before.numpy_drawn if generator == NUMPYS else None) as line:
            follow(workload, model, item, watch=True, answer=answer, opaque=opaque)
    except TraceError as error:
        within = error.within
        logger.info("the pass that looks for the draw ended: %s", error.what)
    coin = TraceError(
        f"the model draws from {generator} in its forward, {COIN}",
        where=line.where,
        remedy="draw with torch and apply the result as a factor, or set the probability to 0 (layerdrop=0.0)",
    )
    coin.within = within
    return coin


def _check_batch(symbols: Symbols, shape_env: FollowingShapeEnv, batch: int, item: Item) -> None:
    counts = [path for path, leaf in paths(item) if type(leaf) is int and leaf == batch]
    for symbol, (node, dimension) in symbols.source.items():
        value = symbols.simplified(symbol)
        if value != symbol:
            fixed = TraceError(
                f"{FIXED_BATCH} {value} samples: dimension {dimension} of {node.name} was taken for "
                f"a number (the batch had {batch})",
                where=shape_env.fixed_at.get(symbol, ""),
                remedy=f"{counts[0]} of the batch counts the samples, and a number is a constant of the graph: give a "
                f"tensor with an entry for each sample in its place, torch.zeros({batch}), and use its shape[0]"
                if counts
                else "compute with x.shape[0] directly: do not use int(), range() or a comparison with a number",
            )
            fixed.within = shape_env.fixed_within.get(symbol, ())
            raise fixed


def _clone_changed_inputs(graph: fx.Graph) -> None:
    """Clone each input that is changed in place; the clone is changed instead."""
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
    other: fx.Node
    for other in node.graph.nodes:
        if other.op != "placeholder":
            return None
        if storage_key(other.meta["val"]) == key:
            return other
    return None


def remove_unused(graph: fx.Graph) -> None:
    """Remove unused calls without side effects. Positions of random draws are already counted."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node.meta.get("changed") or node.meta.get("keep"):
            continue
        graph.erase_node(node)
