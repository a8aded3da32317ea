"""``WholeModel``: time all nodes in one pass, and scale the costs of the nodes towards it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from autopipe.ir.profile import NodeCost
from autopipe.measure.clock import Windows, repeat
from autopipe.measure.device import available_bytes
from autopipe.measure.piece import Piece, StateCopies
from autopipe.measure.segment_costs import BUDGET_SECONDS
from autopipe.measure.subject import Subject
from autopipe.measure.walk import timed_pass

LONG_SECONDS = 0.5  # a pass that takes longer is repeated only twice
_log = logging.getLogger(__name__)


class WholeModel:
    """The times of all nodes in one pass."""

    def __init__(self, subject: Subject) -> None:
        self.windows: Windows | None = subject.clock.windows()  # None if the model does not fit the device
        self._subject = subject

    def window(self, costs: Mapping[str, NodeCost], casts: Mapping[int, torch.dtype]) -> None:
        """Time the model once more, unless it does not fit.

        ``costs``: of its nodes, as far as they are known. ``casts``: as in ``StateCopies``.
        """
        if self.windows is None:
            return
        subject, segment = self._subject, self._subject.whole()
        if not self.fits(costs):
            self._give_up()
            return
        seconds = sum(cost.forward_seconds + cost.backward_seconds for cost in costs.values())
        try:
            state = StateCopies(subject.root, subject.clock.device, casts)
            piece = Piece(segment.nodes, segment.inputs, segment.outputs, state)
            once = functools.partial(timed_pass, subject.clock, piece, subject.start(), private=segment.mutates)
            times = repeat(once, 3 * BUDGET_SECONDS, fewest=4 if seconds < LONG_SECONDS else 2)
        except torch.OutOfMemoryError:
            self._give_up()
            return
        self.windows = self.windows.with_another(times)

    def fits(self, costs: Mapping[str, NodeCost], scale: float = 1.0) -> bool:
        """Return whether a lower bound of the peak memory is free: copies of parameters, gradients, and saved values.

        ``scale``: multiplies the bytes of the saved values.
        """
        parameters = sum(2 * spec.num_bytes({}) for spec in self._subject.graph.parameters.values())
        saved = sum(cost.saved_bytes for cost in costs.values())
        return parameters + scale * saved <= available_bytes(self._subject.clock.device)

    def _give_up(self) -> None:
        self.windows = None
        _log.info(
            "microbatch of %d: the complete model does not fit the device; its segments are measured alone",
            self._subject.size,
        )

    @property
    def spread(self) -> float | None:
        """The relative spread of the times; None if the model does not fit or the repetitions are too few."""
        return None if self.windows is None else self.windows.spread

    def scaled(self, costs: dict[str, NodeCost], num_distinct: int, num_segments: int) -> dict[str, NodeCost]:
        """Return the costs of the nodes, scaled half way to the time of the complete pass."""
        if self.windows is None:
            return costs
        whole = self.windows.counting.medians
        sums = sum(c.forward_seconds for c in costs.values()), sum(c.backward_seconds for c in costs.values())
        ratios = [part / total if total else 1.0 for total, part in zip(whole, sums, strict=True)]
        # a segment alone finds its data in the cache, a complete pass meets a full allocator; a stage lies between
        factors = [ratio**-0.5 if ratio else 1.0 for ratio in ratios]
        _log.info(
            "microbatch of %d: forward %.3f ms, backward %.3f ms; %d segments (%d timed) add up to %.2f and %.2f",
            self._subject.size, *(1e3 * seconds for seconds in whole), num_segments, num_distinct, *ratios,
        )  # fmt: skip
        return {
            name: replace(
                cost,
                forward_seconds=cost.forward_seconds * factors[0],
                backward_seconds=cost.backward_seconds * factors[1],
            )
            for name, cost in costs.items()
        }
