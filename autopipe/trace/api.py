"""Capture the training forward of a workload as a graph, and check the graph against the model."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Container, Iterator, Sequence
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
from autopipe.trace.state.repeats import Start, functions_of, refuse_other_calls, restored
from autopipe.trace.state.unread import unread_paths
from autopipe.trace.strategies import CaptureStrategies
from autopipe.trace.tape.survey import Survey
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
    changing: Callable[[], Survey] | None = None,
    numbers: tuple[Input, ...] | None = None,
    device: torch.device = CPU,
) -> Capture:
    """Capture the loss of one batch as a graph. A model that is passed in is restored afterwards.

    ``batch_size``: the minimum size of the captured batch. The next number that equals no size of the model is used, so
    that no other size is mistaken for it. ``lengths``: let sequence lengths vary if the model supports it.
    ``training``: False captures the model in evaluation mode. ``others``: for a further recording of a model, batches
    of the same form that were recorded before; the sizes in which they differ from the batch may vary if the model
    supports it. ``changing``: returns what the model's Python does otherwise from step to step; None to ask for
    nothing. Numbers that change become inputs of the graph, so that each microbatch brings them. The graph then
    ``varies``: it is that of the first microbatch. ``numbers``: those of an earlier capture that varies. ``device``:
    computes real numbers; before and afterwards the model is on the CPU. Memory: ``verify`` keeps moved weights and two
    gradients per parameter; if these do not fit this host, the capture is not verified, with a note.

    Raises: TraceError with the user's line if the model cannot be captured, if it changes from step to step in a way
    that cannot be trained, if the graph differs from the model, or if the loss of a training has no gradient; any error
    of ``device``, which may be of no use to this process afterwards.
    """
    model = workload.build_model() if model is None else model
    place = (Place(device) if numbers is None else Place()).or_cpu(model)

    def record(of: Workload, look: Callable[[], Survey] | None = None, *, training: bool = True) -> Capture:
        arguments = batch_size, allow_data_dependent, verify, lengths, others, look, place
        return _capture(of, model, *arguments, training=training)

    def varying(inputs: tuple[Input, ...]) -> Capture:
        return _with_numbers(workload, inputs, record, model)

    if training:
        try:
            captured = record(workload, changing) if numbers is None else varying(numbers)
        except _VariesError as error:
            captured = _varying(error.survey, varying, place)
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
    look: Callable[[], Survey] | None,
    place: Place,
    *,
    training: bool,
) -> Capture:
    _refuse_sparse_parameters(model)
    item = workload.example_item(batch_size)
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
        unread = _unread(workload, model, item, captured, place)
    items = [item] if fixed else [item, other_batch(workload, item, another_size(batch_size))]

    def completed(capture: Capture) -> Capture:
        form = dataclasses.replace(capture.graph.batch, unread=unread)
        capture = dataclasses.replace(capture, graph=dataclasses.replace(capture.graph, batch=form))
        return with_divisor(capture, *map(workload.leaves, items))

    captured = completed(dataclasses.replace(captured, notes=(*opaque.notes(), *captured.notes)))
    look = look if training and trains(model) and not any(p.is_meta for p in model.parameters()) else None
    notes = _why_not_verified(model, place, verify)
    if not verify or notes:
        _refuse_changes(look, workload, model, item, captured, place)
        return dataclasses.replace(bounded(captured, lengths, 0), notes=(*captured.notes, *notes))
    proof = Proof(workload, model, items, in_parts=trains(model) and not fixed and others is None, place=place)

    def other() -> Capture:
        return completed(dataclasses.replace(strategies, lengths=()).capture())

    try:
        with contextlib.nullcontext() if look is None else restored(workload, model):
            proven = _proven(proof, captured, lengths, others, other)
    except TraceError as error:
        reraise_failure_of_device(error)
        _refuse_changes(look, workload, model, item, captured, place)  # the cause, if something changes
        raise
    _refuse_changes(look, workload, model, item, captured, place)
    return proven


def _proven(
    proof: Proof,
    captured: Capture,
    lengths: tuple[Length, ...],
    others: Sequence[Item] | None,
    other: Callable[[], Capture],
) -> Capture:
    """Return a capture that computes what the model does. ``other``: captures it for fixed lengths."""
    if others and captured.graph.lengths:
        try:
            proof.on_batches(captured, others)
        except TraceError as why:
            reraise_failure_of_device(why)
            logger.info("the sizes in which batches differ stay fixed: %s", why.what)
            captured = other()
    elif captured.graph.lengths:
        proven = proof.at_lengths(captured, lengths)
        if proven is not None:
            return proven
        captured = other()
    return proof.of(captured)


class _VariesError(Exception):
    """The model's Python does not do the same in every step."""

    def __init__(self, survey: Survey) -> None:
        super().__init__()
        self.survey = survey


def _unread(workload: Workload, model: nn.Module, item: Item, captured: Capture, place: Place) -> tuple[str, ...]:
    """Return the parts of a batch that are not read."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return ()
    with place.having(workload, model, captured) as placed:
        return unread_paths(placed, model, place.item(workload, item), captured.module)


def _refuse_changes(
    look: Callable[[], Survey] | None,
    workload: Workload,
    model: nn.Module,
    item: Item,
    captured: Capture,
    place: Place,
) -> None:
    """Refuse to take a graph for that of every step if the model's Python does something else in another one.

    ``look``: returns what that is; None to ask for nothing. Raises: _VariesError if the model may be trained with it;
    TraceError if only runs with numbers can tell, and they differ.
    """
    if look is None:
        return
    if not why_unknown(captured.graph):
        survey = look()
        if survey.first is not None:
            raise _VariesError(survey)
        if not survey.is_unknown:
            return
    with place.having(workload, model, captured) as placed:
        refuse_other_calls(placed, model, place.item(workload, item))


def _why_not_verified(model: nn.Module, place: Place, verify: bool) -> tuple[str, ...]:
    if any(parameter.is_meta for parameter in model.parameters()):
        return ("not verified: the model is on the meta device",)
    lack = lack_of_memory_to_verify(model) if verify and place.is_cpu else ""
    return (f"the captured model is not compared with the original: {lack}",) if lack else ()


def _varying(survey: Survey, record: Callable[[tuple[Input, ...]], Capture], place: Place) -> Capture:
    """Capture a model that changes from step to step as it is for the first one. Raises: TraceError with why not."""
    numbers, why, _, first = survey
    assert first is not None, "it varies"
    try:
        if numbers is not None:
            if place.is_cpu:
                return record(numbers)
            why = "the model trains on a GPU"
    except TraceError as refusal:
        why = refusal.what
    remedy = first.remedy + (f"; running its Python for each microbatch is not possible: {why}" if why else "")
    raise TraceError(f"{first.text}: the model is not one fixed graph", where=first.where, remedy=remedy)


def _with_numbers(workload: Workload, numbers: tuple[Input, ...], record: _Record, model: nn.Module) -> Capture:
    """Capture with the numbers that change as inputs. Raises: TraceError if they cannot be."""
    captured = record(WithNumbers(workload, numbers, Start(model, functions_of(workload)).restore))
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
