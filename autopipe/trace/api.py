"""Capture the training forward of a workload as a graph, and check the graph against the model."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopipe import sparse
from autopipe.devices import reraise_failure_of_device
from autopipe.errors import TraceError
from autopipe.ir.graph import Graph, Input, Node
from autopipe.trace.after_step import effects_of
from autopipe.trace.graph.replay import CPU
from autopipe.trace.numbers import CHANGING, WithNumbers, note_of
from autopipe.trace.opaque.choose import Opaque, paths_of
from autopipe.trace.placed import Place
from autopipe.trace.proof import Proof, another_size, bounded, other_batch
from autopipe.trace.record.model_snapshot import left_as_it_was
from autopipe.trace.result import Capture, with_divisor
from autopipe.trace.sizes.lengths import Length, found_lengths, other_sizes, sizes_of, varying_lengths
from autopipe.trace.state.check import refuse_changing_state
from autopipe.trace.state.observing.observe import Ran, observed
from autopipe.trace.state.snapshots.settings import SETTINGS
from autopipe.trace.state.unread import unread_paths
from autopipe.trace.strategies import CaptureStrategies
from autopipe.trace.tape.survey import Start, Survey
from autopipe.trace.tape.tape import why_unknown
from autopipe.workload import Item, Workload
from autopipe.workload.model.factory import trains
from autopipe.workload.model.size_limits import lack_of_memory_to_verify

logger = logging.getLogger(__name__)
_Record = Callable[..., Capture]


def capture(
    workload: Workload,
    *,
    batch_size: int = 5,
    allow_data_dependent: bool = False,
    verify: bool = True,
    model: nn.Module | None = None,
    lengths: bool = True,
    training: bool = True,
    others: Sequence[Item] | None = None,
    state: bool = True,
    changing: Callable[[], Survey] = lambda: Survey(None),
    numbers: tuple[Input, ...] | None = None,
    device: torch.device = CPU,
) -> Capture:
    """Capture the loss of one batch as a graph. A model that is passed in is restored afterwards.

    ``batch_size``: the minimum size of the captured batch. The next number that equals no size of the model is used, so
    that no other size is mistaken for it. ``lengths``: let sequence lengths vary if the model supports it.
    ``training``: False captures the model in evaluation mode. ``others``: for a further recording of a model, batches
    of the same form that were recorded before; the sizes in which they differ from the batch may vary if the model
    supports it. ``state``: search for Python state that the forward changes and reads. ``changing``: called if that
    search refuses the model; returns the numbers that change, which become inputs of the graph, so that each microbatch
    brings them, or None and the reason. The graph then ``varies``: it is that of the first microbatch. ``numbers``:
    those of an earlier capture that varies. ``device``: computes real numbers; before and afterwards the model is on
    the CPU. Memory: ``verify`` keeps moved weights and two gradients per parameter; if these do not fit this host, the
    capture is not verified, with a note.

    Raises: TraceError with the user's line if the model cannot be captured, if the graph differs from the model, or if
    the loss of a training has no gradient; any error of ``device``, which may be of no use to this process afterwards.
    """
    model = workload.build_model() if model is None else model
    place = (Place(device) if numbers is None else Place()).or_cpu(model)

    def record(of: Workload, *, training: bool) -> Capture:
        arguments = batch_size, allow_data_dependent, verify, lengths, others, state, place
        return _capture(of, model, *arguments, training=training)

    def varying(inputs: tuple[Input, ...]) -> Capture:
        return _with_numbers(workload, inputs, record, model)

    if training:
        try:
            captured = record(workload, training=True) if numbers is None else varying(numbers)
        except TraceError as error:
            if numbers is not None or not error.of_state or not place.is_cpu:
                raise
            captured = _with_changing(changing, varying, error)
        return _with_after_step(workload, model, captured) if "after_step" in workload.hooks else captured
    opaque = workload.spec.opaque_modules
    with left_as_it_was(model):
        model.eval()
        try:
            return record(workload, training=False)
        finally:
            workload.run_opaque(opaque)


def _capture(
    workload: Workload,
    model: nn.Module,
    batch_size: int,
    allow_data_dependent: bool,
    verify: bool,
    free: bool,
    others: Sequence[Item] | None,
    state: bool,
    place: Place,
    *,
    training: bool,
) -> Capture:
    _refuse_sparse_parameters(model)
    ran: dict[types.CodeType, Ran] = {}
    item = observed(lambda: workload.example_item(batch_size), ran)
    settings = dict(SETTINGS.all())
    fixed = workload.is_fixed(item)
    distinct = _distinct(sizes_of(model) | other_sizes(workload, item), batch_size)
    if fixed:
        batch_size = workload.num_samples(item)
    elif distinct != batch_size:
        batch_size, item = distinct, workload.example_item(distinct)
    lengths: tuple[Length, ...] = ()
    if others:
        each = [workload.leaves(other) for other in others]
        lengths = varying_lengths(workload.leaves(item), each, {} if fixed else workload.batch_dims(item))
    elif free and not fixed:
        lengths = found_lengths(model, workload.leaves(item), workload.batch_dims(item), batch_size)
    opaque = _opaque(workload, model, item, batch_size, () if others else lengths)
    strategies = CaptureStrategies(
        workload, model, item, batch_size, lengths, bool(others), allow_data_dependent, opaque=opaque
    )
    with _nothing_collected():
        captured, opaque = _first_capture(strategies, opaque)
        if training:
            _refuse_without_gradient(captured.graph)
        workload.run_opaque(opaque.modules)
        of_state, unread = _of_python(workload, model, item, captured, place, ran if state else None, settings)
    items = [item] if fixed else [item, other_batch(workload, item, another_size(batch_size))]

    def completed(capture: Capture) -> Capture:
        form = dataclasses.replace(capture.graph.batch, unread=unread)
        capture = dataclasses.replace(capture, graph=dataclasses.replace(capture.graph, batch=form))
        return with_divisor(capture, *map(workload.leaves, items))

    captured = completed(dataclasses.replace(captured, notes=(*opaque.notes(), *of_state, *captured.notes)))
    notes = _why_not_verified(model, place, verify)
    if not verify or notes:
        return dataclasses.replace(bounded(captured, lengths, 0), notes=(*captured.notes, *notes))
    proof = Proof(workload, model, items, in_parts=trains(model) and not fixed and others is None, place=place)
    if others and captured.graph.lengths:
        try:
            proof.on_batches(captured, others)
        except TraceError as why:
            reraise_failure_of_device(why)
            logger.info("the sizes in which batches differ stay fixed: %s", why.what)
            captured = completed(dataclasses.replace(strategies, lengths=()).capture())
    elif captured.graph.lengths:
        proven = proof.at_lengths(captured, lengths)
        if proven is not None:
            return proven
        captured = completed(dataclasses.replace(strategies, lengths=()).capture())
    return proof.of(captured)


def _of_python(
    workload: Workload,
    model: nn.Module,
    item: Item,
    captured: Capture,
    place: Place,
    ran: dict[types.CodeType, Ran] | None,
    settings: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the notes of the search for state, and the parts of a batch that are not read.

    ``ran``: None to search for no state. Raises: TraceError with ``of_state`` if the forward reads state that changes.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return (), ()
    notes: tuple[str, ...] = ()
    with place.having(workload, model, captured) as placed:
        own = place.item(workload, item)
        if ran is not None and trains(model):
            with _of_state():
                notes = refuse_changing_state(placed, model, own, ran, settings)
        return notes, unread_paths(placed, model, own, captured.module)


def _why_not_verified(model: nn.Module, place: Place, verify: bool) -> tuple[str, ...]:
    if any(parameter.is_meta for parameter in model.parameters()):
        return ("not verified: the model is on the meta device",)
    lack = lack_of_memory_to_verify(model) if verify and place.is_cpu else ""
    return (f"the captured model is not compared with the original: {lack}",) if lack else ()


def _with_changing(
    changing: Callable[[], Survey],
    varying: Callable[[tuple[Input, ...]], Capture],
    error: TraceError,
) -> Capture:
    """Capture a model that changes state as it is for the first microbatch. Raises: ``error``, with why not."""
    numbers, why, _ = changing()
    try:
        if numbers is not None:
            return varying(numbers)
    except TraceError as refusal:
        why = refusal.what
    error.remedy += f"; running its Python for each microbatch is not possible: {why}" if why else ""
    raise error


def _with_numbers(workload: Workload, numbers: tuple[Input, ...], record: _Record, model: nn.Module) -> Capture:
    """Capture with the numbers that change as inputs. Raises: TraceError if they cannot be."""
    captured = record(WithNumbers(workload, numbers, Start(workload, model).restore), training=True)
    names = {entry.name for entry in numbers}
    divisor: Any = [] if captured.divisor is None else captured.divisor.module.graph.nodes
    divides = any(node.name in names and node.users for node in divisor)
    why = "the divisor of the loss changes" if divides else ""
    if any(node.checkpoint for node in captured.graph.nodes):  # which runs once on fakes
        why = why or "torch.utils.checkpoint runs Python twice"
    why = why or why_unknown(captured.graph) or ("" if captured.graph.batch.is_plain else "the batch is not plain")
    if why:
        raise TraceError(f"{CHANGING}: {why}", where=workload.name)
    graph, notes = dataclasses.replace(captured.graph, varies=True), (*captured.notes, note_of(captured.graph))
    return dataclasses.replace(captured, graph=graph, notes=notes, evaluation={}, evaluation_note=CHANGING)


def _refuse_sparse_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if sparse.is_sparse(parameter):
            layout = str(parameter.layout).removeprefix("torch.")
            raise TraceError(
                f"parameter {name} is sparse ({layout}), so its gradient would be sparse",
                remedy="make it dense (to_dense()), or, if it is not trained, a buffer (register_buffer)",
            )


def _opaque(workload: Workload, model: nn.Module, item: Item, batch_size: int, lengths: tuple[Length, ...]) -> Opaque:
    """Return the initial opaque modules: those that the user named, and those of an earlier capture."""

    def others() -> list[Item]:
        if workload.is_fixed(item):
            return []
        return [other_batch(workload, item, another_size(batch_size)), workload.example_item(batch_size + 3)]

    spec = workload.spec
    workload.run_opaque(())  # count each draw separately while modules are observed
    opaque = Opaque(workload, model, item, spec.opaque, lengths, others)
    if not any(parameter.is_meta for parameter in model.parameters()):
        opaque.require(paths_of(spec.opaque))
        opaque.require(spec.opaque_modules, "it runs so in training")
    return opaque


def _first_capture(strategies: CaptureStrategies, opaque: Opaque) -> tuple[Capture, Opaque]:
    """Capture with lengths that may vary; without them if a module must run as it is, and cannot at other lengths."""
    try:
        return strategies.capture(), opaque
    except TraceError as error:
        if not opaque.unfit or not opaque.lengths:
            raise
        logger.info("sequence lengths stay fixed: %s", error.what)
    opaque = _opaque(strategies.workload, strategies.model, strategies.item, strategies.batch, ())
    return dataclasses.replace(strategies, lengths=(), opaque=opaque).capture(), opaque


def _with_after_step(workload: Workload, model: nn.Module, captured: Capture) -> Capture:
    """Add the effects of the ``after_step`` hook, and what they depend on. Raises: ModelFileError."""
    effects = effects_of(workload, model)
    graph = dataclasses.replace(captured.graph, after_step=effects.reads)
    return dataclasses.replace(captured, graph=graph, notes=(*captured.notes, *effects.notes))


@contextlib.contextmanager
def _of_state() -> Iterator[None]:
    """Mark an error of the search for Python state."""
    try:
        yield
    except TraceError as error:
        error.of_state = True
        raise


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable garbage collection.

    Capture allocates tens of thousands of live objects; each collection would rescan the whole heap (up to a third of
    the capture time).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _distinct(sizes: Container[int], start: int) -> int:
    """Return the first number from ``start`` on that is not in ``sizes``."""
    candidate = max(start, 2)
    while candidate in sizes:
        candidate += 1
    return candidate


def _refuse_without_gradient(graph: Graph) -> None:
    """Refuse a graph whose loss does not require a gradient.

    Raises: TraceError with the cause, and the line nearest to the loss whose result has no gradient any more.
    """
    nodes = {node.name: node for node in graph.nodes}
    specs = {entry.name: entry.spec for entry in graph.inputs}
    specs.update({node.name: node.spec for node in graph.nodes if node.spec is not None})
    loss = graph.outputs[0]
    if loss not in specs or specs[loss].requires_grad:
        return

    def differentiable(node: Node) -> bool:
        """Return whether anything that a call reads requires a gradient."""
        return any(graph.parameters[name].requires_grad for name in node.parameters) or any(
            specs[name].requires_grad if name in specs else differentiable(nodes[name]) for name in node.inputs
        )

    above, waiting = {loss}, [loss]
    while waiting:
        node = nodes.get(waiting.pop())
        new = {*(() if node is None else (*node.inputs, *node.after))} - above
        above |= new
        waiting += new
    what = "the loss has no gradient, so that nothing would be trained, and backward() fails in plain PyTorch"
    if not any(spec.requires_grad for spec in graph.parameters.values()):
        remedy = (
            "set requires_grad of the parameters to train to True, or add a layer to train"
            if graph.parameters
            else "register what is to be trained as an nn.Parameter or a module"
        )
        raise TraceError(f"{what}: no parameter of the model requires a gradient", where=graph.name, remedy=remedy)
    ends = [
        node
        for node in graph.nodes
        if node.name in above and node.name in specs and not specs[node.name].requires_grad and differentiable(node)
    ]
    if not ends:
        raise TraceError(
            f"{what}: it does not depend on any parameter that requires a gradient",
            where=graph.name,
            remedy="compute the loss from the output of the model, or set requires_grad of the parameters that it uses "
            "to True",
        )
    end = ends[-1]
    call = ".data" if end.target == "getattr" else end.target.rpartition(".")[2]
    cause = f"the result of {call} has no gradient, and the loss depends on the parameters through such results only"
    remedy = "compute the loss from a result that has a gradient"
    if "no_grad" in end.context:
        cause = f"{call} runs under torch.no_grad() or torch.inference_mode()"
        remedy = "leave these to the evaluation, outside of the model and the loss"
    elif call in ("detach", "detach_", ".data"):
        remedy = f"remove {call}" + "()" * (call != ".data")
    raise TraceError(f"{what}: {cause}", where=end.place or graph.name, remedy=remedy)
