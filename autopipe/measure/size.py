"""The measurement of one microbatch size: walk, join to runs, time each kind of run, compare with the whole."""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autopipe.ir.graph import Graph, Node
from autopipe.ir.profile import Measurement, NodeCost, NodeWork
from autopipe.measure.clock import Clock, Times, Windows, repeat
from autopipe.measure.device import available_bytes
from autopipe.measure.piece import Piece, State, carrying, storage_of, tensors_of
from autopipe.measure.segments import segments
from autopipe.measure.walk import Saved, Values, Weights, call, explained, inputs_of, no_leaf, region

LEAST_SECONDS = 1e-3  # a shorter run of nodes is joined with its neighbours: the clock and autograd's start weigh in
BUDGET_SECONDS = 0.08  # for the repetitions of one run, in a window
LONG_SECONDS = 0.5  # a whole pass that takes longer is repeated twice only
_log = logging.getLogger(__name__)
Progress = Callable[[str, float], None]


class Captured(Protocol):
    """What the tracer hands over, as far as it is used here."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def module(self) -> fx.GraphModule:
        """The same nodes under the same names, over the user's modules."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of nodes: what it reads and does not make, and what of it is read behind it."""

    about: tuple[Node, ...]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def changes(self) -> bool:
        """Whether a node changes memory in place."""
        return any(node.mutates for node in self.about)

    @property
    def places(self) -> dict[str, int]:
        """Each name's place: its nodes from 0 on, what it reads below 0."""
        place = {name: index - len(self.inputs) for index, name in enumerate(self.inputs)}
        return {**place, **{node.name: index for index, node in enumerate(self.nodes)}}


@dataclass
class Run:
    """What was found of one run of nodes, for all runs that are the same."""

    saved_bytes: list[int]
    grads: list[tuple[bool, ...]]  # of its values, whether a gradient flows through each of their tensors
    keepers: list[tuple[int, int]]  # the places of what its nodes keep first, and of the node that does
    windows: Windows = field(default_factory=Windows)


