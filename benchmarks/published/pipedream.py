"""PipeDream's published speed-ups over data parallelism, beside those that the planner predicts (``planner.py``).

Published: "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, table 1, epoch time; and the first
version, arXiv:1806.03377, table 1. The figures are from memory or from secondary sources, and were not compared with
the papers: they may be wrong. The configurations are those of PipeDream's repository (``runtime``) where it has them,
except for gnmt on 12 GPUs, which is 1-1-1-1-1-1-1-1-3-1 there.

The profiles are those in PipeDream's repository, for the models that have one. Bandwidths inside of a server are not
published: 10 GB/s is assumed over PCIe and 30 GB/s over NVLink. Both predictions, of a plan and of data parallelism,
are by PipeDream's own formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.pipedream.file_format import read_pipedream
from benchmarks.pipedream.model import Machine, data_parallel_seconds, plan_layers

# counts and bytes per second by link level, innermost first
CLUSTERS = {
    "A, 1 x 4 V100, PCIe": Machine((4,), (10e9,)),
    "A, 3 x 4 V100, PCIe, 10 Gbit/s": Machine((4, 3), (10e9, 1.25e9)),
    "A, 4 x 4 V100, PCIe, 10 Gbit/s": Machine((4, 4), (10e9, 1.25e9)),
    "B, 2 x 8 V100, NVLink, 25 Gbit/s": Machine((8, 2), (30e9, 3.125e9)),
    "8 x 1 V100, 10 Gbit/s": Machine((8,), (1.25e9,)),
}


@dataclass(frozen=True, slots=True)
class Speedup:
    """One row of a published table."""

    model: str  # of a profile
    cluster: str
    configuration: str  # replicas of the stages; "straight": one per stage; "": not known
    times: float  # as fast as data parallelism
    paper: str


SOSP, FIRST = "SOSP 2019", "arXiv:1806.03377"
PUBLISHED = (
    Speedup("vgg16", "A, 4 x 4 V100, PCIe, 10 Gbit/s", "15-1", 5.28, SOSP),
    Speedup("vgg16", "B, 2 x 8 V100, NVLink, 25 Gbit/s", "15-1", 2.98, SOSP),
    Speedup("resnet50", "A, 4 x 4 V100, PCIe, 10 Gbit/s", "16", 1.0, SOSP),
    Speedup("resnet50", "B, 2 x 8 V100, NVLink, 25 Gbit/s", "16", 1.0, SOSP),
    Speedup("alexnet", "A, 4 x 4 V100, PCIe, 10 Gbit/s", "15-1", 4.92, SOSP),
    Speedup("alexnet", "B, 2 x 8 V100, NVLink, 25 Gbit/s", "15-1", 2.04, SOSP),
    Speedup("gnmt", "A, 1 x 4 V100, PCIe", "straight", 1.5, SOSP),
    Speedup("gnmt", "A, 3 x 4 V100, PCIe, 10 Gbit/s", "straight", 2.95, SOSP),
    Speedup("gnmt", "B, 2 x 8 V100, NVLink, 25 Gbit/s", "16", 1.0, SOSP),
    Speedup("vgg16", "8 x 1 V100, 10 Gbit/s", "7-1", 5.12, FIRST),
    Speedup("inception_v3", "8 x 1 V100, 10 Gbit/s", "7-1", 1.45, FIRST),
    Speedup("resnet50", "8 x 1 V100, 10 Gbit/s", "", 1.21, FIRST),
    Speedup("alexnet", "8 x 1 V100, 10 Gbit/s", "", 6.76, FIRST),
)


def table(folder: Path) -> list[str]:
    """Return the comparison as lines of Markdown. ``folder``: PipeDream's profiles, ``MODEL.txt``."""
    lines = [
        "| model | cluster | paper | published plan | times data parallelism | planned | predicted | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in PUBLISHED:
        graph, machine = read_pipedream(folder / f"{row.model}.txt"), CLUSTERS[row.cluster]
        plan = plan_layers(graph, machine)
        predicted = data_parallel_seconds(graph, machine) / plan.cost_seconds
        lines.append(
            f"| {row.model} | {row.cluster} | {row.paper} | {row.configuration or '?'} | {row.times:.2f} "
            f"| {plan.configuration} | {predicted:.2f} | {predicted / row.times:.2f} |"
        )
    return lines
