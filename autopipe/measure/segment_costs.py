"""``SegmentCosts``: time every distinct segment of a model, and divide the times among the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.ir.graph import Node
from autopipe.ir.profile import NodeCost
from autopipe.measure.clock import Times, Windows, repeat
from autopipe.measure.facts import NodeFacts
from autopipe.measure.piece import Piece, StateCopies, storage_of, tensors_of
from autopipe.measure.subject import Progress, Segment, Subject
from autopipe.measure.walk import SavedBytes, Values, call, explained, region, timed_pass, writable

BUDGET_SECONDS = 0.08  # for the repetitions of one segment, in one window


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

    def __init__(self, subject: Subject, facts: NodeFacts, bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds = bounds  # (start, stop) of each segment
        self.distinct: dict[Any, SegmentCost] = {}  # by what decides the cost of a segment
        self.nodes: dict[str, NodeCost] = {}  # by name of the node
        self.keepers: dict[str, str] = {}  # value -> the node that is the first to keep it for its backward
        self._subject = subject
        self._facts = facts
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
        return repeat(lambda: timed_pass(clock, piece, values, private=segment.mutates), BUDGET_SECONDS)

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
