"""The models and configurations of Megatron-LM's table, and profiles of them, synthesised from their sizes.

Published: Table 1 of "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (PTD-P,
arXiv:2104.04473). Microbatch sizes and stages per rank are those of ``run_table_1.sh`` in NVIDIA's repository, folder
``examples/academic_paper_scripts/sc21``. Selene has hosts of 8 A100-80GB and a 200 Gbit/s port per GPU.

Nothing is fitted to the published figures. Operations and bytes of a GPT follow from its sizes; times follow from
autopipe's own assumptions for devices that are not measured (``planning.cost.datasheets``, ``planning.clusters``). The
bytes that a layer keeps for its backward are those of arXiv:2205.05198, section 4. Fused kernels are assumed: a
softmax, a bias with GELU, and a bias with dropout and residual are one pass each.

As with ``--tensor-parallel``, a profile is that of one member of a team of t GPUs, and a rank of a plan is a team.
``team_costs`` divides a layer as Megatron-LM does, and the sums over the team take ``planning.teams.ring_seconds``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.profile import COUNTED, Device, Measurement, NodeCost, NodeWork, PassWork, Profile, WorkloadSpec
from autopipe.ir.teams.exchanged import SUM, Exchange
from autopipe.ir.tensor import TensorSpec
from autopipe.planning.clusters import GPU_LATENCY_SECONDS, LINK_SHARE, NETWORK_LATENCY_SECONDS, usable_gpu_bytes
from autopipe.planning.cost.datasheets import datasheet, on_datasheet
from autopipe.planning.teams import ring_seconds

SHEET = datasheet("A100-80GB")
PER_HOST = 8
INSIDE = LINK_SHARE * SHEET.link_bandwidth  # bytes per second of a GPU to others of its host
PORT = 0.8 * 25e9  # and to other hosts: 80 % of 200 Gbit/s, the share in ``clusters.NETWORK_BANDWIDTH``
LENGTH, VOCABULARY = 2048, 51200
SIZES = (1, 2, 4, 8, 16)  # samples of a microbatch


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the paper's table."""

    parameters: float  # billions
    heads: int
    width: int
    layers: int
    team: int  # tensor-parallel size
    depth: int  # pipeline-parallel size
    gpus: int
    batch: int  # sequences per step
    tera: int  # achieved TFLOP/s per GPU
    microbatch: int  # sequences
    stages_per_rank: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The tensor-, pipeline- and data-parallel sizes."""
        return self.team, self.depth, self.gpus // self.team // self.depth

    @property
    def flops(self) -> float:
        """Operations of a step, by equation 3 of the paper: with those of recomputing every layer."""
        h, s, n = self.width, LENGTH, self.layers
        return 96 * self.batch * s * n * h * h * (1 + s / (6 * h) + VOCABULARY / (16 * n * h))

    def tera_per_gpu(self, step_seconds: float) -> float:
        """Return the paper's measure of throughput."""
        return self.flops / step_seconds / self.gpus / 1e12


ROWS = (
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
)


@dataclass(frozen=True, slots=True)
class Part:
    """What one member of a team does for a part of the model and a microbatch, forward; a backward does it twice."""

    flops: float
    matrix_bytes: float  # read and written by matrix products
    other_bytes: float  # read and written by all other operations
    saved: float  # bytes kept for the backward
    parameters: float  # numbers, of this member
    sums_forward: int = 0  # all-reduces over the team of a tensor of batch x length x width
    sums_backward: int = 0
    workspace: float = 0.0  # bytes


def team_costs(row: Row, t: int, b: int) -> dict[str, Part]:
    """Return the parts of a GPT for a team of t members and microbatches of b sequences: Megatron's division.

    Heads, the inner width of the MLP and the vocabulary are divided by t. Norms, dropouts and residuals are whole. A
    part sums its results over the team once in a forward and once in a backward.
    """
    s, h, v = LENGTH, row.width, VOCABULARY
    token, score, logit = b * s * h, row.heads * s * s * b / t, b * s * v / t  # numbers
    norm, residual = 4 * token, 7 * token  # bytes: read and write; read both, write the sum and the mask
    attention = Part(
        (8 * token * h + 4 * token * s) / t,
        2 * (4 * h * h / t + 2 * token + 8 * token / t + 2 * 2 * score),
        norm + residual + (4 + 5) * score,
        5 * token + 8 * token / t + 5 * score,
        4 * h * h / t + 6 * h,
        1,
        1,
        4 * token + 4 * score,
    )
    mlp = Part(
        16 * token * h / t,
        2 * (8 * h * h / t + 2 * token + 8 * token / t),
        norm + residual + 16 * token / t,
        5 * token + 16 * token / t,
        8 * h * h / t + 7 * h,
        1,
        1,
        4 * token + 16 * token / t,
    )
    tokens = Part(0.0, 0.0, 5 * token, token, v * h / t, 1, 0, 2 * token)
    positions = Part(0.0, 0.0, residual, token, s * h, 0, 0, 2 * token)
    head = Part(
        2 * logit * h,
        2 * (v * h / t + token + logit),
        norm + 10 * logit,
        4 * token + 6 * logit,
        0.0,  # the table of the tokens
        0,
        1,
        4 * token + 4 * logit,
    )
    return {"tokens": tokens, "positions": positions, "attention": attention, "mlp": mlp, "head": head}


