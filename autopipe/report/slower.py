"""Why a run was slower than predicted: from what its ranks spent their time on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.errors import counted
from autopipe.ir.plan import Plan

FACTOR = 1.3
"""By which a run must be slower than predicted to be explained."""
_LEAST = 0.05  # of the time of the run: below it, a cause is not named


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of a run beside the predicted one, and the causes of the difference."""

    measured: float  # samples per second
    predicted: float
    causes: tuple[str, ...] = ()  # the largest first

    @property
    def line(self) -> str:
        """The sentence about it; "" if the run was about as fast as predicted."""
        if not self.measured or self.predicted < FACTOR * self.measured:
            return ""
        why = "; ".join(self.causes) or "no single cause takes 5 % of the time"
        return f"{self.predicted / self.measured:.1f} times slower than predicted: {why}"


def speed_of(
    plan: Plan,
    measured: float,
    spent: Sequence[Mapping[str, float]],
    *,
    steps: int,
    threads: int,
    cores: int,
    others: float,
    compared: bool = False,
) -> Speed:
    """Return the speed of a run. ``spent``: the seconds of each of its processes, by the names of ``Spent``.

    ``threads``: of a process, on ``cores``; 0 if they compute elsewhere. ``others``: the cores that other programs used
    on average. ``compared``: with plain training, in one of these programs.
    """
    predicted = plan.predicted.samples_per_second
    whole = max((sum(row[name] for name in _PARTS) for row in spent), default=0.0)
    if not whole or not measured:
        return Speed(measured, predicted)

    def mean(name: str) -> float:
        return sum(row[name] for row in spent) / len(spent) / whole

    needed = plan.num_microbatches * steps
    work = [0.0] * plan.num_ranks
    for stage in plan.stages:
        for rank in stage.ranks:
            work[rank] += needed * stage.seconds / stage.replicas
    profiled = sum(work) / plan.num_ranks / whole
    idle = max(plan.predicted.step_seconds * steps / whole - profiled, 0.0)
    ready = mean("ready")
    programs = "the comparison with plain training and other programs" if compared else "other programs"
    used = f"{programs} used {others:.1f} of {counted(cores, 'core')}" if others >= _LEAST * cores else ""
    causes = {
        _without_core(ready, len(spent), threads, cores, used): ready,
        f"reading data took {mean('data'):.0%} of the time": mean("data"),
        f"checkpoints and audits took {mean('saving'):.0%} of the time": mean("saving"),
        f"recording batches of other shapes took {mean('recording'):.0%} of the time": mean("recording"),
    }
    slow = mean("computing") - profiled - ready
    if profiled:
        causes[f"computing took {mean('computing') / profiled:.1f} times as long as profiled"] = slow
    late = mean("waiting") - idle
    waited = f"{mean('waiting'):.0%} of the time ({idle:.0%} planned)"
    causes[f"ranks waited for messages and one another for {waited}"] = late
    named = sorted((cause for cause in causes if causes[cause] >= _LEAST), key=lambda cause: -causes[cause])
    return Speed(measured, predicted, tuple(named))


_PARTS = ("computing", "waiting", "data", "saving", "recording")


def _without_core(ready: float, processes: int, threads: int, cores: int, used: str) -> str:
    causes = []
    if threads and processes * threads > cores:
        each = f" with {threads} threads each" if threads > 1 else ""
        causes.append(f"{counted(processes, 'rank')}{each} share {counted(cores, 'core')}")
    if used:
        causes.append(used)
    why = f" ({', and '.join(causes)})" if causes else ""
    return f"ranks waited for a core for {ready:.0%} of the time{why}"
