# ruff: noqa: E501  # lines of a profile as PipeDream writes them
"""PipeDream profiles: random ones, an example file, and the published ones if they are next to the repository."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

from benchmarks.pipedream.file_format import LayerGraph, read_pipedream
from benchmarks.pipedream.model import Machine

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden" / "pipedream"


TEXT = """\
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=1.500, backward_compute_time=2.500, activation_size=8.000, parameter_size=4.000
\tnode1 -- node2
node1 -- Input -- forward_compute_time=99.0, backward_compute_time=0.000, activation_size=5.0, parameter_size=0.000
node3 -- LSTM(2, 3) -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=[6.0; 2.0; 1.0], parameter_size=2.0 -- stage_id=1
    node2 -- node3
node4 -- __getitem__(0) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=6.0, parameter_size=0.0
\tnode3 -- node4
"""


def random_layers(rng, count):
    edges = {(rng.randrange(b), b) for b in range(1, count)}
    edges |= {(a, b) for a, b in itertools.combinations(range(count), 2) if rng.random() < 0.15}
    return LayerGraph(
        tuple(f"node{i}" for i in range(count)),
        ("layer",) * count,
        tuple(rng.lognormvariate(0, 1) for _ in range(count)),
        tuple(rng.lognormvariate(0.5, 1) for _ in range(count)),
        tuple(rng.lognormvariate(0, 1.5) for _ in range(count)),
        tuple(rng.lognormvariate(0, 2) for _ in range(count)),
        tuple(sorted(edges)),
    )


def cut_bytes(graph, inside):
    return sum(graph.activation_bytes[a] for a in inside if any(x == a and y not in inside for x, y in graph.edges))


def stage_sums(graph, stage):
    seconds = sum(graph.forward_seconds[i] + graph.backward_seconds[i] for i in stage)
    return seconds, sum(graph.parameter_bytes[i] for i in stage), sum(graph.activation_bytes[i] for i in stage)


def golden_case(row, folder=GOLDEN):
    """Return the layers of a row of golden.csv, its machine, and whether stages have one device."""
    counts = tuple(int(count) for count in row["level_sizes"].split("x"))
    bandwidths = tuple(float(value) * 1e9 for value in row["bandwidths_GBps"].split("/"))
    memory = 16e9 if "-s 16e9" in row["optimizer_options"] else 0.0
    straight = "--straight_pipeline" in row["optimizer_options"]
    return read_pipedream(folder / row["profile"]), Machine(counts, bandwidths, memory), straight


def golden_rows():
    if not (GOLDEN / "golden.csv").exists():
        return []
    with (GOLDEN / "golden.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
