"""What a run measured of itself, written when it ends: its speed beside the prediction, and its timeline."""

from __future__ import annotations

from dataclasses import replace

from autopipe.commands.training.attempts import Attempts
from autopipe.commands.training.listener import Listener
from autopipe.cores import usable_cores
from autopipe.ir import artifact
from autopipe.ir.timeline import Timeline
from autopipe.report.slower import Speed, speed_of
from autopipe.runtime.job import RunDirectory


def write_speed(run: RunDirectory, listener: Listener, attempts: Attempts, seconds: float) -> Speed:
    """Return the speed of a run beside the prediction, and write it to the run."""
    settings, prepared = attempts.settings, attempts.prepared
    spent = list(listener.spent.values())
    here = settings.launch.name == "local" and prepared.profile.device.kind == "cpu"
    speed = speed_of(
        prepared.plan,
        listener.samples / seconds if seconds else 0.0,
        spent,
        steps=listener.counted,
        threads=prepared.profile.device.threads if here else 0,
        cores=usable_cores(),
        others=listener.load.of_others(sum(row["cpu"] for row in spent)),
    )
    artifact.save(speed, run.speed)
    return speed


def write_timeline(run: RunDirectory, listener: Listener, world: int) -> None:
    """Write when each rank ran each instruction, if that was measured."""
    if listener.spans:
        first = min(span.start_seconds for span in listener.spans)
        spans = tuple(
            replace(s, start_seconds=s.start_seconds - first, end_seconds=s.end_seconds - first) for s in listener.spans
        )
        artifact.save(Timeline("measured", world, spans), run.timeline)
