"""Measure the links between ranks of this machine and store them in the work directory for later plans."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from autopipe.commands.calibration.link_ranks import measure_across, measure_links
from autopipe.commands.calibration.runtime_overhead import measure_overhead
from autopipe.commands.settings import Progress
from autopipe.commands.store import Work
from autopipe.ir import artifact
from autopipe.ir.cluster import Links
from autopipe.launch.remote.rank_environment import on_two_hosts
from autopipe.launch.request import LaunchSettings


def measure(
    work_dir: Path,
    device: str | None = None,
    progress: Progress | None = None,
    launch: LaunchSettings | None = None,
) -> Links | None:
    """Measure between two ranks and write links.json. ``device``: cpu or cuda; None or auto: a GPU if there is one.

    If a launcher has started this process on one of two hosts, and another one on the other, also measure between the
    hosts. Otherwise an earlier measurement between hosts is kept.

    Returns: None on the second host, which writes nothing.

    Raises: RunError if the two ranks cannot communicate.
    """
    work = Work.begin(work_dir, progress)
    kind, identity = _kind(device), on_two_hosts(os.environ)
    earlier = work.load(Links, work.store.links)
    across = earlier.across if earlier is not None and earlier.device_kind == kind else None
    if identity is not None:
        work.progress("measuring the link between two hosts", 0.0)
        across = measure_across(kind, identity, launch or LaunchSettings())
        if identity.rank:
            return None
    work.progress("measuring the links between two ranks", 0.1)
    links = measure_links(kind)
    work.progress("measuring the overhead of the runtime", 0.5)
    links = replace(links, host=measure_overhead(kind), across=across)
    artifact.save(links, work.store.links)
    return links


def _kind(device: str | None) -> str:
    if device is not None and device != "auto":
        return device.partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
