"""``WholeBatches``: which batches of a script stay whole with ``--num-microbatches auto``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.script.batch_samples import Cut, Trial, UncutError, batch_norms, cut
from autopipe.script.calls.surroundings import collected, restore
from autopipe.script.refusals import RefusedError, raised
from autopipe.script.settings import autocast_now
from autopipe.trace.record.model_snapshot import ModelSnapshot
from autopipe.trace.state.observing.reach import roots
from autopipe.trace.state.repeats import Start
from autopipe.trace.state.snapshots.snapshot import Snapshot

Room = Callable[[], contextlib.AbstractContextManager[None]]


class StaysWholeError(Exception):
    """The first batch stays whole: parts are not worth it."""


def form_of(model: nn.Module, args: Any, kwargs: Any, divided: Sequence[bool]) -> Hashable:
    """Return what two calls of a model that differ only in samples have in common. ``divided``: see ``Cut.tensors``."""
    flat, structure = pytree.tree_flatten((args, kwargs))
    entries: list[Hashable] = []
    for value, own in zip(flat, divided, strict=True):
        entries.append((tuple(value.shape[own:]), value.dtype) if isinstance(value, Tensor) else repr(value))
    return str(structure), tuple(entries), tuple(module.training for module in model.modules()), autocast_now()


class WholeBatches:
    """Which training calls stay whole with ``--num-microbatches auto``.

    Those in which parts would change more than the order of sums, and all of a script that accumulates gradients. The
    second process of ``--check`` has a copy, and decides alike.
    """

    def __init__(self) -> None:
        self.always = ""  # why all calls stay whole from now on
        self._is_first = True
        self._backwards = 0  # through the model, since the last step of an optimizer
        self._reasons: dict[Hashable, str] = {}  # by the form of the call

    def seen_backward(self) -> None:
        """Note a backward through the model."""
        self._backwards += 1

    def seen_step(self) -> None:
        """Note a step of an optimizer, or that it drops gradients, as before a step that ``GradScaler`` leaves out."""
        self._backwards = 0

    def reason(self, model: nn.Module, args: Any, kwargs: Any, count: int, device: torch.device, trial: Room) -> str:
        """Return why a call stays whole, or "". If it is the first one, all that follow do, too.

        ``count``: of parts. ``device``: of the model. ``trial``: inside of which the model may run in this process.
        """
        if self._backwards and not self.always:
            self.always = "the script accumulates gradients, or steps without an optimizer, from now on"
        if self.always:
            return self.always
        reason = self._of_call(model, args, kwargs, count, device, trial)
        if self._is_first:
            self._is_first, self.always = False, reason
        return reason

    def _of_call(self, model: nn.Module, args: Any, kwargs: Any, count: int, device: torch.device, trial: Room) -> str:
        try:
            parts = cut(args, kwargs, count)
        except UncutError as error:
            return str(error)
        if len(parts.sizes) == 1:
            return "a batch has one sample"
        form = form_of(model, args, kwargs, parts.tensors)
        if form not in self._reasons:
            with trial():
                reason, is_shown = _why_whole(model, args, kwargs, parts, device)
            if not is_shown:
                return reason or "all samples of this batch give the same outputs, which shows nothing"
            self._reasons[form] = reason
        return self._reasons[form]


def _why_whole(model: nn.Module, args: Any, kwargs: Any, parts: Cut, device: torch.device) -> tuple[str, bool]:
    """Return what parts of a call would change beside the order of sums, or "", and whether this batch shows it."""
    norms = batch_norms(model)
    if norms:
        return f"batch norm ({norms[0]}) would use the statistics of each part", True
    before, start = ModelSnapshot(model), Start(model, {})
    trial = Trial(model, args, kwargs, parts, device, may_draw=False)
    try:
        with collected() as printed:
            trial.fill_caches()
            filled = Snapshot.of(roots(model, {}))
            is_shown = trial.run()
            now = Snapshot.of(roots(model, {}))
            changed = next((now.names[place] for place in now.changed_since(filled)), "")
    except RefusedError as error:
        raised.remove(error)
        return error.what.removeprefix("autopipe run: "), True
    except Exception as error:  # also for lack of memory, on a device
        return f"the model cannot be tried on parts: {type(error).__name__}: {str(error).partition(chr(10))[0]}", True
    finally:
        drawn = before.random_drawn()
        before.restore()
        restore(start, model)
    effect = "prints" if printed else f"draws from {drawn}" if drawn else f"changes {changed}" if changed else ""
    if effect:
        return f"the forward {effect}, and would do so for each part", True
    return "", is_shown
