"""Replicated stages, both objectives, memory, recompute, unequal devices and links, compared with brute force."""

import dataclasses
import itertools
import math

import pytest
from support.planning_by_hand import block_by_hand, modes_by_hand, units_of
from support.planning_cases import most_workspace, replicated_case, saved_by_hand

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.planning import make_plan

FLUSHES = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble")


def narrowest(cluster, a, b):
    """Return (bandwidth, latency) of the worst level that a message between two ranks may pass."""
    used, size = [], 1
    for level in cluster.levels:
        size *= level.count
        if level.count > 1:
            used.append(level)
        if a // size == b // size:
            break
    used = used or [cluster.levels[0]]
    return min(level.bandwidth for level in used), max(level.latency_seconds for level in used)


class ByHand:
    """The costs of a case, computed directly from the graph."""

    def __init__(self, profile, cluster, options):
        self.profile, self.cluster, self.options = profile, cluster, options
        self.graph, self.cuts = profile.graph, Cuts(profile.graph)
        self.costs, self.sizes = profile.at(4).costs, profile.graph.sizes(4)
        self.edges = (0, *self.cuts.legal, len(self.graph.nodes))
        self.users = {}
        for index, node in enumerate(self.graph.nodes):
            for name in node.parameters:
                self.users.setdefault(name, []).append(index)
        layers = [
            i
            for i, n in enumerate(self.graph.nodes)
            if any(q.startswith("layers.") for q in (*n.parameters, *n.buffers))
        ]
        zero = [
            i
            for i, n in enumerate(self.graph.nodes)
            if any(q.startswith("layers.0.") for q in (*n.parameters, *n.buffers))
        ]
        for name in self.graph.parameters:
            if name not in self.users:
                homes = {"layers.0.spare": zero or layers}.get(name, [])
                self.users[name] = [homes[0] if homes else len(self.graph.nodes) - 1]

    def amounts(self, i, j):
        """Return the sums of a stage of atoms i..j-1, from its nodes."""
        start, stop = self.edges[i], self.edges[j]
        graph, costs = self.graph, self.costs
        last = stop == len(graph.nodes)
        nodes = self.cuts.stage_nodes(start, stop, graph.outputs if last else ())
        names = {node.name for node in nodes}
        byte = {n.name: n.spec.num_bytes(self.sizes) for n in graph.nodes if n.spec is not None}
        back = {n.name: 2 if n.spec is not None and n.spec.requires_grad else 1 for n in graph.nodes}
        work = {n.name: k for k, n in enumerate(graph.nodes) if not n.input_only}
        read = {v for n in nodes for v in n.inputs} | (set(graph.outputs) if last else set())
        received = [v for v in read if v in work and work[v] < start]
        later = {v for n in graph.nodes[stop:] if not n.input_only for v in n.inputs}
        later |= set(graph.outputs) if not last else set()
        sent = [v for v in later if v in work and start <= work[v] < stop]
        size = {name: spec.num_bytes(self.sizes) for name, spec in graph.parameters.items()}
        mine = [name for name, users in self.users.items() if any(start <= u < stop for u in users)]
        trained = [name for name in mine if graph.parameters[name].requires_grad]
        stepped = [name for name in trained if start <= self.users[name][0] < stop]
        tied = [name for name in trained if not all(start <= u < stop for u in self.users[name])]
        buffers = {b for n in nodes for b in (*n.buffers, *n.buffers_written)}
        free = [n for n in nodes if n.input_only and not n.storage]
        assert names
        return {
            "forward": sum(costs[n.name].forward_seconds for n in nodes),
            "backward": sum(costs[n.name].backward_seconds for n in nodes),
            "saved": saved_by_hand(graph, self.cuts, self.profile.at(4), start, stop),
            "kept": sum(byte[v] for v in received)
            + sum(costs[n.name].output_bytes for n in free)
            + (graph.inputs[0].spec.num_bytes(self.sizes) if "x" in read else 0),
            "received": sum(byte[v] * back[v] for v in received),
            "sent": sum(byte[v] * back[v] for v in sent),
            "weights": sum(size[n] for n in mine) + sum(graph.buffers[b].num_bytes(self.sizes) for b in buffers),
            "gradients": sum(size[n] for n in trained),
            "optimizer": self.profile.optimizer_bytes_per_byte * sum(size[n] for n in stepped),
            "largest": self.profile.optimizer_bytes_per_byte * max((size[n] for n in stepped), default=0),
            "workspace": most_workspace(nodes, costs),
            "block": block_by_hand(self.profile, 4, start, stop),
            "tied": sum(size[n] for n in tied),
        }

    def tau(self, x, a, r, d, w):
        """Return tau of a stage with amounts x on ranks a..a+r-1 of each of w groups, d ranks behind in its group."""
        m, options, cluster = self.options.num_microbatches, self.options, self.cluster
        schedule = options.schedule
        depth, share = math.ceil((d + r) / r), math.ceil(m / r / w)
        owned = {
            "gpipe": share,
            "1f1b": min(depth, share),
            "eager-1f1b": min(math.ceil(2 * d / r) + 1, share),
            "zero-bubble": min(math.ceil(options.num_ranks // w / r), share),
        }.get(schedule, depth)
        if schedule == "2bw" and (owned - 1) * r * w > m:
            return math.inf
        versions = {"2bw": 2, "pipedream": 1 + math.ceil((owned - 1) * r * w / m)}.get(schedule, 1)
        speed = min(cluster.device(k).speed for k in range(a, a + r))
        memory = min(cluster.device(k).memory_bytes or math.inf for k in range(a, a + r))
        optimizer = x["optimizer"]
        if options.sharded:
            whole, largest = math.ceil(optimizer), math.ceil(x["largest"])
            optimizer = min(whole, math.ceil(whole / (r * w)) + largest)
        fixed = versions * x["weights"] + x["gradients"] + optimizer + owned * x["kept"]
        crossing, unit, again, last_unit = x["block"]
        by_mode = {
            "never": (0.0, x["workspace"] + owned * x["saved"]),
            "block": (again - (last_unit if owned == 1 else 0.0), unit + owned * crossing),
            "stage": (x["forward"], x["workspace"] + x["saved"]),
        }
        split = self.options.schedule == "zero-bubble"
        modes = modes_by_hand(self.graph, options.recompute, units_of(self.profile, 4), split=split)
        more = next((by_mode[mode][0] for mode in modes if fixed + by_mode[mode][1] <= memory), math.inf)
        if more == math.inf:
            return math.inf
        t = (x["forward"] + x["backward"] + more) / speed
        tied = 0.0
        if a > 0:
            bandwidth, latency = narrowest(cluster, a - 1, a + r - 1)
            t += x["received"] / bandwidth + 2 * latency
            tied = 2 * x["tied"] / bandwidth
        if d > 0:
            bandwidth, latency = narrowest(cluster, a, a + r)
            t += x["sent"] / bandwidth + 2 * latency
            tied = tied if a > 0 else 2 * x["tied"] / bandwidth
        bandwidth, latency = narrowest(cluster, a, a + r - 1)
        ring = 2 * (r - 1) / r * x["gradients"] / bandwidth + 2 * (r - 1) * latency
        if w > 1:
            bandwidth, latency = narrowest(cluster, 0, self.options.num_ranks - 1)
            ring += 2 * (w - 1) / w * x["gradients"] / bandwidth + 2 * (w - 1) * latency
        return t / (r * w) + (ring * (1 + options.sharded) + tied) / m

    def best(self, equal):
        """Return the least objective over all cuts and replica counts."""
        m, ranks = self.options.num_microbatches, self.options.num_ranks
        flush = self.options.schedule in FLUSHES
        n = len(self.edges) - 1
        amounts = {pair: self.amounts(*pair) for pair in itertools.combinations(range(n + 1), 2)}
        top = min(ranks, m) if equal else ranks
        counts = [r for r in range(1, top + 1) if self.options.replica_choices == "any" or r in (1, 2, 4)]
        best = math.inf
        groups = [1]
        if len(self.cluster.levels) == 2 and len(self.cluster.devices) == 1 and ranks > 2:
            groups.append(ranks // 2)  # the inner level holds two
        for w, total in [(g, t) for g in groups for t in (range(1, ranks + 1) if equal else (ranks // g,))]:
            for p in range(1, min(n, total) + 1):
                for replicas in itertools.product(counts, repeat=p):
                    if sum(replicas) != total:
                        continue
                    for cuts in itertools.combinations(range(1, n), p - 1):
                        edges = (0, *cuts, n)
                        taus = []
                        for k in range(p):
                            before, behind = sum(replicas[:k]), sum(replicas[k + 1 :])
                            taus.append(self.tau(amounts[edges[k], edges[k + 1]], before, replicas[k], behind, w))
                        best = min(best, (m - 1) * max(taus) + sum(taus) if flush else max(taus))
        return best


def check(seed, *, sharded=False, state=None):
    """Return the objective of the planner and of brute force, and the plan. ``state``: optimizer bytes per byte."""
    profile, cluster, options = replicated_case(seed)
    options = dataclasses.replace(options, sharded=sharded)
    profile = profile if state is None else dataclasses.replace(profile, optimizer_bytes_per_byte=state)
    equal = len(set(cluster.devices)) == 1 and len([x for x in cluster.levels if x.count > 1]) <= 1
    expected = ByHand(profile, cluster, options).best(equal)
    m = options.num_microbatches
    try:
        plan = make_plan(profile, cluster, options)
    except PlanError:
        return math.inf, expected, None
    trained = {n for n, spec in profile.graph.parameters.items() if spec.requires_grad}
    users = {n: next(k for k, s in enumerate(plan.stages) if n in s.parameters) for n in trained}
    owned = [
        sum(profile.graph.parameters[n].num_bytes({}) for n, k in users.items() if k == s.index) for s in plan.stages
    ]
    speeds = [min(cluster.device(rank).speed for rank in s.ranks) * plan.sharing(s) for s in plan.stages]
    step = max(size / speed for size, speed in zip(owned, speeds, strict=True)) * profile.optimizer_seconds_per_byte
    if options.schedule in FLUSHES:
        return plan.predicted.step_seconds - step, expected, plan
    assert plan.predicted.step_seconds == pytest.approx(m * plan.predicted.bottleneck_seconds + step)
    return plan.predicted.bottleneck_seconds, expected, plan


@pytest.mark.parametrize("block", range(12))
def test_no_replicated_plan_is_better_than_the_planners(block):
    for seed in range(block * 100, block * 100 + 100):
        actual, expected, plan = check(seed)
        assert actual == pytest.approx(expected, rel=1e-8), seed
        if plan is not None:
            _, cluster, _ = replicated_case(seed)
            for stage in plan.stages:
                limits = [cluster.device(rank).memory_bytes for rank in stage.ranks]
                assert not any(limits) or stage.peak_bytes <= min(limits) + 1


def test_no_plan_with_a_divided_optimizer_state_is_better_than_the_planners():
    gains = 0
    for seed in range(300):
        actual, expected, plan = check(seed, sharded=True, state=6.0)
        assert actual == pytest.approx(expected, rel=1e-8), seed
        if plan is not None and any(stage.replicas > 1 for stage in plan.stages):
            assert plan.shard_optimizer
            gains += actual < check(seed, state=6.0)[0] * (1 - 1e-6)
    assert gains >= 5


def test_the_random_cases_cover_replicas_branches_recompute_and_refusals():
    seen = dict.fromkeys(("replicated", "pipeline", "recompute", "block", "skip", "refused", "data parallel"), 0)
    for seed in range(600):
        profile, cluster, options = replicated_case(seed)
        try:
            plan = make_plan(profile, cluster, options)
        except PlanError:
            seen["refused"] += 1
            continue
        seen["replicated"] += any(s.replicas > 1 for s in plan.stages) and len(plan.stages) > 1
        seen["pipeline"] += len(plan.stages) > 1
        seen["recompute"] += any(s.recompute == "stage" for s in plan.stages) and options.recompute == "auto"
        seen["block"] += any(s.recompute == "block" for s in plan.stages) and options.recompute == "auto"
        seen["skip"] += any(b.consumers != (b.producer + 1,) for b in plan.boundaries)
        seen["data parallel"] += len(plan.stages) == 1 and plan.num_ranks > 1
    assert min(seen.values()) >= 5, seen


def test_nested_placement_keeps_a_microbatch_in_one_group():
    seen = 0
    for seed in range(1000):
        profile, cluster, options = replicated_case(seed)
        try:
            plan = make_plan(profile, cluster, options)
        except PlanError:
            continue
        if len(plan.stages) > 1 and any(
            stage.ranks != tuple(range(stage.ranks[0], stage.ranks[-1] + 1)) for stage in plan.stages
        ):
            seen += 1
            for microbatch in range(12):
                nodes = {stage.ranks[microbatch % stage.replicas] // 2 for stage in plan.stages}
                assert len(nodes) == 1
    assert seen >= 4
