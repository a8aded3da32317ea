"""``Parts``: a training call of the model as several forwards, whose outputs are joined on the last rank.

The script's loss runs once, on the joined outputs. Its backward reaches all parts, latest first, as in one process that
computes ``torch.cat([model(part) for part in parts])``. So all forwards come before all backwards, as in GPipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from autopipe.script.batch_samples import ACCUMULATE, Cut, UncutError, batch_norms, check_samples, cut
from autopipe.script.calls.surroundings import collected
from autopipe.script.calls.whole_batches import StaysWholeError, WholeBatches, form_of
from autopipe.script.codec import Value
from autopipe.script.lazy import Lazy
from autopipe.script.refusals import refused
from autopipe.script.run_summary import WORTH
from autopipe.script.state.remote import plain
from autopipe.trace.record.model_snapshot import ModelSnapshot

if TYPE_CHECKING:
    from autopipe.ir.plan import Plan
    from autopipe.script.calls.programs import Sent
    from autopipe.script.controller import Controller


class Parts:
    """Cuts the training calls of one controller into ``count`` parts.

    ``planned``: called with the number of replicas that compute them, before the first part is. ``whole``: which calls
    stay whole; None: none does, and what cannot be cut is refused.
    """

    def __init__(
        self,
        controller: Controller,
        count: int,
        planned: Callable[[int], None] | None = None,
        whole: WholeBatches | None = None,
    ) -> None:
        self.controller, self.count, self.planned, self.whole = controller, count, planned, whole
        self.sizes: tuple[int, ...] = ()  # samples of each part of the first call
        self._shown: set[Hashable] = set()  # forms of the call in which the model computes each sample on its own
        self._programs: dict[Hashable, int] = {}  # by form and samples, those that were tried
        self._rows: dict[Hashable, tuple[Any, ...]] = {}  # by form, what each output has for one sample

    def call(self, args: Any, kwargs: Any) -> Any:
        """Return the outputs for the whole batch as lazy tensors; NotImplemented for a batch that stays whole."""
        if self.whole is not None and self._stays_whole(args, kwargs, self.whole):
            return NotImplemented
        try:
            return self._in_parts(args, kwargs)
        except StaysWholeError:
            self._keep_whole("" if self.whole is None else self.whole.always)
            return NotImplemented

    def _in_parts(self, args: Any, kwargs: Any) -> Any:
        try:
            parts = cut(args, kwargs, self.count)
        except UncutError as error:
            raise refused(f"the batch cannot be divided: {error}", ACCUMULATE) from None
        if len(parts.sizes) == 1:
            if not self.sizes:
                raise refused("the batch cannot be divided: it has one sample", "--num-microbatches 1")
            return NotImplemented
        form = form_of(self.controller.model, args, kwargs, parts.tensors)
        if self.whole is None and form not in self._shown:
            self._show(args, kwargs, parts, form)
        self.sizes = self.sizes or parts.sizes
        sent = []
        for number, (own, keywords) in enumerate(parts.parts):
            self.controller.regions.end()  # each part casts the weights for itself
            sent.append(self.controller.forward(own, keywords, grad=True, part=(number, len(parts.parts))))
        self.controller.regions.end()
        complete = [entry for entry in sent if entry is not None]  # a training call is refused, or sent
        for entry in complete:  # after all forwards: the last rank waits for them
            self.controller.bring_outputs(entry)
        if self.whole is not None:
            self._check_programs(complete, parts, form)
        self._check_attributes(complete)
        self._check_rows(complete, parts, form)
        return self._joined(complete)

    def seen_backward(self) -> None:
        """Note a backward through the model."""
        if self.whole is not None:
            self.whole.seen_backward()

    def _stays_whole(self, args: Any, kwargs: Any, whole: WholeBatches) -> bool:
        controller = self.controller
        reason = whole.reason(controller.model, args, kwargs, self.count, controller.device, self._trial)
        if reason:
            self._keep_whole(reason)
        return bool(reason)

    def _keep_whole(self, reason: str) -> None:
        controller = self.controller
        controller.notes.stays_whole(reason)
        if self.whole is not None and self.whole.always:
            controller.parts, controller.is_timed = None, False  # the times are of parts
            if controller.ranks is None:  # replicas may still be asked for
                controller.replicas = controller.replicas or 1

    def accept(self, plan: Plan) -> None:
        """Accept the plan for the first batch, if parts are worth it or asked for.

        Raises: StaysWholeError.
        """
        faster = self.count * sum(stage.seconds for stage in plan.stages) / plan.predicted.step_seconds
        is_worth = self.whole is None or faster >= WORTH
        if self.planned is not None:
            self.planned(len(plan.stages[0].ranks) if is_worth else 0)
        if self.whole is not None and not is_worth:
            self.whole.always = f"parts are predicted to have {faster:.2f} times the speed of one process"
            raise StaysWholeError

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        """Let the model run in this process, on its newest tensors."""
        controller = self.controller
        if controller.ranks is not None:
            controller.weights.touch(())
        with plain(controller.tensors()):
            yield

    def _show(self, args: Any, kwargs: Any, parts: Cut, form: Hashable) -> None:
        controller = self.controller
        with self._trial(), collected():
            before = ModelSnapshot(controller.model)
            if check_samples(controller.model, args, kwargs, parts, controller.device):
                self._shown.add(form)
            before.restore()

    def _check_programs(self, sent: list[Sent], parts: Cut, form: Hashable) -> None:
        """Refuse a forward that makes other calls than when it was tried: its samples may depend on each other now."""
        for entry, size in zip(sent, parts.sizes, strict=True):
            number = self._programs.setdefault((form, size), entry.program.number)
            if number != entry.program.number or entry.program.draws:
                raise refused(
                    "the forward makes other calls than in the batch that was tried on parts",
                    "--num-microbatches 1 keeps batches whole",
                )

    def _check_attributes(self, sent: list[Sent]) -> None:
        """Refuse attributes that the forward sets to tensors: those of the parts are not joined."""
        for entry in sent:
            name = entry.called.attribute_of_output()
            if name:
                raise refused(f"the forward keeps a tensor of each part in {name}", ACCUMULATE)

    def _check_rows(self, sent: list[Sent], parts: Cut, form: Hashable) -> None:
        """Refuse outputs whose shape does not follow from the number of samples."""
        for entry, size in zip(sent, parts.sizes, strict=True):
            outputs = entry.program.recording.outputs
            tensors = tuple((output.shape[0] / size, output.shape[1:], output.dtype) for output in outputs)
            rows = (tensors, repr(entry.called.plain_results()))
            if self._rows.setdefault(form, rows) != rows:
                raise refused(
                    f"the outputs of the model for {size} samples differ in more than the samples", ACCUMULATE
                )

    def _joined(self, sent: list[Sent]) -> Any:
        controller, first = self.controller, sent[0]
        calls = frozenset(entry.call for entry in sent)
        values: list[Any] = []
        for place, output in enumerate(first.program.recording.outputs):
            keys = [entry.keys[place] for entry in sent]
            own = [entry.program.recording.outputs[place] for entry in sent]
            with controller.fakes:
                pieces = [
                    torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device=part.device) for part in own
                ]
                fake = torch.cat(pieces)
            key = controller.new_key()
            arguments = ([Value(part) for part in keys],)
            controller.tail(controller.new_key(), "call_function", torch.cat, (arguments, {}), [True, [], {}], [key])
            controller.holders.drop(keys)
            if first.program.recording.shared:
                controller.shared.add(key)
            values.append(Lazy.make(controller, key, fake, needs=output.grad, calls=calls, name=output.name))
        results = [entry.called.returned(values) for entry in sent]
        controller.programs.check_kept([entry.called for entry in sent])
        return results[0]

    def lines(self) -> list[str]:
        """Return what to say at the start: the parts, the speed, and what is not bit-equal."""
        controller = self.controller
        count, are_replicas = len(self.sizes), controller.order.last_replica > 0
        sizes = " to ".join(map(str, sorted({min(self.sizes), max(self.sizes)})))
        lines = [
            f"each training batch is cut into {count} parts of {sizes}: {controller.notes.predict(controller, count)}",
            f"not bit-equal to python: gradients are sums over {'replicas and ' if are_replicas else ''}parts",
        ]
        if any(program.draws for program in controller.programs):
            lines.append("not equal to python: each part draws its random numbers (dropout)")
        if self.whole is not None:
            lines.append("--num-microbatches 1 keeps batches whole, with the numbers of python")
        norms = batch_norms(controller.model)
        if norms:
            others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
            kept = ", and keeps those of the last replica" if are_replicas else ""
            lines.append(f"not equal to python: batch norm ({norms[0]}{others}) uses the statistics of each part{kept}")
        return lines
