"""The links between ranks of this machine, measured and kept in the work directory for later plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopipe.commands.calibration.link_ranks import measure_links
from autopipe.commands.calibration.overheads import host_costs
from autopipe.commands.settings import Progress
from autopipe.commands.store import Work
from autopipe.ir import artifact
from autopipe.ir.cluster import Links


def measure(work_dir: Path, device: str | None = None, progress: Progress | None = None) -> Links:
    """Measure between two ranks and write links.json. ``device``: cpu or cuda; None or auto: a GPU where there is one.

    Raises: RunError where the two ranks cannot talk.
    """
    work = Work.begin(work_dir, progress)
    kind = _kind(device)
    work.progress("measuring the links between two ranks", 0.0)
    found = measure_links(kind)
    work.progress("measuring what the runtime takes", 0.5)
    found = replace(found, host=host_costs(kind))
    artifact.save(found, work.store.links)
    return found


def _kind(device: str | None) -> str:
    if device is not None and device != "auto":
        return device.partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
