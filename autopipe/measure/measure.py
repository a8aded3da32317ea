"""``measure``: times and bytes of every node, at one or more microbatch sizes.

At each size: one walk node by node gives values and rough times (``walk``); the nodes are joined to runs that take long
enough to time (``segments``); each run is timed forward with gradients and backward, on real values, and what is the
same is timed once; a run's time is divided among its nodes by the rough times. Then the whole model is timed, and
the nodes are scaled half way towards adding up to it. All sizes take turns, window by window of time: the quietest
window of each run of nodes counts (``clock``).

Where the whole does not fit the device, that last step is left out; only one run's tensors are there at a time.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import ProfileError
from autopipe.ir.profile import Measurement, Profile, WorkloadSpec
from autopipe.measure.clock import Clock
from autopipe.measure.device import describe_device, find_device, quiet
from autopipe.measure.size import Captured, Progress, SizeRun
from autopipe.measure.stepping import optimizer_cost

_log = logging.getLogger(__name__)
NOISY = 0.1
"""Relative spread, or stolen time, above which times are noisy: usual on a shared machine, and said with ``-v``."""
VERY_NOISY = 0.75
"""Above which a profile is not to be trusted."""
MOST_WINDOWS = 8
ENOUGH_SECONDS = 3.0
"""After so many windows of time, or so long, no further one is begun: quiet and busy times have been seen."""


class Fed(Protocol):
    """The part of a workload that is used here."""

    @property
    def spec(self) -> WorkloadSpec:
        """How to find it again."""

    def example_item(self, batch_size: int, /) -> Any:
        """Return a batch of so many samples."""

    def leaves(self, item: Any, /) -> dict[str, Tensor]:
        """Return its tensors by the names of the graph's inputs."""

    def optimizer(self, named_parameters: list[tuple[str, nn.Parameter]], /) -> Optimizer | None:
        """Return the optimizer of some of the parameters."""


def measure(
    capture: Captured,
    workload: Fed,
    *,
    device: str | torch.device = "auto",
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    threads: int = 1,
    progress: Progress | None = None,
) -> Profile:
    """Measure a captured model. ``progress``: called with what is being done and the part that is done, 0 .. 1.

    The model's parameters, buffers and gradients, and the random numbers of the program, are left as they were.

    A size at which the model cannot run (a BatchNorm of one sample) or does not fit is left out, with a warning.

    Raises: ProfileError when a node fails on the device, or a run of nodes does not fit it, at every size.
    """
    where, sizes = find_device(device), sorted(set(microbatch_sizes))
    if not sizes or sizes[0] < 1:
        raise ProfileError(f"microbatch sizes {list(microbatch_sizes)} are not positive", remedy="give 1,2,4,8 or so")
    report = progress or (lambda text, part: None)
    graph = capture.graph
    failures: list[ProfileError] = []
    with quiet(where, threads):
        running: list[SizeRun] = []
        for size in sizes:
            batch = {k: v.to(where) for k, v in workload.leaves(workload.example_item(size)).items()}
            missing = [entry.name for entry in graph.inputs if entry.name not in batch]
            if missing:
                raise ProfileError(
                    f"the batch has no {missing[0]!r}, which the graph reads (it has {', '.join(batch)})",
                    remedy="profile again; the model's inputs have changed since it was traced",
                )
            running.append(SizeRun(capture, Clock(where, threads), size, batch))
        begin = time.monotonic()
        for window in range(MOST_WINDOWS):
            for index, run in enumerate(tuple(running)):
                done = window + index / len(running)
                run.said = functools.partial(_say, report, run.size, done, 1 / len(running))
                try:
                    run.window()
                except ProfileError as error:
                    if run.num_windows:  # it was measured before, and stays as it was found then
                        continue
                    running.remove(run)
                    failures.append(error)
                    _log.warning("a microbatch of %d is left out of the profile: %s", run.size, error.what)
            if not running:
                raise failures[0]
            if time.monotonic() - begin > ENOUGH_SECONDS:
                break
        measurements = [run.measurement() for run in running]
        stolen = {run.size: run.clock.stolen for run in running}
        report("optimizer step", MOST_WINDOWS / (MOST_WINDOWS + 1))
        trained = {name: spec.requires_grad for name, spec in graph.parameters.items()}
        seconds, state = optimizer_cost(capture.module, trained, workload, Clock(where, threads))
    report("done", 1.0)
    say_noise(measurements, stolen)
    return Profile(workload.spec, graph, describe_device(where, threads), tuple(measurements), seconds, state)


def _say(report: Progress, size: int, windows_done: float, share: float, text: str, part: float) -> None:
    report(f"microbatch of {size}: {text}", (windows_done + share * part) / (MOST_WINDOWS + 1))


def say_noise(measurements: Sequence[Measurement], stolen: dict[int, float]) -> None:
    """Log the noise once for all sizes: a warning where it is extraordinary, information (``-v``) where it is usual."""
    noisy = [m for m in measurements if m.spread > NOISY or stolen[m.microbatch_size] > NOISY]
    high = any(m.spread > VERY_NOISY or stolen[m.microbatch_size] > VERY_NOISY for m in noisy)
    if noisy:
        _log.log(
            logging.WARNING if high else logging.INFO,
            "microbatches of %s: the times vary by up to %.0f %%, and other programs took up to %.0f %% of the time; "
            "measure again on a quieter machine before trusting the plan",
            ", ".join(str(m.microbatch_size) for m in noisy),
            100 * max(m.spread for m in noisy),
            100 * max(stolen[m.microbatch_size] for m in noisy),
        )