def links(t: int) -> tuple[Level, Level]:
    """Return the links between teams of t members of one host, and of several.

    Every member sends its t-th part of a message to its counterpart, over its own link or port. The receivers then
    gather the parts over the links of their host (the paper's scatter/gather, section 4.1). All members all-reduce
    their gradients at the same time.
    """
    gathered = (t - 1) / t / INSIDE  # seconds per byte
    inside, across = (1 / (1 / (rate * t) + gathered) for rate in (INSIDE, PORT))
    return (
        Level("host", PER_HOST // t, inside, GPU_LATENCY_SECONDS, INSIDE),
        Level("hosts", 1, across, NETWORK_LATENCY_SECONDS, PORT),
    )


def cluster_of(row: Row, t: int) -> Cluster:
    """Return the cluster of a row, with a team of t GPUs as one device."""
    host, network = links(t)
    levels = (host, dataclasses.replace(network, count=row.gpus // PER_HOST))
    device = ClusterDevice("A100-80GB", usable_gpu_bytes(SHEET.memory_bytes), datasheet=SHEET.name)
    return Cluster(tuple(level for level in levels if level.count > 1), (device,), "datasheets")


def profile_of(row: Row, t: int) -> Profile:
    """Return the profile of one member of a team of t: counted, with the datasheet's times and the team's sums."""
    graph, kind_of = graph_of(row, t)
    measurements, sums = [], {}
    within = Level("team", t, INSIDE, GPU_LATENCY_SECONDS)
    for b in SIZES:
        parts = team_costs(row, t, b)
        costs, work = {}, {}
        for node in graph.nodes:
            part = parts[kind_of[node.name]]
            size = 2 * b * LENGTH * row.width
            costs[node.name] = NodeCost(0.0, 0.0, size, round(part.saved), round(part.workspace))
            once, twice = (
                PassWork(round(k * part.flops), round(k * part.matrix_bytes), round(k * part.other_bytes))
                for k in (1, 2)
            )
            work[node.name] = NodeWork(once, twice)
            seconds = ring_seconds(Exchange(SUM, size), within)
            sums[b, node.name] = seconds * part.sums_forward, seconds * part.sums_backward
        keepers = {node.inputs[0]: node.name for node in graph.nodes[1:]}
        casts = {name: spec.num_bytes({}) // 2 for name, spec in graph.parameters.items()}
        measurements.append(Measurement(b, costs, 0.0, keepers, work, casts))
    spec = WorkloadSpec("gpt.py", arguments={}, hooks={}, inputs=(), seed=0, precision="fp16")
    counted = Profile(spec, graph, Device(COUNTED, "counted", 0), tuple(measurements))
    timed = on_datasheet(counted, SHEET, "fp16")
    return dataclasses.replace(
        timed,
        measurements=tuple(
            dataclasses.replace(
                measurement,
                costs={
                    name: dataclasses.replace(
                        cost,
                        forward_seconds=cost.forward_seconds + sums[measurement.microbatch_size, name][0],
                        backward_seconds=cost.backward_seconds + sums[measurement.microbatch_size, name][1],
                    )
                    for name, cost in measurement.costs.items()
                },
            )
            for measurement in timed.measurements
        ),
    )


def graph_of(row: Row, t: int) -> tuple[Graph, dict[str, str]]:
    """Return the graph of one member, cut only between layers, and the part of ``team_costs`` of every node."""
    value = TensorSpec(("s0", LENGTH, row.width), "float16", requires_grad=True)
    kind_of = {"tokens": "tokens", "positions": "positions"}
    for layer in range(row.layers):
        kind_of |= {f"attention_{layer}": "attention", f"mlp_{layer}": "mlp"}
    kind_of["head"] = "head"
    parts, nodes, parameters, before = team_costs(row, t, 1), [], {}, "text"
    for name, kind in kind_of.items():
        layer = name.rpartition("_")[2]
        path = f"layers.{layer}.{kind}" if layer.isdigit() else name
        own = "tokens.weight" if kind == "head" else f"{path}.weight"
        if kind != "head":
            parameters[own] = TensorSpec((round(parts[kind].parameters),), "float32", requires_grad=True)
        spec = TensorSpec((), "float32", requires_grad=True) if kind == "head" else value
        inputs = (before, "targets") if kind == "head" else (before,)
        node = Node(name, "call_function", kind, inputs, spec, parameters=(own,), module_path=path)
        nodes.append(dataclasses.replace(node, glued=kind in ("positions", "mlp")))
        before = name
    texts = tuple(Input(name, TensorSpec(("s0", LENGTH), "int64")) for name in ("text", "targets"))
    graph = Graph("gpt", texts, (Symbol("s0", "text", 0, 1),), tuple(nodes), ("head",), parameters, {}, {})
    return graph, kind_of
