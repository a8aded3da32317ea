"""The strategies that capture a model, tried in the order of ``STRATEGIES``.

1. Record the calls of the model at two shapes of the batch. If the two recordings do not fit one graph, record with a
   symbolic batch size.
2. With ``--allow-data-dependent``: record with a symbolic batch size, and keep each data-dependent decision, which is
   then checked at every step.
3. ``torch.export``, if the recorder missed a call (a scripted function, for example). Refused for a model with a custom
   ``torch.autograd.Function``: export would differentiate its forward instead, without a warning.

``api.capture`` compares every graph with the model before it accepts it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopipe.draws import flat_checkpoints
from autopipe.errors import TraceError
from autopipe.ir.batch import STRIDES
from autopipe.trace.explain import MORE_CALLS, OTHER_CALLS, depends_on_data, place_of, went_unseen
from autopipe.trace.exported import NotExportable, export
from autopipe.trace.graph.describe import describe
from autopipe.trace.graph.naming import rename
from autopipe.trace.graph.replay import assemble
from autopipe.trace.opaque.choose import Opaque
from autopipe.trace.record.follow import Followed, Forward, follow
from autopipe.trace.record.model_snapshot import left_as_it_was
from autopipe.trace.result import Arguments, Capture, evaluation_arguments
from autopipe.trace.sizes.align import GraphsDiffer, LiveComparison, aligned
from autopipe.trace.sizes.lengths import Length, other_lengths, other_sizes, sizes_of, spread
from autopipe.trace.sizes.symbolic_sizes import SymbolicSizes
from autopipe.workload import Item, Workload
from autopipe.workload.batches.forms import form_of
from autopipe.workload.batches.items import shapes
from autopipe.workload.model.factory import trains

logger = logging.getLogger(__name__)

QUICK = "calls of the model, at two batch sizes"
LENGTHS = "calls of the model, at two batch sizes and lengths"
SYMBOLIC = "calls of the model, batch size symbolic"
FIXED = "calls of the model, for batches of one structure"
FIXED_LENGTHS = f"{FIXED}, at two sizes"
KEPT = f"{SYMBOLIC}, data-dependent decisions kept"
EXPORT = "torch.export"
_WIDE = 131  # samples of the second recording: enough to trigger code that depends on a minimum batch size


@dataclass(frozen=True)
class CaptureStrategies:
    """One model and batch to capture, by the first strategy of ``STRATEGIES`` that applies."""

    workload: Workload
    model: nn.Module
    item: Item
    batch: int  # samples in the first recording
    lengths: tuple[Length, ...] = ()  # sizes other than the batch size that may vary
    observed: bool = False  # whether batches of the data differ in ``lengths``; False: they are guesses
    allow_data_dependent: bool = False
    forward: Forward | None = None  # recorded in place of the model's own forward
    opaque: Opaque | None = None  # modules that run as they are; extended if the model cannot be recorded otherwise

    def capture(self) -> Capture:
        """Capture the model, with as few opaque modules as possible.

        Raises: TraceError of the first recording, with the strategies that were also tried.
        """
        while True:
            try:
                return self._attempt()
            except TraceError as error:
                if self.opaque is None or not self.opaque.take(error):
                    raise

    def _attempt(self) -> Capture:
        try:
            recording = self.record(batch=self.batch)
        except TraceError as error:
            captured = self._first_applicable(error)
            if captured is None:
                raise
            return captured
        captured = self._first_applicable(recording)
        assert captured is not None, "symbolic_batch applies to every recording"
        return captured

    def _first_applicable(self, recording: Followed | TraceError) -> Capture | None:
        captures = (strategy(self, recording) for strategy in STRATEGIES)
        return next((capture for capture in captures if capture is not None), None)

    def record(self, **options: Any) -> Followed:
        """Record the calls of the model. ``options``: those of ``follow``."""
        return follow(self.workload, self.model, self.item, forward=self.forward, opaque=self.opaque, **options)

    def record_symbolic(self, method: str, *, answer: bool) -> Capture:
        """Capture with a symbolic batch size. ``answer``: keep data-dependent decisions."""
        followed = self.record(answer=answer)
        same, note = self.in_evaluation(followed, answer=answer)
        return self.finish(followed, method, same, recorded_arguments(followed), note)

    def in_evaluation(self, training: Followed, **options: Any) -> tuple[dict[fx.Node, fx.Node], str]:
        """Record the model in evaluation mode, if its own code reads ``training`` (modules of torch.nn need no check).

        Returns: node of the evaluation recording -> node of ``training``; a note if the two differ.
        """
        varies = getattr(self.workload, "varies", False)  # it is not evaluated
        if varies or not training.reads_training or not trains(self.model):
            return {}, ""
        with left_as_it_was(self.model):
            self.model.eval()
            try:
                return aligned(training, self.record(comparison=LiveComparison(training), **options)), ""
            except GraphsDiffer as difference:
                return {}, f"eval mode traces differently: {difference}"
            except TraceError as error:
                if error.what == OTHER_CALLS:
                    place = f" at {error.where}" if error.where else ""
                    return {}, f"eval mode traces differently: another call{place}"
                return {}, f"the model cannot be recorded in evaluation mode: {error.what}"

    def finish(
        self,
        followed: Followed,
        method: str,
        in_evaluation: dict[fx.Node, fx.Node],
        raw: dict[fx.Node, Arguments],
        note: str,
    ) -> Capture:
        """Build the capture from a recording.

        ``method``: the name of the strategy. ``in_evaluation`` and ``note``: the result of ``in_evaluation``. ``raw``:
        the arguments before sizes were written into the graph.
        """
        differing, other = evaluation_arguments(in_evaluation, raw)
        rename(followed.graph)
        # torch.export does not report which memory layouts it read
        reads = followed.recorder.layout_read if self.forward is None else STRIDES
        form = dataclasses.replace(form_of(self.item), reads=reads)
        graph = dataclasses.replace(describe(followed, self.workload.name), captured_by=method, batch=form)
        constants = dict(sorted(followed.recorder.constants.items()))
        module = assemble(self.model, followed.graph, constants)
        evaluation = {node.name: arguments for node, arguments in differing.items()}
        notes = tuple(dict.fromkeys(followed.recorder.notes))
        asks = followed.recorder.asks_compiling or self.forward is not None  # export compiles
        return Capture(graph, module, constants, method, evaluation, note or other, notes, asks)


Strategy = Callable[[CaptureStrategies, Followed | TraceError], Capture | None]
"""A strategy receives the first recording, or the error that ended it. It returns None if it does not apply."""


def one_structure(strategies: CaptureStrategies, recording: Followed | TraceError) -> Capture | None:
    """Capture a workload whose batches all have the same structure: one recording suffices."""
    if isinstance(recording, TraceError) or not strategies.workload.is_fixed(strategies.item):
        return None
    fit = _fit_observed(strategies)
    if fit is not None:
        return _from_fit(strategies, fit, fit.narrow, FIXED_LENGTHS)
    raw = recorded_arguments(recording)
    same, note = strategies.in_evaluation(recording, batch=strategies.batch)
    return strategies.finish(recording, FIXED, same, raw, note)


def two_shapes(strategies: CaptureStrategies, recording: Followed | TraceError) -> Capture | None:
    """Capture from a second recording at another batch size, and at other lengths if possible."""
    if isinstance(recording, TraceError):
        return None
    fit = _fit_observed(strategies)
    if fit is not None:
        return _from_fit(strategies, fit, fit.narrow, LENGTHS)
    fit = _fit(strategies, recording)
    if fit is None:
        return None
    return _from_fit(strategies, fit, recording, LENGTHS if fit.narrow.lengths else QUICK)


def _from_fit(strategies: CaptureStrategies, fit: SymbolicSizes, narrow: Followed, method: str) -> Capture:
    """Return the capture of two recordings. ``narrow``: the first of them, as it was recorded."""
    raw = recorded_arguments(narrow)
    lengths = tuple(zip(narrow.lengths, narrow.sizes[1:], strict=True)) if narrow.lengths else ()
    same, note = strategies.in_evaluation(narrow, batch=strategies.batch, lengths=lengths)
    fit.apply()
    capture = strategies.finish(fit.narrow, method, same, raw, note)
    pairs = zip(fit.narrow.sizes[1:], fit.wide.sizes[1:], strict=False)
    bounded = [
        dataclasses.replace(symbol, low=min(*pair, length.smallest or symbol.low), high=max(pair))
        for symbol, pair, length in zip(capture.graph.lengths, pairs, fit.narrow.lengths, strict=False)
    ]
    samples = () if capture.graph.samples is None else (capture.graph.samples,)
    graph = dataclasses.replace(capture.graph, symbols=(*samples, *bounded))
    return dataclasses.replace(capture, graph=graph)


def symbolic_batch(strategies: CaptureStrategies, recording: Followed | TraceError) -> Capture | None:
    """Capture with a symbolic batch size."""
    if isinstance(recording, TraceError):
        return None
    return strategies.record_symbolic(SYMBOLIC, answer=False)


def kept_decisions(strategies: CaptureStrategies, recording: Followed | TraceError) -> Capture | None:
    """Capture a model with data-dependent decisions, with ``--allow-data-dependent``."""
    if not isinstance(recording, TraceError) or not depends_on_data(recording.__cause__):
        return None
    return strategies.record_symbolic(KEPT, answer=True) if strategies.allow_data_dependent else None


def exported(strategies: CaptureStrategies, recording: Followed | TraceError) -> Capture | None:
    """Record the graph of ``torch.export`` in place of the model, if the recorder missed a call."""
    if not isinstance(recording, TraceError) or depends_on_data(recording.__cause__):
        return None
    has_opaque = strategies.opaque is not None and bool(strategies.opaque.forms)
    if strategies.forward is not None or has_opaque or not went_unseen(recording):
        return None
    error = recording
    _check_model_runs(strategies, error)
    try:
        forward = export(strategies.workload, strategies.model, strategies.item)
        capture = dataclasses.replace(
            strategies, forward=forward, opaque=None, lengths=(), allow_data_dependent=False
        ).capture()
    except (NotExportable, TraceError) as failure:
        reason = failure.what if isinstance(failure, TraceError) else str(failure)
        remedy = "; ".join(part for part in (error.remedy, f"tried too: torch.export ({reason})") if part)
        combined = TraceError(error.what, where=error.where, remedy=remedy)
        combined.within = error.within
        raise combined from error.__cause__
    note = f"captured by torch.export, because recording its calls failed: {error.what} ({error.where})"
    graph = dataclasses.replace(capture.graph, captured_by=f"{EXPORT} ({capture.method})")
    return dataclasses.replace(
        capture,
        graph=graph,
        method=graph.captured_by,
        notes=(note, *capture.notes),
        evaluation={},
        evaluation_note="torch.export keeps the training mode that it was made in",
    )


STRATEGIES: list[Strategy] = [one_structure, two_shapes, symbolic_batch, kept_decisions, exported]
"""In the order in which they are tried; the first that returns a capture ends the search."""


def recorded_arguments(followed: Followed) -> dict[fx.Node, Arguments]:
    """Return the arguments of every recorded call, as they are now."""
    return {node: (node.args, dict(node.kwargs)) for node in followed.graph.nodes}


def _fit_observed(strategies: CaptureStrategies) -> SymbolicSizes | None:
    """Return the fit of two recordings at other sizes than those of the data, or None if no two recordings fit."""
    if not strategies.observed or not strategies.lengths:
        return None
    fixed, batch = strategies.workload.is_fixed(strategies.item), strategies.batch
    for small, large in spread(strategies.lengths):
        try:
            narrow = strategies.record(batch=batch, lengths=tuple(zip(strategies.lengths, small, strict=True)))
            given = tuple(zip(strategies.lengths, large, strict=True))
            many = batch if fixed else _many(strategies)
            return SymbolicSizes(narrow, strategies.record(batch=many, lengths=given, most=len(narrow.calls)))
        except (GraphsDiffer, TraceError) as failure:
            logger.info("the sizes in which batches differ stay fixed: %s", failure)
    return None


def _fit(strategies: CaptureStrategies, narrow: Followed) -> SymbolicSizes | None:
    """Return the fit of a second recording, with other lengths if possible, or None if no second recording fits."""
    lengths = () if strategies.observed else strategies.lengths
    taken = sizes_of(strategies.model) | other_sizes(strategies.workload, strategies.item)
    many = _many(strategies)
    failures: list[Exception] = []
    others = [other_lengths(length.size, taken) for length in lengths]
    for attempt in range(max(map(len, others), default=0)):
        given = tuple((a, sizes[min(attempt, len(sizes) - 1)]) for a, sizes in zip(lengths, others, strict=True))
        try:
            wide = strategies.record(batch=many, lengths=given, most=len(narrow.calls))
            free = dataclasses.replace(
                narrow, sizes=(strategies.batch, *(length.size for length in lengths)), lengths=lengths
            )
            return SymbolicSizes(free, wide)
        except GraphsDiffer as difference:
            failures.append(difference)
            break  # the recording succeeded and differs; a shorter length would differ as well
        except TraceError as error:
            failures.append(error)
            if error.what == MORE_CALLS:
                break  # a loop over the sequence
    try:
        return SymbolicSizes(narrow, strategies.record(batch=many))
    except (GraphsDiffer, TraceError) as failure:
        logger.info("two batch sizes do not fit one graph (%s); recording with a symbolic batch size", failure)
        return None
    finally:
        if failures:
            logger.info("sequence lengths stay fixed: %s", failures[-1])


def _many(strategies: CaptureStrategies) -> int:
    """Return the number of samples of the second recording."""
    taken = sizes_of(strategies.model) | other_sizes(strategies.workload, strategies.item)
    return next(n for n in range(_WIDE, 2 * _WIDE) if n not in taken and _has_no_small_factor(n - strategies.batch))


def _check_model_runs(strategies: CaptureStrategies, error: TraceError) -> None:
    """Run the model itself on the batch. Raises: TraceError if it fails: then the capture is not the cause."""
    model, item = strategies.model, strategies.item
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    try:
        with left_as_it_was(model), torch.no_grad(), flat_checkpoints():
            strategies.workload.loss(model, item)
    except Exception as failure:
        text = (str(failure).strip().splitlines() or [""])[0]
        raise TraceError(
            f"the model itself fails on a batch of {strategies.batch} ({shapes(item)}): "
            f"{type(failure).__name__}: {text}",
            where=place_of(failure) or error.where,
            remedy="compare the batch with the expected inputs; run the model on one batch without autopipe",
        ) from failure


def _has_no_small_factor(step: int) -> bool:
    """Return whether a difference of batch sizes has no small prime factor.

    With such a difference, a rounded or non-linear size cannot look linear (see ``lengths``).
    """
    return all(step % divisor for divisor in (2, 3, 5, 7, 11, 13))
