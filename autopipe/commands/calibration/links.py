"""Measure the links between ranks of this machine and store them in the work directory for later plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopipe.commands.calibration.link_ranks import measure_links
from autopipe.commands.calibration.runtime_overhead import measure_overhead
from autopipe.commands.settings import Progress
from autopipe.commands.store import Work
from autopipe.ir import artifact
from autopipe.ir.cluster import Links


def measure(work_dir: Path, device: str | None = None, progress: Progress | None = None) -> Links:
    """Measure between two ranks and write links.json. ``device``: cpu or cuda; None or auto: a GPU if there is one.

    Raises: RunError if the two ranks cannot communicate.
    """
    work = Work.begin(work_dir, progress)
    kind = _kind(device)
    work.progress("measuring the links between two ranks", 0.0)
    links = measure_links(kind)
    work.progress("measuring the overhead of the runtime", 0.5)
    links = replace(links, host=measure_overhead(kind))
    artifact.save(links, work.store.links)
    return links


def _kind(device: str | None) -> str:
    if device is not None and device != "auto":
        return device.partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
