"""``measure``: times and bytes of every node, at one or more microbatch sizes.

At each size:

1. A walk over the nodes gives their values and rough times (``NodeFacts``). 2. The nodes are joined to segments that
take long enough to time (``segments``). 3. Each distinct segment is timed on real values, forward with gradients and
backward (``segment_costs``). 4. The time of a segment is divided among its nodes by their rough times. 5. The complete
model is timed, and the nodes are scaled half way to it (``WholeModel``). This step is left out if the model does not
fit the device: the steps before need memory for one segment only.

All sizes take turns, window by window of time; one window of each segment counts (``clock``).
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import ProfileError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph
from autopipe.ir.profile import Measurement, Profile, WorkloadSpec
from autopipe.measure.clock import Clock, GpuLoad
from autopipe.measure.device import describe_device, find_device, quiet
from autopipe.measure.segment_costs import BUDGET_SECONDS, NodeFacts, SegmentCosts, WholeModel, walk_nodes
from autopipe.measure.stepping import optimizer_cost
from autopipe.measure.subject import Captured, Progress, Subject, no_progress

# ``SizeMeasurement``: one microbatch size, measured in windows: walk the nodes, time the segments, time the whole.

# Divide a graph into the segments that are timed.
#
# Segments begin and end at legal cuts (a stage can never end between two of them) and at the borders of the model's
# blocks, so that equal blocks give equal segments and are timed once::
#
#     nodes       embed | blocks.0 ............ | blocks.1 ............ | norm head loss
#     segments    embed |     a     |     b     |     a     |     b     |       c
#
# A long block is divided evenly; nodes that take less than ``least_seconds`` are joined with the ones after them.


def block_of(module_path: str) -> str:
    """Return the outermost numbered module of a path: ``model.layers.3`` of ``model.layers.3.mlp.up``; "" if none."""
    parts = module_path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def segments(graph: Graph, seconds: Sequence[float], least_seconds: float) -> list[tuple[int, int]]:
    """Divide the nodes into segments, returned as (start, stop). ``seconds``: rough forward time of every node."""
    count = len(graph.nodes)
    if not count:
        return []
    atoms = list(pairwise([0, *Cuts(graph).legal, count]))

    def block(atom: tuple[int, int]) -> str:
        work = [node for node in graph.nodes[atom[0] : atom[1]] if not node.input_only]
        return block_of(work[0].module_path) if work else ""

    def length(run: Sequence[tuple[int, int]]) -> float:
        return sum(seconds[run[0][0] : run[-1][1]]) if run else 0.0

    runs: list[list[tuple[int, int]]] = []
    short: list[tuple[int, int]] = []
    for _, group in groupby(atoms, key=block):
        run = list(group)
        if length(run) < least_seconds:
            short += run
            if length(short) >= least_seconds:
                runs.append(short)
                short = []
            continue
        if short:
            runs.append(short)
            short = []
        runs += _divided(run, [length([atom]) for atom in run], least_seconds)
    if short:
        runs.append(short)
    return [(run[0][0], run[-1][1]) for run in runs]


def _divided(run: list[tuple[int, int]], seconds: Sequence[float], least_seconds: float) -> list[list[tuple[int, int]]]:
    """Divide atoms evenly into parts of at least about ``least_seconds``."""
    total = sum(seconds)
    count = max(int(total / least_seconds), 1)
    parts: list[list[tuple[int, int]]] = [[]]
    passed = 0.0
    for atom, cost in zip(run, seconds, strict=True):
        if parts[-1] and passed + cost / 2 >= total * len(parts) / count:
            parts.append([])
        parts[-1].append(atom)
        passed += cost
    return parts


LEAST_SECONDS = 1e-3
"""A shorter segment is joined with its neighbours: the clock and the start of autograd would dominate its time."""


class SizeMeasurement:
    """Measures a model at one microbatch size."""

    def __init__(
        self,
        capture: Captured,
        clock: Clock,
        size: int,
        batch: Mapping[str, Tensor],
        *,
        progress: Progress = no_progress,
        least_seconds: float = LEAST_SECONDS,
        complete: bool = True,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> None:
        self.subject = Subject(capture, clock, size, batch)
        self.progress = progress
        self.whole = WholeModel(self.subject, budget_seconds)
        if not complete:
            self.whole.give_up()
        self.num_windows = 0
        self._least_seconds, self._budget_seconds = least_seconds, budget_seconds
        self._measured: tuple[NodeFacts, SegmentCosts] | None = None  # None before the first window

    def window(self) -> None:
        """Time the segments and the complete model once more. The first window begins with a walk over the nodes.

        Raises: ProfileError as ``measure`` does.
        """
        facts, segment_costs = self._prepared()
        segment_costs.window(self.progress)
        self.progress("the whole model", 0.8)
        self.whole.window(segment_costs.nodes, facts.replaced)
        self.num_windows += 1

    def _prepared(self) -> tuple[NodeFacts, SegmentCosts]:
        if self._measured is None:
            facts = walk_nodes(self.subject, self.progress)
            seconds = [facts.seconds[node.name][0] for node in self.subject.graph.nodes]
            bounds = segments(self.subject.graph, seconds, self._least_seconds)
            self._measured = facts, SegmentCosts(self.subject, facts, bounds, self._budget_seconds)
        return self._measured

    def allows(self, size: int, seconds: float) -> bool:
        """Return whether a larger size, by the figures of this one, takes at most these seconds for a forward and a
        backward, and fits half of the memory.
        """
        scale, own = size / self.subject.size, self.seconds
        fits = self.whole.windows is not None and self.whole.fits(self.segments.nodes, 2 * scale)
        return fits and scale > 1 and scale * own <= seconds

    @property
    def seconds(self) -> float:
        """The seconds of a forward and a backward."""
        return sum(cost.forward_seconds + cost.backward_seconds for cost in self.segments.nodes.values())

    @property
    def segments(self) -> SegmentCosts:
        """The costs of the segments; walks the nodes first if no window was taken."""
        return self._prepared()[1]

    def measurement(self) -> Measurement:
        """Return the result of all windows; takes the first window if there was none."""
        if not self.num_windows:
            self.window()
        facts, costs = self._prepared()
        scaled = self.whole.scaled(costs.nodes, len(costs.distinct), len(costs.bounds))
        spread = self._spread(costs)
        return Measurement(self.subject.size, scaled, spread, costs.keepers, facts.work, facts.casts)

    def _spread(self, costs: SegmentCosts) -> float:
        if self.whole.spread is not None:
            return self.whole.spread
        spreads = [spread for cost in costs.distinct.values() if (spread := cost.windows.spread) is not None]
        return statistics.median(spreads) if spreads else 0.0


_log = logging.getLogger(__name__)
NOISY = 0.1
"""Relative spread, or steal time, above which times are noisy. Usual on a shared machine; logged with ``-v``."""
VERY_NOISY = 0.75
"""Relative spread, or steal time, above which a profile is not reliable; logged as a warning."""
MOST_WINDOWS = 8
ENOUGH_SECONDS = 3.0
"""The time after which no further window begins, unless the caller is in a hurry."""
_PASSES = 4  # forwards and backwards in the first window of a size


class BatchSource(Protocol):
    """The part of a workload that gives batches and makes the optimizer."""

    @property
    def spec(self) -> WorkloadSpec:
        """How to load the workload again."""

    def example_item(self, batch_size: int, /) -> Any:
        """Return a batch of ``batch_size`` samples."""

    def leaves(self, item: Any, /) -> dict[str, Tensor]:
        """Return the tensors of a batch by the names of the graph's inputs."""

    def optimizer(self, named_parameters: list[tuple[str, nn.Parameter]], /) -> Optimizer | None:
        """Return the optimizer of some of the parameters."""


