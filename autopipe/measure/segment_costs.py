"""``SegmentCosts``: time every distinct segment of a model, and divide the times among the nodes.

``NodeFacts`` are the results of one walk over the nodes, one by one. ``WholeModel`` times all nodes in one pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopipe.ir.graph import Node
from autopipe.ir.profile import NodeCost, NodeWork
from autopipe.measure.clock import Times, Windows, repeat
from autopipe.measure.device import available_bytes
from autopipe.measure.piece import Piece, StateCopies, storage_of, tensors_of
from autopipe.measure.subject import Progress, Segment, Subject
from autopipe.measure.walk import NodeTimer, SavedBytes, Values, call, explained, region, timed_pass, writable

BUDGET_SECONDS = 0.08  # for the repetitions of one segment in one window, unless the caller is in a hurry
SLOW_SECONDS = 1.0  # of a model, whose segments are repeated no more often than needed

_log = logging.getLogger(__name__)


@dataclass
class SegmentCost:
    """The cost of one segment, and of all segments that are equal to it."""

    saved_bytes: list[int]  # by node, kept from forward to backward
    grads: list[tuple[bool, ...]]  # by node, whether a gradient flows through each tensor of its value
    #: The position of a value, which of its tensors, and the position of the node that first keeps it for its backward.
    keepers: list[tuple[int, int, int]]
    windows: Windows


class SegmentCosts:
    """Times the segments of a model. Equal segments are timed once per window."""

    def __init__(
        self,
        subject: Subject,
        facts: NodeFacts,
        bounds: Sequence[tuple[int, int]],
        budget_seconds: float = BUDGET_SECONDS,
    ) -> None:
        self.bounds = bounds  # (start, stop) of each segment
        self.distinct: dict[Any, SegmentCost] = {}  # by what decides the cost of a segment
        self.nodes: dict[str, NodeCost] = {}  # by name of the node
        self.keepers: dict[str, str] = {}  # value -> the node that is the first to keep it for its backward
        self._subject = subject
        self._facts = facts
        self._budget_seconds = budget_seconds
        self._is_slow = sum(map(sum, facts.seconds.values())) > SLOW_SECONDS
        self._num_windows = 0

    def window(self, progress: Progress) -> None:
        """Time each distinct segment once more.

        Raises: ProfileError for a segment that fails or does not fit the device.
        """
        subject = self._subject
        values, counted = subject.start(), dict[int, str]()
        for index, (start, stop) in enumerate(self.bounds):
            progress(f"nodes {start} to {stop} of {len(subject.graph.nodes)}", 0.1 + 0.7 * index / len(self.bounds))
            self._measure(start, stop, values, counted)
        self._num_windows += 1

    def _measure(self, start: int, stop: int, values: Values, counted: dict[int, str]) -> None:
        """``counted``: memory that a node before this segment keeps for its backward -> that node."""
        subject, segment = self._subject, self._subject.segment(start, stop)
        key = self._key(segment, values, counted)
        with explained(segment.about[0], subject.size):
            if key not in self.distinct:
                self.distinct[key] = count_saved(subject, segment, values, counted, self._facts)
            cost = self.distinct[key]
            state = StateCopies(subject.root, subject.clock.device, self._facts.replaced)
            if len(cost.windows.times) <= self._num_windows:
                cost.windows = cost.windows.with_another(self._timed(segment, values, state))
                state = state.renewed(parameters=segment.mutates)
            self._advance(segment, values, counted, cost, state)
        self._divide(segment.about, cost)
        subject.forget(values, stop - 1)
        alive = {storage_of(tensor) for value in values.by_name.values() for tensor in tensors_of(value)}
        for memory in counted.keys() - alive:
            del counted[memory]

    def _key(self, segment: Segment, values: Values, counted: Mapping[int, str]) -> Any:
        """Return what decides the cost of a segment: its nodes, its wiring, and the inputs whose memory is counted."""
        positions = segment.positions
        wires = tuple(
            tuple(positions[source.name] for source in node.all_input_nodes if source.op != "get_attr")
            for node in segment.nodes
        )
        already = tuple(
            tuple(storage_of(tensor) in counted for tensor in tensors_of(values.by_name[name]))
            for name in segment.inputs
        )
        ends = tuple(positions[name] for name in segment.outputs)
        return tuple(self._facts.signatures[node.name] for node in segment.nodes), wires, already, ends

    def _timed(self, segment: Segment, values: Values, state: StateCopies) -> Times:
        clock = self._subject.clock
        piece = Piece(segment.nodes, segment.inputs, segment.outputs, state)
        expected = sum(sum(self._facts.seconds[node.name]) for node in segment.nodes)
        once = functools.partial(timed_pass, clock, piece, values, private=segment.mutates)
        if self._is_slow:
            return repeat(once, 0.0, fewest=2, expected_seconds=expected)
        return repeat(once, self._budget_seconds, expected_seconds=expected)

    def _advance(
        self, segment: Segment, values: Values, counted: dict[int, str], cost: SegmentCost, state: StateCopies
    ) -> None:
        """Compute the values of a segment, without gradients, for the segments after it."""
        for index, node in enumerate(segment.nodes):
            with region(node, state.device, grad=False):
                values.by_name[node.name] = call(node, values.by_name, state)
            values.grads[node.name] = cost.grads[index]
        names = {position: name for name, position in segment.positions.items()}
        for position, index, keeper in cost.keepers:
            tensor = tensors_of(values.by_name[names[position]])[index]
            counted.setdefault(storage_of(tensor), names[keeper])
        for name in names.values():
            for memory in map(storage_of, tensors_of(values.by_name[name])):
                if memory in counted:
                    self.keepers.setdefault(name, counted[memory])

    def _divide(self, about: Sequence[Node], cost: SegmentCost) -> None:
        """Divide the time of a segment among its nodes."""
        facts = self._facts
        forward_shares, backward_shares = facts.shares(about)
        forward, backward = cost.windows.counting.medians
        for node, f, b, saved in zip(about, forward_shares, backward_shares, cost.saved_bytes, strict=True):
            self.nodes[node.name] = NodeCost(
                f * forward, b * backward, facts.output_bytes[node.name], saved, facts.workspace_bytes[node.name]
            )


def count_saved(
    subject: Subject, segment: Segment, values: Values, counted: Mapping[int, str], facts: NodeFacts
) -> SegmentCost:
    """Run a segment once to count what its nodes keep for the backward, and to see where gradients flow.

    ``counted``: memory that an earlier node keeps -> that node; it is not counted again.
    """
    private = segment.mutates
    state = StateCopies(subject.root, subject.clock.device, facts.replaced)
    saved, seen = SavedBytes(), set(counted)
    computed = {name: writable(values.fresh(name, private=private), private) for name in segment.inputs}
    if private:  # the copies stand for memory that may be counted already
        for name in segment.inputs:
            pairs = zip(tensors_of(computed[name]), tensors_of(values.by_name[name]), strict=True)
            seen |= {storage_of(copied) for copied, original in pairs if storage_of(original) in counted}
    saved.run(segment.nodes, computed, state, seen)
    results = [computed[node.name] for node in segment.nodes]
    grads = [tuple(tensor.requires_grad for tensor in tensors_of(result)) for result in results]
    positions = segment.positions
    keepers = [
        (position, index, positions[saved.keepers[memory]])
        for name, position in positions.items()
        for index, memory in enumerate(map(storage_of, tensors_of(computed[name])))
        if memory in saved.keepers
    ]
    return SegmentCost([saved.bytes[node.name] for node in segment.nodes], grads, keepers, subject.clock.windows())


@dataclass
class NodeFacts:
    """The results of one walk, by name of the node."""

    signatures: dict[str, Any] = field(default_factory=dict)  # equal for nodes that cost the same
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)  # rough forward and backward
    output_bytes: dict[str, int] = field(default_factory=dict)
    workspace_bytes: dict[str, int] = field(default_factory=dict)
    work: dict[str, NodeWork] = field(default_factory=dict)  # of the nodes that compute or move anything
    replaced: dict[int, torch.dtype] = field(default_factory=dict)  # id of each parameter that a cast replaces -> dtype
    casts: dict[str, int] = field(default_factory=dict)  # name of each such parameter -> bytes of its cast

    def shares(self, nodes: Sequence[Node]) -> tuple[list[float], list[float]]:
        """Return the share of each node in the forward and in the backward of all of them."""
        forward = _normalised([self.seconds[node.name][0] for node in nodes])
        return forward, _normalised([self.seconds[node.name][1] for node in nodes])


def walk_nodes(subject: Subject, progress: Progress) -> NodeFacts:
    """Run every node once on its own, with rough times.

    Raises: ProfileError for a node that fails.
    """
    names = {id(p): name for name, p in subject.root.named_parameters() if name in subject.graph.cast_once}
    facts, values, timer = NodeFacts(), subject.start(), NodeTimer(subject.clock, frozenset(names))
    timer.calibrate()
    count = len(subject.graph.nodes)
    for index, node in enumerate(subject.graph.nodes):
        progress(f"node {node.name}", 0.1 * index / count)
        with explained(node, subject.size):
            signature, forward, backward = timer.step(subject.nodes[node.name], node, values, subject.root)
        facts.signatures[node.name], facts.seconds[node.name] = signature, (forward, backward)
        facts.workspace_bytes[node.name] = timer.workspace[signature]
        if timer.work[signature] != NodeWork():
            facts.work[node.name] = timer.work[signature]
        tensors = tensors_of(values.by_name[node.name])
        facts.output_bytes[node.name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        subject.forget(values, index)
    facts.replaced = timer.replaced
    parameters = subject.graph.parameters
    facts.casts = {
        names[key]: parameters[names[key]].num_bytes({}) // 4 * dtype.itemsize for key, dtype in timer.replaced.items()
    }
    return facts


def _normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights] if total else [1 / len(weights)] * len(weights)


class WholeModel:
    """The times of all nodes in one pass."""

    def __init__(self, subject: Subject, budget_seconds: float = BUDGET_SECONDS) -> None:
        self.windows: Windows | None = subject.clock.windows()  # None if the model does not fit the device
        self._subject = subject
        self._budget_seconds = 3 * budget_seconds

    def window(self, costs: Mapping[str, NodeCost], casts: Mapping[int, torch.dtype]) -> None:
        """Time the model once more, unless it does not fit.

        ``costs``: of its nodes, as far as they are known. ``casts``: as in ``StateCopies``.
        """
        if self.windows is None:
            return
        subject, segment = self._subject, self._subject.whole()
        if not self.fits(costs):
            self.give_up()
            return
        try:
            state = StateCopies(subject.root, subject.clock.device, casts)
            piece = Piece(segment.nodes, segment.inputs, segment.outputs, state)
            once = functools.partial(timed_pass, subject.clock, piece, subject.start(), private=segment.mutates)
            expected = sum(cost.forward_seconds + cost.backward_seconds for cost in costs.values())
            times = repeat(once, self._budget_seconds, fewest=4, expected_seconds=expected)
        except torch.OutOfMemoryError:
            self.give_up()
            return
        self.windows = self.windows.with_another(times)

    def fits(self, costs: Mapping[str, NodeCost], scale: float = 1.0) -> bool:
        """Return whether a lower bound of the peak memory is free: copies of parameters, gradients, and saved values.

        ``scale``: multiplies the bytes of the saved values.
        """
        parameters = sum(2 * spec.num_bytes({}) for spec in self._subject.graph.parameters.values())
        saved = sum(cost.saved_bytes for cost in costs.values())
        return parameters + scale * saved <= available_bytes(self._subject.clock.device)

    def give_up(self) -> None:
        """Do not time the complete model any more."""
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
