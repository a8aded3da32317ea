"""``measure``: times and bytes of every node, at one or more microbatch sizes.

At each size:

1. A walk over the nodes gives their values and rough times (``facts``).
2. The nodes are joined to segments that take long enough to time (``segments``).
3. Each distinct segment is timed on real values, forward with gradients and backward (``segment_costs``).
4. The time of a segment is divided among its nodes by their rough times.
5. The complete model is timed, and the nodes are scaled half way to it (``whole``). This step is left out if the model
   does not fit the device: the steps before need memory for one segment only.

All sizes take turns, window by window of time; one window of each segment counts (``clock``).
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import ProfileError
from autopipe.ir.profile import Measurement, Profile, WorkloadSpec
from autopipe.measure.clock import Clock
from autopipe.measure.device import describe_device, find_device, quiet
from autopipe.measure.gpu_load import GpuLoad
from autopipe.measure.size import SizeMeasurement
from autopipe.measure.stepping import optimizer_cost
from autopipe.measure.subject import Captured, Progress, no_progress

_log = logging.getLogger(__name__)
NOISY = 0.1
"""Relative spread, or steal time, above which times are noisy. Usual on a shared machine; logged with ``-v``."""
VERY_NOISY = 0.75
"""Relative spread, or steal time, above which a profile is not reliable; logged as a warning."""
MOST_WINDOWS = 8
ENOUGH_SECONDS = 3.0
"""No further window begins after this time: the windows so far contain both quiet and busy moments."""


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
    threads: int = 1,
    progress: Progress = no_progress,
) -> Profile:
    """Measure a captured model.

    ``larger_sizes``: measured too, except those that take longer than ``quick_seconds`` for a forward and a backward,
    or more than half of the memory, by the figures of the largest other size.

    The model's parameters, buffers and gradients and the state of the random number generators do not change. A size
    at which the model cannot run (a BatchNorm of one sample) or does not fit is left out with a warning.

    Raises: ProfileError if at every size a node fails, or a segment does not fit the device.
    """
    target, sizes = find_device(device), checked_sizes(microbatch_sizes)
    graph = capture.graph
    with quiet(target, threads):
        load = GpuLoad(target) if target.type == "cuda" else None

        def sized(size: int) -> SizeMeasurement:
            clock = Clock(target, threads, load)
            return SizeMeasurement(capture, clock, size, _batch(workload, capture, size, target))

        def further(largest: SizeMeasurement) -> list[SizeMeasurement]:
            return [sized(size) for size in larger_sizes if largest.allows(size, quick_seconds)]

        measured = _in_windows([sized(size) for size in sizes], progress, further)
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
) -> list[SizeMeasurement]:
    """Measure all sizes in turns, and return those that could be measured.

    ``further``: gives the larger sizes that join after the first window; called with the largest size so far.

    Raises: ProfileError of the first size if none could.
    """
    running, failures = list(sizes), list[ProfileError]()
    sizes[0].subject.clock.heat()
    begin = time.monotonic()
    for window in range(MOST_WINDOWS):
        if window:
            sizes[0].subject.clock.heat(again=True)
        for index, run in enumerate(tuple(running)):
            size, windows_done = run.subject.size, window + index / len(running)
            run.progress = functools.partial(_report, progress, size, windows_done, 1 / len(running))
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
        if not joining and time.monotonic() - begin > ENOUGH_SECONDS:
            break
    return running


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
