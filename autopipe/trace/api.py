"""``capture``: the user's workload -> the graph of its training forward, checked against the model itself."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import types
from collections.abc import Container, Iterator

from torch import nn

from autopipe import sparse
from autopipe.errors import TraceError
from autopipe.ir.graph import Graph
from autopipe.trace.after_step import effects_of
from autopipe.trace.loss.coupling import coupling_notes
from autopipe.trace.loss.divisor import find_divisor
from autopipe.trace.opaque.choose import Opaque, paths_of
from autopipe.trace.record.borrowed import Snapshot
from autopipe.trace.result import Capture
from autopipe.trace.sizes.lengths import Length, cut, found_lengths, other_sizes, shorter, sizes_of
from autopipe.trace.state.check import refuse_changing_state
from autopipe.trace.state.observe import Ran, observed
from autopipe.trace.state.unread import unread_paths
from autopipe.trace.strategies import CaptureStrategies
from autopipe.trace.verify import verify as verify_capture
from autopipe.workload import Item, Workload
from autopipe.workload.batches.forms import form_of
from autopipe.workload.batches.layouts import laid_out
from autopipe.workload.model.modes import trains

logger = logging.getLogger(__name__)


def capture(
    workload: Workload,
    *,
    batch_size: int = 5,
    allow_data_dependent: bool = False,
    verify: bool = True,
    model: nn.Module | None = None,
    lengths: bool = True,
    training: bool = True,
) -> Capture:
    """Follow the loss of one batch and return its graph. The model, where one is given, is left exactly as it was.

    ``batch_size``: of the batch that is followed; the next number that no size of the model equals is taken, so that
    none is mistaken for the batch. ``lengths``: leave sequence lengths free where the model allows it. ``training``:
    False follows the model in evaluation mode. Memory: no weight is copied; ``verify`` keeps one gradient per
    parameter, twice.

    Raises: TraceError with the user's line when the model cannot be followed, or when the graph is not the model.
    """
    model = workload.build_model() if model is None else model
    if training:
        captured = _capture(workload, model, batch_size, allow_data_dependent, verify, lengths)
        return _with_after_step(workload, model, captured) if "after_step" in workload.hooks else captured
    before, trained = Snapshot(model), workload.spec.opaque_modules
    model.eval()
    try:
        return _capture(workload, model, batch_size, allow_data_dependent, verify, lengths)
    finally:
        before.restore()
        workload.run_opaque(trained)


def _capture(
    workload: Workload, model: nn.Module, batch_size: int, allow_data_dependent: bool, verify: bool, free: bool
) -> Capture:
    _refuse_sparse_parameters(model)
    ran: dict[types.CodeType, Ran] = {}
    item = observed(lambda: workload.example_item(batch_size), ran)
    fixed = workload.is_fixed(item)
    distinct = _distinct(sizes_of(model) | other_sizes(workload, item), batch_size)
    if fixed:
        batch_size = workload.num_samples(item)
    elif distinct != batch_size:
        batch_size, item = distinct, workload.example_item(distinct)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    lengths: tuple[Length, ...] = ()
    if free and not fixed:
        lengths = found_lengths(model, workload.leaves(item), workload.batch_dims(item), batch_size)
    opaque = _opaque(workload, model, item, batch_size, lengths)
    strategies = CaptureStrategies(workload, model, item, batch_size, lengths, allow_data_dependent, opaque=opaque)
    with _nothing_collected():
        captured = strategies.capture()
        workload.run_opaque(opaque.modules)
        if trains(model) and not on_meta:
            refuse_changing_state(workload, model, item, ran)
        unread = () if on_meta else unread_paths(workload, model, item, captured.module)
    items = [item] if fixed else [item, _other(workload, item, batch_size)]

    def completed(capture: Capture) -> Capture:
        form = dataclasses.replace(capture.graph.batch, unread=unread)
        capture = dataclasses.replace(capture, graph=dataclasses.replace(capture.graph, batch=form))
        return _with_divisor(workload, capture, *items)

    captured = completed(dataclasses.replace(captured, notes=(*opaque.notes(), *captured.notes)))
    if not verify or on_meta:
        note = ("not verified: the model is on the meta device",) if on_meta else ()
        return dataclasses.replace(_bounded(captured, lengths, 0), notes=captured.notes + note)
    if len(captured.graph.symbols) > 1:
        part = _verified_at(workload, model, item, captured, lengths)
        if part is None:
            captured = completed(dataclasses.replace(strategies, lengths=()).capture())
        else:
            captured = _bounded(captured, lengths, part)
    exact, notes = verify_capture(workload, model, captured.module, captured.graph, items)
    if trains(model) and not fixed:
        notes += coupling_notes(workload, model, item, captured.graph, captured.divisor)
    graph: Graph = dataclasses.replace(captured.graph, exact=exact)
    return dataclasses.replace(captured, graph=graph, exact=exact, notes=(*captured.notes, *notes))


def _refuse_sparse_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if sparse.is_sparse(parameter):
            layout = str(parameter.layout).removeprefix("torch.")
            raise TraceError(
                f"parameter {name} is stored sparse ({layout}): its gradient would be, too",
                remedy="store it dense (to_dense()), or make it a buffer (register_buffer) where it is not trained",
            )


def _opaque(workload: Workload, model: nn.Module, item: Item, batch_size: int, lengths: tuple[Length, ...]) -> Opaque:
    """Return the modules that run as they are before anything was followed: those that were named, or ran so before."""

    def others() -> list[Item]:
        if workload.is_fixed(item):
            return []
        return [_other(workload, item, batch_size), workload.example_item(batch_size + 3)]

    spec = workload.spec
    workload.run_opaque(())  # while modules are observed, each draw is counted by itself
    opaque = Opaque(workload, model, item, spec.opaque, lengths, others)
    if not any(parameter.is_meta for parameter in model.parameters()):
        opaque.require(paths_of(spec.opaque))
        opaque.require(spec.opaque_modules, "it runs so in training")
    return opaque


def _with_after_step(workload: Workload, model: nn.Module, captured: Capture) -> Capture:
    """Add what the hook after each step changes, and what that depends on. Raises: ModelFileError."""
    effects = effects_of(workload, model)
    graph = dataclasses.replace(captured.graph, after_step=effects.reads)
    return dataclasses.replace(captured, graph=graph, notes=(*captured.notes, *effects.notes))


def _with_divisor(workload: Workload, captured: Capture, *items: Item) -> Capture:
    """Add what the loss divides by. One that cannot be computed on real batches is left out."""
    divisor = find_divisor(captured.graph, captured.module)
    try:
        for item in items:
            if divisor is not None:
                divisor.values(workload.leaves(item))
    except Exception as error:
        logger.info("the divisor of the loss cannot be computed: %s", error)
        return captured
    text = "" if divisor is None else divisor.text
    return dataclasses.replace(captured, divisor=divisor, graph=dataclasses.replace(captured.graph, divisor=text))


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the collector of garbage out.

    A pass makes tens of thousands of objects that stay until it is over, and each of its looks for garbage goes through
    all that the process holds: it took up to a third of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _verified_at(
    workload: Workload, model: nn.Module, item: Item, captured: Capture, lengths: tuple[Length, ...]
) -> int | None:
    """Return which of the shorter lengths equals the model on real numbers, the shortest first; None where none does.

    The model itself may not take such a batch (a label that lies behind the end); then nothing is known of lengths.
    """
    for part in range(min(len(shorter(length.size)) for length in lengths)):
        leaves = cut(workload.leaves(item), lengths, part)
        try:
            verify_capture(
                workload, model, captured.module, captured.graph, [workload.with_leaves(item, leaves)], seeds=1
            )
        except TraceError as why:
            logger.info("lengths %s: %s", [shorter(length.size)[part] for length in lengths], why.what)
        else:
            return part
    return None


def _bounded(captured: Capture, lengths: tuple[Length, ...], part: int) -> Capture:
    """Write down from which length on the graph is known to be the model: that of the shortest batch compared."""
    symbols = list(captured.graph.symbols[:1])
    for symbol, length in zip(captured.graph.symbols[1:], lengths, strict=False):
        symbols.append(dataclasses.replace(symbol, low=shorter(length.size)[part]))
    graph: Graph = dataclasses.replace(captured.graph, symbols=tuple(symbols))
    return dataclasses.replace(captured, graph=graph)


def _distinct(sizes: Container[int], start: int) -> int:
    """Return the first number from ``start`` on that is none of ``sizes``."""
    candidate = max(start, 2)
    while candidate in sizes:
        candidate += 1
    return candidate


def _other(workload: Workload, item: Item, batch_size: int) -> Item:
    """Return a batch of another size, of other samples where the data has them.

    What in it is no tensor is as in ``item``, which the graph was captured with: a number such as the count of labels
    in a batch is a constant of the graph.
    """
    other = 3 if batch_size != 3 else 4
    if not workload.cuts_by_dimension(workload.example_item(batch_size)):
        return workload.example_item(other)  # part of a batch may be no batch
    both = workload.example_item(batch_size + other)
    leaves, dimensions = workload.leaves(both), workload.batch_dims(both)
    other_leaves = {
        name: laid_out(leaf.narrow(dimensions[name], batch_size, other), leaf) if name in dimensions else leaf
        for name, leaf in leaves.items()
    }
    same = form_of(both).structure == form_of(item).structure
    return workload.with_leaves(item if same else both, other_leaves)
