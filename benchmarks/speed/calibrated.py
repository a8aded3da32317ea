"""What the runtime adds to stages that sleep, measured on two ranks. Other pipelines are planned with these figures.

``autopipe doctor --links`` fits the same figures to runs that compute. There, two ranks evict each other's data from
caches, which ranks that sleep do not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopipe.commands.calibration.link_ranks import measure_links
from autopipe.commands.calibration.runtime_overhead import Record, fit_overhead, recorded
from autopipe.commands.store import Store
from autopipe.ir.cluster import Links, RuntimeOverhead
from benchmarks.speed.case import pipeline_words
from benchmarks.speed.running import AUTOPIPE, execute, prepare

STEPS, MICROBATCHES = 24, 8


def links_of(folder: Path, target: Path, widths: tuple[int, int]) -> Links:
    """Return the link between two ranks of this machine with the overhead of the runtime.

    ``widths``: numbers of a small and of a large message.
    """
    bare = measure_links()
    small, large = (_record(folder / f"width-{width}", target, bare, width) for width in widths)
    per_byte = max(large.send_seconds - small.send_seconds, 0.0) / (large.message_bytes - small.message_bytes)
    # a stage that sleeps takes as long beside others: no part of the overhead grows with its duration
    host: RuntimeOverhead = fit_overhead(per_byte, [small], [small], [small])
    return replace(bare, host=host)


def _record(folder: Path, target: Path, links: Links, width: int) -> Record:
    """Train two ranks, and return the measured instructions."""
    words = [*pipeline_words(2, MICROBATCHES, MICROBATCHES), "--schedule", "1f1b"]
    profile = ["--microbatch-sizes", "1", "--threads-per-rank", "2", "--arg", "layers=2", "--arg", f"width={width}"]
    work = prepare(folder, target, profile, {"1f1b": words}, links=links)["1f1b"]
    run = folder / "run"
    command = [AUTOPIPE, "train", str(target), "--device", "cpu", "--work-dir", str(work), "--run-dir", str(run)]
    execute([*command, *words, *profile, "--steps", str(STEPS), "--no-check", "--timeline"], folder)
    return recorded(run, Store(work))
