"""The ways to capture a model, tried one after the other.

1. Calls of the model, recorded at two shapes of the batch; where those do not fit one graph, with a symbolic size.
2. With ``--allow-data-dependent``: the same, every decision that depends on the data kept and checked at each step.
3. ``torch.export``, where a call went past the recorder (a scripted function, for one). Refused where the model has a
   ``torch.autograd.Function`` of its own: export differentiates its forward instead, and nobody would see it.

Whichever it was, ``api.capture`` compares the graph with the model before it is accepted.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopipe.draws import flat_checkpoints
from autopipe.errors import TraceError
from autopipe.ir.batch import STRIDES
from autopipe.trace.evaluation import Arguments, evaluation_arguments
from autopipe.trace.explain import MORE_CALLS, OTHER_CALLS, depends_on_data, place_of, went_unseen
from autopipe.trace.exported import NotExportable, export
from autopipe.trace.graph.assemble import assemble
from autopipe.trace.graph.describe import describe
from autopipe.trace.graph.naming import rename
from autopipe.trace.opaque.choose import Opaque
from autopipe.trace.record.borrowed import Snapshot
from autopipe.trace.record.follow import Followed, Forward, follow
from autopipe.trace.result import Capture
from autopipe.trace.sizes.align import Beside, OtherWay, aligned
from autopipe.trace.sizes.fit import Fit
from autopipe.trace.sizes.lengths import Length, other_lengths, other_sizes, sizes_of
from autopipe.workload import Item, Workload
from autopipe.workload.batches.forms import form_of
from autopipe.workload.batches.items import shapes
from autopipe.workload.model.modes import trains

logger = logging.getLogger(__name__)

QUICK = "calls of the model, at two batch sizes"
LENGTHS = "calls of the model, at two batch sizes and lengths"
SYMBOLIC = "calls of the model, batch size symbolic"
FIXED = "calls of the model, for batches of one structure"
KEPT = f"{SYMBOLIC}, data-dependent decisions kept"
EXPORT = "torch.export"
_WIDE = 131  # samples of the second pass: many, so that what a model does from some number on shows


@dataclass(frozen=True)
class Ladder:
    """What is captured. ``batch``: the number of samples that is followed. ``forward``: what is run in the end.

    ``opaque``: the modules that run as they are; more are added where the model cannot be followed without.
    """

    workload: Workload
    model: nn.Module
    item: Item
    batch: int
    forward: Forward | None = None
    opaque: Opaque | None = None

    def climb(self, lengths: tuple[Length, ...], *, allow_data_dependent: bool) -> Capture:
        """Return the capture by the first way that works, with as few modules that run as they are as it takes.

        Raises: TraceError of the first way, saying what else was tried.
        """
        while True:
            try:
                return self._climb(lengths, allow_data_dependent=allow_data_dependent)
            except TraceError as error:
                if self.opaque is None or not self.opaque.take(error):
                    raise

    def _climb(self, lengths: tuple[Length, ...], *, allow_data_dependent: bool) -> Capture:
        """Return the capture by the first way that works. ``lengths``: sizes that should stay free.

        Raises: TraceError of the first way, saying what else was tried.
        """
        try:
            narrow = self._follow(batch=self.batch)
        except TraceError as error:
            if depends_on_data(error.__cause__):
                if not allow_data_dependent:
                    raise
                return self._symbolic(KEPT, answer=True)
            if self.forward is not None or not went_unseen(error) or (self.opaque and self.opaque.forms):
                raise
            return self._exported(error)
        if self.workload.is_fixed(self.item):
            raw = _arguments(narrow)
            same, note = self._in_evaluation(narrow, batch=self.batch)
            return self._finished(narrow, FIXED, same, raw, note)
        fit = self._fit(narrow, lengths)
        if fit is None:
            return self._symbolic(SYMBOLIC, answer=False)
        raw = _arguments(narrow)
        same, note = self._in_evaluation(narrow, batch=self.batch)
        fit.apply()
        capture = self._finished(fit.narrow, LENGTHS if fit.narrow.lengths else QUICK, same, raw, note)
        symbols = capture.graph.symbols
        highs = [max(pair) for pair in zip(fit.narrow.sizes, fit.wide.sizes, strict=False)]
        symbols = (symbols[0], *(dataclasses.replace(s, high=h) for s, h in zip(symbols[1:], highs[1:], strict=False)))
        return dataclasses.replace(capture, graph=dataclasses.replace(capture.graph, symbols=symbols))

    def _follow(self, **options: Any) -> Followed:
        return follow(self.workload, self.model, self.item, forward=self.forward, opaque=self.opaque, **options)

    def _fit(self, narrow: Followed, lengths: tuple[Length, ...]) -> Fit | None:
        """Return the fit of a second recording, with other lengths if possible; None where none fits."""
        taken = sizes_of(self.model) | other_sizes(self.workload, self.item)
        many = next(n for n in range(_WIDE, 2 * _WIDE) if n not in taken and _is_prime_step(n - self.batch))
        whys: list[Exception] = []
        others = [other_lengths(length.size, taken) for length in lengths]
        for attempt in range(max(map(len, others), default=0)):
            given = tuple((a, sizes[min(attempt, len(sizes) - 1)]) for a, sizes in zip(lengths, others, strict=True))
            try:
                wide = self._follow(batch=many, lengths=given, most=len(narrow.calls))
                free = dataclasses.replace(
                    narrow, sizes=(self.batch, *(length.size for length in lengths)), lengths=lengths
                )
                return Fit(free, wide)
            except OtherWay as why:
                whys.append(why)
                break  # it was followed, and is another graph: a shorter one will be, too
            except TraceError as why:
                whys.append(why)
                if why.what == MORE_CALLS:
                    break  # a loop over the sequence
        try:
            return Fit(narrow, self._follow(batch=many))
        except (OtherWay, TraceError) as why:
            logger.info("two batch sizes do not fit one graph (%s); following a symbolic one", why)
            return None
        finally:
            if whys:
                logger.info("sequence lengths stay fixed: %s", whys[-1])

    def _symbolic(self, method: str, *, answer: bool) -> Capture:
        followed = self._follow(answer=answer)
        same, note = self._in_evaluation(followed, answer=answer)
        return self._finished(followed, method, same, _arguments(followed), note)

    def _exported(self, error: TraceError) -> Capture:
        """Capture what ``torch.export`` makes of the model, as if it were the model."""
        self._refuse_what_fails_itself(error)
        try:
            forward = export(self.workload, self.model, self.item)
            below = dataclasses.replace(self, forward=forward, opaque=None)
            capture = below.climb((), allow_data_dependent=False)
        except (NotExportable, TraceError) as why:
            reason = why.what if isinstance(why, TraceError) else str(why)
            remedy = "; ".join(part for part in (error.remedy, f"tried too: torch.export ({reason})") if part)
            failure = TraceError(error.what, where=error.where, remedy=remedy)
            failure.within = error.within
            raise failure from error.__cause__
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

    def _refuse_what_fails_itself(self, error: TraceError) -> None:
        """Run the model itself on the batch. Raises: TraceError where it fails as well: then no capture is to blame."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            return
        before = Snapshot(self.model)
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        try:
            with torch.no_grad(), flat_checkpoints():
                self.workload.loss(self.model, self.item)
        except Exception as failure:
            text = (str(failure).strip().splitlines() or [""])[0]
            raise TraceError(
                f"the model itself fails on a batch of {self.batch} ({shapes(self.item)}): "
                f"{type(failure).__name__}: {text}",
                where=place_of(failure) or error.where,
                remedy="compare the batch with what the model takes; run the model on one batch by itself",
            ) from failure
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            before.restore()

    def _in_evaluation(self, training: Followed, **options: Any) -> tuple[dict[fx.Node, fx.Node], str]:
        """Follow the model in evaluation mode where its own code asks for the mode; torch.nn's modules know it."""
        if not training.reads_training or not trains(self.model):
            return {}, ""
        before = Snapshot(self.model)
        self.model.eval()
        try:
            return aligned(training, self._follow(beside=Beside(training), **options)), ""
        except OtherWay as way:
            return {}, f"eval mode traces differently{way}"
        except TraceError as error:
            if error.what == OTHER_CALLS:
                return {}, f"eval mode traces differently{f' at {error.where}' if error.where else ''}"
            return {}, f"in evaluation mode the model cannot be followed: {error.what}"
        finally:
            before.restore()

    def _finished(
        self,
        followed: Followed,
        method: str,
        in_evaluation: dict[fx.Node, fx.Node],
        raw: dict[fx.Node, Arguments],
        note: str,
    ) -> Capture:
        differing, other = evaluation_arguments(in_evaluation, raw)
        rename(followed.graph)
        # torch.export keeps what it read of the memory to itself
        reads = followed.recorder.layout_read if self.forward is None else STRIDES
        form = dataclasses.replace(form_of(self.item), reads=reads)
        graph = dataclasses.replace(describe(followed, self.workload.name), captured_by=method, batch=form)
        constants = dict(sorted(followed.recorder.constants.items()))
        module = assemble(self.model, followed.graph, constants)
        evaluation = {node.name: arguments for node, arguments in differing.items()}
        notes = tuple(dict.fromkeys(followed.recorder.notes))
        return Capture(graph, module, constants, method, evaluation, note or other, notes)


def _arguments(followed: Followed) -> dict[fx.Node, Arguments]:
    return {node: (node.args, dict(node.kwargs)) for node in followed.graph.nodes}


def _is_prime_step(step: int) -> bool:
    """Tell whether two batch sizes so far apart show what is no line: a prime number, as in ``lengths``."""
    return all(step % divisor for divisor in (2, 3, 5, 7, 11, 13))