def checked_sizes(microbatch_sizes: Sequence[int]) -> list[int]:
    """Return the distinct microbatch sizes, in order.

    Raises: ProfileError if the list is empty, or a size is below 1.
    """
    sizes = sorted(set(microbatch_sizes))
    if not sizes or sizes[0] < 1:
        raise ProfileError(
            f"microbatch sizes {list(microbatch_sizes)} are not positive", remedy="give sizes such as 1,2,4,8"
        )
    return sizes


def measure(
    capture: Captured,
    workload: BatchSource,
    *,
    device: str | torch.device = "auto",
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    larger_sizes: Sequence[int] = (),
    quick_seconds: float = math.inf,
    slow_seconds: float = math.inf,
    between_seconds: float = math.inf,
    enough_seconds: float = ENOUGH_SECONDS,
    threads: int = 1,
    complete: bool = True,
    progress: Progress = no_progress,
) -> Profile:
    """Measure a captured model.

    ``larger_sizes``: measured too, except those that take longer than ``quick_seconds`` for a forward and a backward,
    or more than half of the memory, by the figures of the largest other size. ``slow_seconds``: a size is left out with
    a warning if measuring it and those before it once would take longer; the smallest one never is.
    ``between_seconds``: a size between the smallest and the largest is left out, to be interpolated, if its forward and
    backward take longer. ``enough_seconds``: no further window begins after this time: those so far contain quiet and
    busy moments; with less, each is repeated less in a window. ``complete``: time the complete model too, if it fits.

    The model's parameters, buffers and gradients and the state of the random number generators do not change. A size
    at which the model cannot run (a BatchNorm of one sample) or does not fit is left out with a warning.

    Raises: ProfileError if at every size a node fails, or a segment does not fit the device.
    """
    target, sizes = find_device(device), checked_sizes(microbatch_sizes)
    graph, budget = capture.graph, BUDGET_SECONDS * min(enough_seconds / ENOUGH_SECONDS, 1.0)
    with quiet(target, threads):
        load = GpuLoad(target) if target.type == "cuda" else None

        def sized(size: int) -> SizeMeasurement:
            clock, batch = Clock(target, threads, load), _batch(workload, capture, size, target)
            return SizeMeasurement(capture, clock, size, batch, complete=complete, budget_seconds=budget)

        def further(largest: SizeMeasurement) -> list[SizeMeasurement]:
            return [sized(size) for size in larger_sizes if largest.allows(size, quick_seconds)]

        runs, limits = [sized(size) for size in sizes], (slow_seconds, between_seconds, enough_seconds)
        measured = _in_windows(runs, progress, further, *limits)
        measurements = [run.measurement() for run in measured]
        steal_time = {run.subject.size: run.subject.clock.steal_time for run in measured}
        progress("optimizer step", MOST_WINDOWS / (MOST_WINDOWS + 1))
        trained = {name: spec.requires_grad for name, spec in graph.parameters.items()}
        seconds, state = optimizer_cost(capture.module, trained, workload, Clock(target, threads, load))
    progress("done", 1.0)
    log_noise(measurements, steal_time)
    return Profile(workload.spec, graph, describe_device(target, threads), tuple(measurements), seconds, state)


