"""Random graphs with skips, views, in-place changes, glued and input-only nodes; a brute force that shares no code."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile, WorkloadSpec
from autopipe.ir.tensor import TensorSpec
from autopipe.planning import PlanOptions
from autopipe.schedules import REGISTRY
from support.planning_by_hand import block_by_hand, modes_by_hand, units_of

CLUSTER_FILE = """\
source = "datasheet"
[device]
name = "V100-16GB"
memory = "16GiB"
speed = 1.0
[[level]]
name = "node"
count = 4
bandwidth = "10GB/s"
latency = "5us"
[[level]]
name = "cluster"
count = 4
bandwidth = "1.25GB/s"
latency = "20us"
"""


def random_graph(rng: random.Random, num_nodes: int) -> Graph:
    """Return a random graph: values are read by later nodes, and the last node is the loss."""
    nodes: list[Node] = []
    parameters: dict[str, TensorSpec] = {}
    buffers: dict[str, TensorSpec] = {}
    for index in range(num_nodes):
        earlier = [node.name for node in nodes]
        work = [node.name for node in nodes if not node.input_only]
        last = index == num_nodes - 1
        free = not last and index > 0 and rng.random() < 0.2
        pool = ["x", *(node.name for node in nodes if node.input_only)] if free else earlier
        inputs = list(dict.fromkeys(rng.sample(pool, min(len(pool), rng.choice((0, 1, 1, 2)))))) if pool else []
        if not free and work and work[-1] not in inputs and (last or rng.random() < 0.9):
            inputs.append(work[-1])
        if not inputs:
            inputs = ["x"]
        own = []
        if not free and rng.random() < 0.6:
            own = [f"layers.{index}.weight"]
            parameters[own[0]] = TensorSpec((rng.randrange(1, 400),), "float32", rng.random() < 0.85)
        if not free and parameters and rng.random() < 0.15:
            own.append(rng.choice(list(parameters)))
        node_buffers = []
        if not free and rng.random() < 0.2:
            node_buffers = [f"layers.{index}.mean"]
            buffers[node_buffers[0]] = TensorSpec((rng.randrange(1, 50),), "float32")
        mutates = (inputs[-1],) if inputs[-1] != "x" and (inputs[-1] in work) != free and rng.random() < 0.1 else ()
        spec = TensorSpec(("s0", rng.randrange(1, 60)), "float32", not free and rng.random() < 0.8)
        nodes.append(
            Node(
                name=f"n{index}",
                kind="call_function",
                target="f",
                inputs=tuple(inputs),
                after=tuple(node.name for node in nodes if node.input_only and set(node.mutates) & set(inputs)),
                spec=None if not last and rng.random() < 0.06 else spec,
                parameters=tuple(dict.fromkeys(own)),
                buffers=tuple(node_buffers),
                buffers_written=tuple(node_buffers) if rng.random() < 0.5 else (),
                mutates=mutates,
                storage=inputs[-1] if mutates or (inputs[-1] != "x" and rng.random() < 0.08) else "",
                input_only=free,
                glued=index > 0 and rng.random() < 0.06,
            )
        )
    other = random.Random(num_nodes + len(parameters) + len(buffers))  # so that the rest of the cases stays the same
    if other.random() < 0.3:  # some of the nodes are in calls of checkpoint()
        nodes = [dataclasses.replace(n, checkpoint=k // 3 + 1 if k % 4 < 3 else 0) for k, n in enumerate(nodes)]
    if rng.random() < 0.3:
        parameters["unused.weight"] = TensorSpec((rng.randrange(1, 99),), "float32", True)
    if rng.random() < 0.3:
        parameters["layers.0.spare"] = TensorSpec((rng.randrange(1, 99),), "float32", True)
    return Graph(
        name="random",
        inputs=(Input("x", TensorSpec(("s0", 3), "float32")),),
        symbols=(Symbol("s0", "x", 0, 4),),
        nodes=tuple(nodes),
        outputs=(nodes[-1].name,),
        parameters=parameters,
        buffers=buffers,
        aliases={},
    )


def profile_of(graph: Graph, rng: random.Random, sizes: tuple[int, ...] = (4,)) -> Profile:
    """Return random costs, linear in the microbatch size; views and input-only nodes save nothing."""
    base = {
        node.name: (rng.lognormvariate(-7, 0.8), 0.0 if node.input_only else rng.lognormvariate(-6.5, 0.8))
        for node in graph.nodes
    }
    saved = {node.name: 0 if node.input_only or node.storage else rng.randrange(0, 4000) for node in graph.nodes}
    other = random.Random(len(graph.nodes))  # a separate generator, so that the cases stay the same
    work = [node.name for node in graph.nodes if not node.input_only]
    keepers = {}
    for value in ("x", *(node.name for node in graph.nodes)):
        later = [name for name in work if graph.position[name] >= graph.position.get(value, 0)]
        if later and other.random() < 0.6:
            keepers[value] = other.choice(later[:5])
    measurements = tuple(
        Measurement(
            size,
            {
                name: NodeCost(
                    f * size / 4,
                    b * size / 4,
                    rng.randrange(1, 2000) * size // 4,
                    saved[name] * size // 4,
                    other.randrange(4000) * size // 4,
                )
                for name, (f, b) in base.items()
            },
            keepers=keepers,
        )
        for size in sizes
    )
    workload = WorkloadSpec("model.py", arguments={}, hooks={}, inputs=(), seed=0)
    return Profile(workload, graph, Device("cpu", "test", 0), measurements, 1e-9, rng.choice((0.0, 1.0, 2.0)))


def cluster_of(rng: random.Random, num_ranks: int, memory: int = 0, *, mixed: bool = False) -> Cluster:
    """Return a cluster of one or two levels."""
    bandwidth = 10 ** rng.uniform(5, 8)
    levels: tuple[Level, ...] = (Level("node", num_ranks, bandwidth, 1e-6),)
    if num_ranks % 2 == 0 and rng.random() < 0.5:
        levels = (Level("node", 2, bandwidth, 1e-6), Level("net", num_ranks // 2, bandwidth / 7, 1e-5))
    devices: tuple[ClusterDevice, ...] = (ClusterDevice("device", memory, 1.0),)
    if mixed:
        devices = tuple(
            ClusterDevice(f"device{r}", int(memory * rng.uniform(0.6, 1.5)), rng.choice((0.5, 1.0, 2.0)))
            for r in range(num_ranks)
        )
    return Cluster(levels, devices, "test")


# "never" and "always" of a case, divided into more settings without another draw
RECOMPUTE_OF = {"auto": ("auto",) * 3, "never": ("never",) * 3, "always": ("always", "stage", "always")}


def replicated_case(seed):
    """Return the profile, cluster and options of a random case with replicas."""
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randrange(3, 10))
    profile = profile_of(graph, rng)
    ranks = rng.choice((1, 2, 3, 4, 4, 5, 6))
    m = rng.choice((2, 4, 5, 8, 12))
    memory = rng.choice((0, rng.randrange(4000, 60000)))
    cluster = cluster_of(rng, ranks, memory, mixed=rng.random() < 0.3)
    name = rng.choice(("gpipe", "1f1b", "2bw", "pipedream", "eager-1f1b", "zero-bubble"))
    options = PlanOptions(
        num_ranks=ranks,
        batch_size=4 * m,
        num_microbatches=m,
        schedule=name,
        kind=dataclasses.replace(REGISTRY[name], replicas=True, equal_replicas=False, check=lambda request: None),
        recompute=RECOMPUTE_OF[rng.choice(("auto", "auto", "never", "always"))][seed % 3],
        may_replicate=True,
        replica_choices=rng.choice(("any", "any", "powers")),
    )
    return profile, cluster, options


def stage_by_hand(profile, cluster, positions, k, m, size, in_flight, versions):
    """Return (seconds, peak) of a stage for every recompute mode, counted naively."""
    graph, cuts, costs = profile.graph, Cuts(profile.graph), profile.at(size).costs
    sizes = graph.sizes(size)
    edges = [0, *positions, len(graph.nodes)]
    last = k == len(edges) - 2
    nodes = cuts.stage_nodes(edges[k], edges[k + 1], graph.outputs if last else ())
    boundaries = cuts.boundaries(positions)
    traffic = {value: cuts.spec(value).num_bytes(sizes) for value, _, _ in boundaries}
    both = {value: size * (2 if cuts.spec(value).requires_grad else 1) for value, size in traffic.items()}
    received = [value for value, _, consumers in boundaries if k in consumers]
    sent = [value for value, producer, _ in boundaries if producer == k]
    stage_parameters = []
    for s in range(len(edges) - 1):
        held_nodes = cuts.stage_nodes(edges[s], edges[s + 1])
        names = {name for node in held_nodes for name in node.parameters}
        stage_parameters.append(names)
    read = set().union(*stage_parameters)
    for name in graph.parameters:
        if name not in read:
            first = [
                i
                for i, node in enumerate(graph.nodes)
                if name.startswith("layers.0.")
                and any(q.startswith("layers.0.") for q in (*node.parameters, *node.buffers))
            ]
            shared = [
                i
                for i, node in enumerate(graph.nodes)
                if name.startswith("layers.")
                and any(q.startswith("layers.") for q in (*node.parameters, *node.buffers))
            ]
            home = (first or shared or [len(graph.nodes) - 1])[0]
            stage_parameters[next(s for s in range(len(edges) - 1) if edges[s] <= home < edges[s + 1])].add(name)
    mine = stage_parameters[k]
    byte = {name: spec.num_bytes(sizes) for name, spec in graph.parameters.items()}
    trained = [name for name in mine if graph.parameters[name].requires_grad]
    stepped = [name for name in trained if not any(name in stage_parameters[s] for s in range(k))]
    tied = [name for name in trained if any(name in stage_parameters[s] for s in range(len(edges) - 1) if s != k)]
    buffers = {name for node in nodes for name in (*node.buffers, *node.buffers_written)}
    state = versions * (sum(byte[n] for n in mine) + sum(graph.buffers[n].num_bytes(sizes) for n in buffers))
    state += sum(byte[n] for n in trained) + profile.optimizer_bytes_per_byte * sum(byte[n] for n in stepped)
    leaf = any("x" in node.inputs for node in nodes)
    kept = sum(traffic[v] for v in received) + (graph.inputs[0].spec.num_bytes(sizes) if leaf else 0)
    kept += sum(costs[node.name].output_bytes for node in nodes if node.input_only and not node.storage)
    saved = saved_by_hand(graph, cuts, profile.at(size), edges[k], edges[k + 1])
    workspace = most_workspace(nodes, costs)
    forward = sum(costs[node.name].forward_seconds for node in nodes)
    seconds = (forward + sum(costs[node.name].backward_seconds for node in nodes)) / cluster.device(k).speed
    charged = False
    for other, names in ((k - 1, received), (k + 1, sent)):
        if 0 <= other < len(edges) - 1:
            link = cluster.link(k, other)
            seconds += sum(both[v] for v in names) / link.bandwidth + 2 * link.latency_seconds
            if not charged:
                seconds += 2 * sum(byte[n] for n in tied) / m / link.bandwidth
                charged = True
    crossing, unit, again, last_unit = block_by_hand(profile, size, edges[k], edges[k + 1])
    again -= last_unit if in_flight == 1 else 0.0
    speed = cluster.device(k).speed
    return {
        "never": (seconds, state + workspace + in_flight * (kept + saved)),
        "block": (seconds + again / speed, state + unit + in_flight * (kept + crossing)),
        "stage": (seconds + forward / speed, state + workspace + in_flight * kept + saved),
    }


def saved_by_hand(graph, cuts, measurement, start, stop):
    """Return the bytes that a stage saves of a microbatch, without shared ones, from a list of saved values."""
    sizes, costs = graph.sizes(measurement.microbatch_size), measurement.costs
    by_name_ = {node.name: node for node in graph.nodes}

    def base(value):
        while value in by_name_ and by_name_[value].storage:
            value = by_name_[value].storage
        return value

    def size(value):
        if value not in by_name_:
            return graph.inputs[0].spec.num_bytes(sizes)
        if by_name_[value].input_only:
            return 0 if by_name_[value].storage else costs[value].output_bytes
        return 0 if by_name_[value].spec is None else by_name_[value].spec.num_bytes(sizes)

    own = {node.name for node in graph.nodes[start:stop] if not node.input_only}
    saved = sum(costs[name].saved_bytes for name in own)
    there = cuts.stage_nodes(start, stop, graph.outputs if stop == len(graph.nodes) else ())
    read = {value for node in there for value in (*node.inputs, *node.after)}
    if stop == len(graph.nodes):
        read |= set(graph.outputs)
    kept = {}
    for value, keeper in measurement.keepers.items():
        kept.setdefault(base(value), []).append(graph.position[keeper])
    for memory in {base(value) for value in read - own} - own:
        if start <= min(kept.get(memory, [-1])) < stop:
            saved -= size(memory)
    sent = own & {value for value, _, _ in cuts.boundaries([stop] if stop < len(graph.nodes) else [])}
    for memory in {base(value) for value in sent if by_name_[value].spec.requires_grad} & own:
        if min(kept.get(memory, [stop])) >= stop:
            saved += size(memory)
    return max(saved, 0)


def most_workspace(nodes, costs):
    """Return the largest workspace of a backward, from a list of its moments."""
    kept = [node for node in nodes if not node.input_only]
    behind = [sum(costs[after.name].saved_bytes for after in kept[place + 1 :]) for place in range(len(kept))]
    return max([0, *(costs[n.name].workspace_bytes - freed for n, freed in zip(kept, behind, strict=True))])


def brute_force_straight(profile, cluster, num_ranks, m, size, needs_all, recompute):
    """Return the smallest bottleneck over all legal cuts, infinite if nothing fits."""
    best = math.inf
    for positions in itertools.combinations(Cuts(profile.graph).legal, num_ranks - 1):
        worst = 0.0
        for k in range(num_ranks):
            in_flight = m if needs_all else min(m, num_ranks - k)
            by_mode = stage_by_hand(profile, cluster, positions, k, m, size, in_flight, 1)
            limit = cluster.device(k).memory_bytes or math.inf
            modes = modes_by_hand(profile.graph, recompute, units_of(profile, size))
            worst = max(worst, next((by_mode[mode][0] for mode in modes if by_mode[mode][1] <= limit), math.inf))
        best = min(best, worst)
    return best


GIB = 2**30


def chain(num_layers=4, *, saved=GIB, weight=GIB // 4, output=GIB // 16):
    """Return a profile of equal layers: each saves and holds this many bytes per sample."""
    nodes = tuple(
        Node(
            f"layer{k}",
            "call_function",
            "f",
            (f"layer{k - 1}",) if k else ("x",),
            TensorSpec(("s0", output // 4), "float32", True),
            parameters=(f"layer{k}.weight",),
        )
        for k in range(num_layers)
    )
    graph = Graph(
        "chain.py",
        (Input("x", TensorSpec(("s0",), "float32")),),
        (Symbol("s0", "x", 0, 2),),
        nodes,
        (nodes[-1].name,),
        {f"layer{k}.weight": TensorSpec((weight // 4,), "float32", True) for k in range(num_layers)},
        {},
        {},
    )
    measurements = tuple(
        Measurement(b, {node.name: NodeCost(0.01 * b, 0.02 * b, output * b, saved * b) for node in nodes})
        for b in (1, 2, 4, 8)
    )
    return Profile(
        WorkloadSpec("chain.py", arguments={}, hooks={}, inputs=(), seed=0),
        graph,
        Device("cpu", "cpu", 0),
        measurements,
    )


def machine(num_ranks, memory_gib=0.0):
    return Cluster((Level("host", num_ranks, 1e10, 0.0),), (ClusterDevice("V100", int(memory_gib * GIB)),), "test")


def by_name(result):
    return {contender.name: contender for contender in result.contenders}


def even_profile(num_layers=8, seconds=1e-3, *, skips=False):
    """Return layers of equal cost with a thousand floats per sample between them. ``skips``: each reads two others."""
    nodes = tuple(
        Node(
            f"n{i}",
            "call_function",
            "f",
            tuple(f"n{k}" for k in range(max(i - 1 - skips, 0), i)) or ("x",),
            TensorSpec(("s0", 1000), "float32", True),
            parameters=(f"layers.{i}.weight",),
        )
        for i in range(num_layers)
    )
    graph = Graph(
        name="even",
        inputs=(Input("x", TensorSpec(("s0", 3), "float32")),),
        symbols=(Symbol("s0", "x", 0, 4),),
        nodes=nodes,
        outputs=(nodes[-1].name,),
        parameters={f"layers.{i}.weight": TensorSpec((1000,), "float32", True) for i in range(num_layers)},
        buffers={},
        aliases={},
    )
    costs = {node.name: NodeCost(seconds, 2 * seconds, 0, 0, 0) for node in nodes}
    workload = WorkloadSpec("model.py", arguments={}, hooks={}, inputs=(), seed=0)
    return Profile(workload, graph, Device("cpu", "test", 0), (Measurement(4, costs),), 1e-9, 1.0)