@dataclass
class SizeRun:
    """Everything at one microbatch size. ``runs``: the distinct runs of nodes that were timed."""

    capture: Captured
    clock: Clock
    size: int
    batch: Mapping[str, Tensor]
    said: Progress = lambda text, part: None
    least_seconds: float = LEAST_SECONDS
    runs: dict[Any, Run] = field(default_factory=dict, init=False)
    chosen: list[tuple[int, int]] | None = field(default=None, init=False)
    num_windows: int = field(default=0, init=False)
    costs: dict[str, NodeCost] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.graph = self.capture.graph
        self.root = self.capture.module
        self.nodes = {node.name: node for node in self.root.graph.nodes}
        self.keys: dict[str, Any] = {}
        self.rough: dict[str, tuple[float, float]] = {}
        self.output_bytes: dict[str, int] = {}
        self.workspace: dict[str, int] = {}
        self.work: dict[str, NodeWork] = {}
        self.keepers: dict[str, str] = {}
        self.whole: Windows | None = Windows()  # None where it does not fit

    def window(self) -> None:
        """Time the runs of nodes and the whole once more; before the first time, walk.

        Raises: ProfileError as ``measure`` does.
        """
        if self.chosen is None:
            self._walk()
            seconds = [self.rough[node.name][0] for node in self.graph.nodes]
            self.chosen = segments(self.graph, seconds, self.least_seconds)
        values, counted = self._start(), dict[int, str]()
        for index, (start, stop) in enumerate(self.chosen):
            self.said(f"nodes {start} to {stop} of {len(self.graph.nodes)}", 0.1 + 0.7 * index / len(self.chosen))
            self._segment(start, stop, values, counted)
        self.said("the whole model", 0.8)
        self._time_whole()
        self.num_windows += 1

    def measurement(self) -> Measurement:
        """Return what was found in all windows; the first one is taken here if there was none."""
        if not self.num_windows:
            self.window()
        return Measurement(self.size, self._compared(), self._spread(), self.keepers, self.work)

    def counted(self) -> Measurement:
        """Return what nodes keep and how much they compute and move, without a time: also for fake tensors."""
        self._walk()
        about = self.graph.nodes
        nodes = tuple(self.nodes[node.name] for node in about)
        whole = Stretch(about, nodes, tuple(inputs_of(nodes)), tuple(self._outputs()))
        with explained(about[0], self.size):
            run = self._kept(whole, self._start(), {})
        names = {place: name for name, place in whole.places.items()}
        keepers = {names[place]: names[keeper] for place, keeper in reversed(run.keepers)}
        costs = {
            node.name: NodeCost(0.0, 0.0, self.output_bytes[node.name], saved, self.workspace[node.name])
            for node, saved in zip(about, run.saved_bytes, strict=True)
        }
        return Measurement(self.size, costs, 0.0, keepers, self.work)

    def _start(self) -> Values:
        return Values({name: leaf.clone() for name, leaf in self.batch.items()})

    def _walk(self) -> None:
        values, weights = self._start(), Weights(self.clock)
        weights.calibrate()
        count = len(self.graph.nodes)
        for index, node in enumerate(self.graph.nodes):
            self.said(f"node {node.name}", 0.1 * index / count)
            with explained(node, self.size):
                key, forward, backward = weights.step(self.nodes[node.name], node, values, self.root)
            self.keys[node.name], self.rough[node.name] = key, (forward, backward)
            self.workspace[node.name] = weights.workspace[key]
            if weights.work[key] != NodeWork():
                self.work[node.name] = weights.work[key]
            result = values.by_name[node.name]
            self.output_bytes[node.name] = sum(t.numel() * t.element_size() for t in tensors_of(result))
            self._forget(values, index)

    def _forget(self, values: Values, position: int) -> None:
        """Drop what nothing behind ``position`` reads."""
        for name in [n for n in values.by_name if self.graph.last_use.get(n, -1) <= position]:
            del values.by_name[name]

    # --- one run of nodes ---------------------------------------------------------------------------------------------

    def _segment(self, start: int, stop: int, values: Values, counted: dict[int, str]) -> None:
        """``counted``: memory that a node before this run keeps for its backward -> that node."""
        about = self.graph.nodes[start:stop]
        nodes = tuple(self.nodes[node.name] for node in about)
        outputs = tuple(node.name for node in about if self.graph.last_use.get(node.name, -1) >= stop)
        stretch = Stretch(about, nodes, tuple(inputs_of(nodes)), outputs)
        key = self._key(stretch, values, counted)
        with explained(about[0], self.size):
            if key not in self.runs:
                self.runs[key] = self._kept(stretch, values, counted)
            run = self.runs[key]
            if len(run.windows.found) <= self.num_windows:
                run.windows = run.windows.with_another(self._timed(stretch, values))
            self._advance(stretch, values, counted, run)
        self._divide(about, run)
        self._forget(values, stop - 1)
        alive = {storage_of(tensor) for value in values.by_name.values() for tensor in tensors_of(value)}
        for memory in counted.keys() - alive:
            del counted[memory]

    def _key(self, stretch: Stretch, values: Values, counted: Mapping[int, str]) -> Any:
        """Return what decides what a run costs: its nodes, how they are wired, and which inputs' memory is counted."""
        place = stretch.places
        wires = tuple(
            tuple(place[source.name] for source in node.all_input_nodes if source.op != "get_attr")
            for node in stretch.nodes
        )
        already = tuple(
            any(storage_of(tensor) in counted for tensor in tensors_of(values.by_name[name])) for name in stretch.inputs
        )
        ends = tuple(place[name] for name in stretch.outputs)
        return tuple(self.keys[node.name] for node in stretch.nodes), wires, already, ends

    def _kept(self, stretch: Stretch, values: Values, counted: Mapping[int, str]) -> Run:
        """Run it once to see what it keeps for its backward, and where gradients flow."""
        private = stretch.changes
        state, saved, seen = State(self.root, self.clock.device), Saved(), set(counted)
        made = {name: no_leaf(values.fresh(name, private=private), private) for name in stretch.inputs}
        if private:  # the copies stand for memory that may be counted already
            for name in stretch.inputs:
                seen |= self._copies(made[name], values.by_name[name], counted)
        saved.run(stretch.nodes, made, state, seen)
        results = [made[node.name] for node in stretch.nodes]
        grads = [tuple(tensor.requires_grad for tensor in tensors_of(result)) for result in results]
        places = stretch.places
        keepers = [
            (place, places[saved.keepers[memory]])
            for name, place in places.items()
            for memory in map(storage_of, tensors_of(made[name]))
            if memory in saved.keepers
        ]
        kept = [saved.bytes[node.name] for node in stretch.nodes]
        return Run(kept, grads, keepers)

    def _timed(self, stretch: Stretch, values: Values) -> Times:
        piece = Piece(stretch.nodes, stretch.inputs, stretch.outputs, State(self.root, self.clock.device))
        return repeat(lambda: self._once(piece, values, stretch.changes), BUDGET_SECONDS)

    @staticmethod
    def _copies(copied: Any, original: Any, counted: Mapping[int, str]) -> set[int]:
        pairs = zip(tensors_of(copied), tensors_of(original), strict=True)
        return {storage_of(a) for a, b in pairs if storage_of(b) in counted}

    def _once(self, piece: Piece, values: Values, private: bool) -> tuple[float, float]:
        """Time a forward and a backward of a piece, as a stage runs them."""
        leaves = [values.fresh(name, private=private) for name in piece.inputs]
        given = [no_leaf(leaf, private) for leaf in leaves]
        results, forward = self.clock.time(lambda: piece(given))
        outputs = carrying(results)
        if not outputs:
            return forward, 0.0
        grads = [torch.ones_like(output) for output in outputs]
        _, backward = self.clock.time(lambda: torch.autograd.backward(outputs, grads))
        return forward, backward

    def _advance(self, stretch: Stretch, values: Values, counted: dict[int, str], run: Run) -> None:
        """Make the values of a run, without gradients, for the runs behind it."""
        state = State(self.root, self.clock.device)
        for index, node in enumerate(stretch.nodes):
            with region(node, grad=False):
                values.by_name[node.name] = call(node, values.by_name, state)
            values.grads[node.name] = run.grads[index]
        names = {place: name for name, place in stretch.places.items()}
        for place, keeper in run.keepers:
            for tensor in tensors_of(values.by_name[names[place]]):
                counted.setdefault(storage_of(tensor), names[keeper])
        for name in names.values():
            for memory in map(storage_of, tensors_of(values.by_name[name])):
                if memory in counted:
                    self.keepers.setdefault(name, counted[memory])

    def _divide(self, about: Sequence[Node], run: Run) -> None:
        """Give each node its part of a run's time."""
        forward = _shares([self.rough[node.name][0] for node in about])
        backward = _shares([self.rough[node.name][1] for node in about])
        seconds = run.windows.quietest.medians
        for node, f, b, saved in zip(about, forward, backward, run.saved_bytes, strict=True):
            self.costs[node.name] = NodeCost(
                f * seconds[0], b * seconds[1], self.output_bytes[node.name], saved, self.workspace[node.name]
            )

    # --- the whole model ----------------------------------------------------------------------------------------------

    def _time_whole(self) -> None:
        """Time the whole model once more, unless it does not fit. A long pass is repeated less often."""
        if self.whole is None:
            return
        about = self.graph.nodes
        nodes, private = [self.nodes[node.name] for node in about], any(node.mutates for node in about)
        values = self._start()
        if self._needed_bytes() > available_bytes(self.clock.device):
            self._say_unfit()
            return
        seconds = sum(cost.forward_seconds + cost.backward_seconds for cost in self.costs.values())
        try:
            piece = Piece(nodes, inputs_of(nodes), self._outputs(), State(self.root, self.clock.device))
            once = functools.partial(self._once, piece, values, private)
            times = repeat(once, 3 * BUDGET_SECONDS, fewest=4 if seconds < LONG_SECONDS else 2)
        except torch.OutOfMemoryError:
            self._say_unfit()
            return
        self.whole = self.whole.with_another(times)

    def _needed_bytes(self) -> int:
        """Parameters copied, their gradients, and what is saved: less than a pass takes at its peak, but most of it."""
        parameters = sum(2 * spec.num_bytes({}) for spec in self.graph.parameters.values())
        return parameters + sum(cost.saved_bytes for cost in self.costs.values())

    def _say_unfit(self) -> None:
        self.whole = None
        _log.info("microbatch of %d: the whole model does not fit; its runs of nodes stand for it", self.size)

    def _outputs(self) -> list[str]:
        made = {node.name for node in self.graph.nodes}
        return [name for name in self.graph.outputs if name in made]

    def _spread(self) -> float:
        if self.whole is not None and self.whole.spread is not None:
            return self.whole.spread
        known = [found for found in (run.windows.spread for run in self.runs.values()) if found is not None]
        return statistics.median(known) if known else 0.0

    def _compared(self) -> dict[str, NodeCost]:
        """Return the nodes' costs, scaled half way to the whole pass."""
        if self.whole is None:
            return self.costs
        whole = self.whole.quietest.medians
        sums = sum(c.forward_seconds for c in self.costs.values()), sum(c.backward_seconds for c in self.costs.values())
        parts = [part / total if total else 1.0 for total, part in zip(whole, sums, strict=True)]
        # runs by themselves find their data in the cache, the whole meets a full allocator; a stage lies between
        factors = [part**-0.5 if part else 1.0 for part in parts]
        _log.info(
            "microbatch of %d: forward %.3f ms, backward %.3f ms; %d runs of nodes (%d timed) add up to %.2f and %.2f",
            self.size, *(1e3 * seconds for seconds in whole), len(self.chosen or ()), len(self.runs),
            *parts,
        )  # fmt: skip
        return {
            name: replace(
                cost,
                forward_seconds=cost.forward_seconds * factors[0],
                backward_seconds=cost.backward_seconds * factors[1],
            )
            for name, cost in self.costs.items()
        }


def _shares(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights] if total else [1 / len(weights)] * len(weights)