def _batch(workload: BatchSource, capture: Captured, size: int, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of an example batch on the device.

    Raises: ProfileError if the graph reads a tensor that the batch lacks.
    """
    batch = {name: leaf.to(device) for name, leaf in workload.leaves(workload.example_item(size)).items()}
    missing = [entry.name for entry in capture.graph.inputs if entry.name not in batch]
    if missing:
        raise ProfileError(
            f"the batch has no {missing[0]!r}, which the graph reads (it has {', '.join(batch)})",
            remedy="profile again; the model's inputs have changed since it was traced",
        )
    return batch


def _in_windows(
    sizes: list[SizeMeasurement],
    progress: Progress,
    further: Callable[[SizeMeasurement], list[SizeMeasurement]],
    slow_seconds: float,
    between_seconds: float,
    enough_seconds: float,
) -> list[SizeMeasurement]:
    """Measure all sizes in turns, and return those that could be measured, in order. For the times see ``measure``.

    ``further``: gives the larger sizes that join after the first window; called with the largest size so far.

    Raises: ProfileError of the first size if none could.
    """
    running, failures = list(sizes), list[ProfileError]()
    sizes[0].subject.clock.heat()
    begin = time.monotonic()
    for window in range(MOST_WINDOWS):
        if window:
            sizes[0].subject.clock.heat(again=True)
        # the largest after the smallest: others are between them
        order = running if window else [*running[:1], *reversed(running[1:])]
        for index, run in enumerate(tuple(order)):
            size, windows_done = run.subject.size, window + index / len(order)
            if not window and _leaves_out(running, run, slow_seconds, between_seconds):
                running.remove(run)
                continue
            run.progress = functools.partial(_report, progress, size, windows_done, 1 / len(order))
            try:
                run.window()
            except ProfileError as error:
                if run.num_windows:  # the earlier windows stay valid
                    continue
                running.remove(run)
                failures.append(error)
                _log.log(
                    logging.WARNING if run in sizes else logging.INFO,
                    "a microbatch of %d is left out of the profile: %s", size, error.what,
                )  # fmt: skip
        if not running:
            raise failures[0]
        joining = [] if window else further(running[-1])
        running += joining
        if not joining and time.monotonic() - begin > enough_seconds:
            break
    return running


def _leaves_out(
    running: list[SizeMeasurement], run: SizeMeasurement, slow_seconds: float, between_seconds: float
) -> bool:
    """Return whether a size is not measured, by the figures of those that are. What is slow is logged as a warning."""
    size, measured = run.subject.size, [other for other in running if other.num_windows]
    if not measured:
        return False
    largest = measured[-1]
    if size < largest.subject.size:
        return size * largest.seconds / largest.subject.size > between_seconds
    samples = size + sum(other.subject.size for other in measured)
    # what is done only once, such as compiling kernels, does not count
    if _PASSES * samples * largest.seconds / largest.subject.size <= slow_seconds:
        return False
    what = f"measuring up to it takes more than {slow_seconds:.0f} s (--microbatch-sizes names others)"
    _log.warning("a microbatch of %d is left out of the profile: %s", size, what)
    return True


def _report(progress: Progress, size: int, windows_done: float, share: float, text: str, fraction: float) -> None:
    progress(f"microbatch of {size}: {text}", (windows_done + share * fraction) / (MOST_WINDOWS + 1))


def log_noise(measurements: Sequence[Measurement], steal_time: dict[int, float]) -> None:
    """Log the noise of all sizes in one line: a warning if it is exceptional, information (``-v``) if it is usual."""
    noisy = [m for m in measurements if m.spread > NOISY or steal_time[m.microbatch_size] > NOISY]
    high = any(m.spread > VERY_NOISY or steal_time[m.microbatch_size] > VERY_NOISY for m in noisy)
    if noisy:
        _log.log(
            logging.WARNING if high else logging.INFO,
            "microbatches of %s: the times vary by up to %.0f %%, and other programs took up to %.0f %% of the time; "
            "measure again on an idle machine before you rely on the plan",
            ", ".join(str(m.microbatch_size) for m in noisy),
            100 * max(m.spread for m in noisy),
            100 * max(steal_time[m.microbatch_size] for m in noisy),
        )
