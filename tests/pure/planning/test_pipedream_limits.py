"""Limits of planning with PipeDream's formulas: wide graphs, zero times, little memory, unusual links and options."""

import dataclasses
import math
import random

import pytest
from support.pipedream_cases import cut_bytes, random_layers, stage_sums

from autopipe.cli.main import autopipe
from autopipe.errors import PlanError
from autopipe.planning.pipedream import model as pipedream_model
from autopipe.planning.pipedream.file_format import LayerGraph
from autopipe.planning.pipedream.model import Machine, plan_layers
from autopipe.planning.pipedream.states import Dag

LINE = "node{} -- Conv -- forward_compute_time={}, backward_compute_time={}, activation_size=4e6, parameter_size=4e6\n"


def layers(count, edges, seconds=1.0, bytes_each=1.0):
    """Return equal layers."""
    names = tuple(f"node{k}" for k in range(count))
    times, sizes = (seconds,) * count, (bytes_each,) * count
    return LayerGraph(names, ("layer",) * count, times, times, sizes, sizes, tuple(edges))


def chain(count):
    return layers(count, [(k, k + 1) for k in range(count - 1)])


def parallel_layers(width):
    """Return a source, ``width`` parallel layers, and a sink."""
    edges = [edge for k in range(1, width + 1) for edge in ((0, k), (k, width + 1))]
    return layers(width + 2, edges)


def branches(length):
    """Return two branches of ``length`` layers between a source and a sink."""
    end = 2 * length + 1
    edges = [(0, 1), (0, length + 1), (length, end), (2 * length, end)]
    edges += [(k, k + 1) for k in range(1, 2 * length) if k != length]
    return layers(end + 1, edges)


@pytest.mark.parametrize("width", [3, 14])
def test_a_graph_has_an_ideal_for_every_subset_of_parallel_layers(width):
    dag = Dag(parallel_layers(width))
    count = 2**width + 2
    assert dag.least_ideals() == count
    assert len(dag.ideals(dag.order(deep=True), count)) == len(set(dag.ideals(dag.order(deep=True), count))) == count
    assert dag.ideals(dag.order(deep=True), count - 1) is None


def test_a_wide_graph_is_refused_before_its_ideals_are_built():
    dag = Dag(parallel_layers(300))
    assert dag.least_ideals() > 2**300
    # only the width is read: an invalid order would fail
    assert dag.ideals((), 20_000) is None


def test_a_long_graph_is_refused_at_the_limit_of_ideals():
    dag = Dag(branches(150))
    assert dag.least_ideals() < 1000
    assert dag.ideals(dag.order(deep=True), 1000) is None
    assert len(dag.ideals(dag.order(deep=True), 151 * 151 + 2)) == 151 * 151 + 2


def test_two_thousand_parallel_layers_are_planned_in_linear_orders():
    plan = plan_layers(parallel_layers(1998), Machine((4,), (1e9,)))
    assert "order" in plan.space
    assert sum(len(stage.layers) for stage in plan.stages) == 2000


def test_ideals_with_too_many_nested_pairs_are_not_searched_as_a_lattice():
    dag = Dag(branches(3))
    order = dag.order(deep=True)
    ideals = dag.ideals(order, 100)
    pairs = sum(a & ~b == 0 and a != b for a in ideals for b in ideals)
    states = dag.lattice_states(order, ideals, pairs)
    memory = [
        (i, int(j)) for i in range(states.count) for j in states.supersets[states.pointers[i] : states.pointers[i + 1]]
    ]
    assert memory == [(i, j) for i, a in enumerate(ideals) for j, b in enumerate(ideals) if a & ~b == 0 and i != j]
    assert dag.lattice_states(order, ideals, pairs - 1) is None


@pytest.mark.parametrize("counts", [(1,), (2,), (2, 2)])
@pytest.mark.parametrize("edges", [[(0, 1), (1, 2)], [(0, 1), (0, 2)]])
def test_a_profile_without_any_time_is_refused(counts, edges):
    with pytest.raises(PlanError, match="no layer of the profile takes any time") as caught:
        plan_layers(layers(3, edges, seconds=0.0), Machine(counts, (1e9,) * len(counts)))
    assert caught.value.where == "forward_compute_time and backward_compute_time of 3 layers"
    assert "--cost-model autopipe" in caught.value.remedy


def test_a_nested_search_stops_at_its_limit(monkeypatch):
    graph, machine = chain(60), Machine((4, 4), (1e10, 1e9))
    search = pipedream_model._Search(graph, machine, straight=False)
    (states,) = search.spaces()
    # every triple of states with every pair of group counts would be 64 million times 16
    monkeypatch.setattr(pipedream_model, "MOST_NESTED_STEPS", 100_000_000)
    assert search.nested(states, math.inf)[1]
    monkeypatch.setattr(pipedream_model, "MOST_NESTED_STEPS", 10)
    assert search.nested(states, math.inf) == (None, False)
    assert plan_layers(graph, machine).space.startswith("contiguous")


def test_one_heavy_layer_in_a_long_chain_is_nested_in_few_steps(monkeypatch):
    graph = chain(400)
    graph = dataclasses.replace(graph, forward_seconds=(9 * 400.0, *graph.forward_seconds[1:]))
    search = pipedream_model._Search(graph, Machine((4, 4), (1e10, 1e9)), straight=False)
    (states,) = search.spaces()
    # every triple of states with every pair of group counts would be 64 million times 16
    monkeypatch.setattr(pipedream_model, "MOST_NESTED_STEPS", 100_000_000)
    assert search.nested(states, math.inf)[1]


def best_of_chain(graph, limit, straight):
    """Return the best contiguous placement of a chain on 2 x 2 ranks with equal links, as the ranks used."""
    n, bandwidth, best = len(graph.names), 1.0, math.inf

    def members(a, r):
        groups = [len([x for x in range(a, a + r) if x // 2 == group]) for group in (0, 1)]
        return max(groups), sum(size > 0 for size in groups)

    def stage(i, j, a, r):
        c, p, _ = stage_sums(graph, range(i, j))
        inner, outer = members(a, r)
        cost = (c + 4 * p / bandwidth * ((inner - 1) / inner + (outer - 1) / outer)) / r
        for cut, other in ((i, a - 1), (j, a + r)):
            if i > 0 and 0 < cut < n:
                same = len({x // 2 for x in (*range(a, a + r), other)}) == 1
                # the other side of the cut may reach further; then the next stage or the one before says so
                message = 2 * cut_bytes(graph, frozenset(range(cut))) / bandwidth
                cost = max(cost, message / (r if same else outer))
        return cost

    def follow(i, a, total, worst):
        nonlocal best
        if i == n:
            best = min(best, worst) if a == total else best
            return
        for j in range(i + 1, n + 1):
            for r in range(1, 2 if straight else total - a + 1):
                behind = total - a - r
                if behind < 0 or (j < n and math.ceil(behind / r) * sum(stage_sums(graph, range(i, j))[1:]) > limit):
                    continue
                follow(j, a + r, total, max(worst, stage(i, j, a, r)))

    for total in range(1, 5):
        follow(0, 0, total, 0.0)
    return best


def test_a_memory_limit_counts_used_devices_only():
    for seed in range(40):
        rng = random.Random(seed)
        graph = dataclasses.replace(random_layers(rng, rng.randrange(2, 6)))
        n = len(graph.names)
        graph = dataclasses.replace(graph, edges=tuple((k, k + 1) for k in range(n - 1)), activation_bytes=(0.1,) * n)
        limit = rng.lognormvariate(2, 1)
        plan = plan_layers(graph, Machine((2, 2), (1.0, 1.0), limit), straight=True)
        assert plan.cost_seconds == pytest.approx(best_of_chain(graph, limit, True), rel=1e-8), seed


def test_faster_outer_links_do_not_speed_up_the_links_of_a_node():
    graph = dataclasses.replace(chain(3), activation_bytes=(4.0,) * 3, parameter_bytes=(100.0,) * 3)
    one = plan_layers(graph, Machine((4,), (1.0,)), straight=True)
    two = plan_layers(graph, Machine((4, 2), (1.0, 4.0)), straight=True)
    graph = dataclasses.replace(graph, activation_bytes=(2.0,) * 3)
    wide = plan_layers(graph, Machine((1, 4), (1.0, 4.0)), straight=True)
    assert one.cost_seconds == two.cost_seconds == 6.0
    assert wide.cost_seconds == 2.0


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return a function that runs `plan --from-pipedream` on two layers and returns exit code and output."""
    monkeypatch.chdir(tmp_path)

    def plan(*args, milliseconds=10.0):
        text = "".join(LINE.format(k, milliseconds, milliseconds) for k in (1, 2))
        (tmp_path / "graph.txt").write_text(text + "\tnode1 -- node2\n")
        with pytest.raises(SystemExit) as ended:
            run(["plan", "--from-pipedream", "graph.txt", "--gpus", "2", *args])
        return ended.value.code

    def run(args):
        from autopipe.cli.failures import guarded
        from autopipe.cli.terminal import Terminal

        terminal = Terminal()
        guarded(lambda: autopipe.main(args, obj=terminal, standalone_mode=False), terminal)
        raise SystemExit(0)

    return plan


def test_a_profile_without_any_time_is_refused_on_the_command_line(plan, capsys):
    assert plan("--cost-model", "pipedream", milliseconds=0.0) == 1
    shown = capsys.readouterr().err
    assert "no layer of the profile takes any time" in shown
    assert "bug" not in shown


def test_a_stage_that_is_larger_than_the_memory_is_named(plan, capsys):
    assert plan("--cost-model", "pipedream", "--gpu-memory", "1KiB") == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "parameters and activations of stage 0 (15.3 MiB) alone exceed the 1.00 KiB" in shown
    assert plan("--cost-model", "pipedream", "--gpu-memory", "1GiB") == 0
    assert "exceed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (("--device-name", "H100"), "--device-name would have no effect with --from-pipedream"),
        (("--lr", "0.1", "--device", "cpu"), "--lr, --device would have no effect"),
        (("--cost-model", "pipedream", "--explain"), "--explain would have no effect with --cost-model pipedream"),
        (("--cost-model", "pipedream", "--schedule", "gpipe"), "--schedule would have no effect"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(plan, capsys, args, shown):
    assert plan(*args) == 2
    assert shown in " ".join(capsys.readouterr().err.split())


def test_a_settings_file_may_hold_options_of_other_commands(plan, capsys, tmp_path):
    (tmp_path / "autopipe.toml").write_text('lr = 0.1\nschedule = "gpipe"\n')
    assert plan("--cost-model", "pipedream", "-q") == 0


@pytest.mark.parametrize(
    ("counts", "bandwidths", "message"),
    [
        ((), (), "a machine needs a count of at least 1 and a bandwidth for every link level"),
        ((2,), (1.0, 1.0), "a machine needs a count of at least 1 and a bandwidth for every link level"),
        ((0,), (1.0,), "a machine needs a count of at least 1 and a bandwidth for every link level"),
        ((2,), (0.0,), "bandwidths must be larger than 0"),
    ],
)
def test_an_impossible_machine_is_refused(counts, bandwidths, message):
    with pytest.raises(PlanError, match=message):
        Machine(counts, bandwidths)


def test_a_machine_of_one_device_has_one_stage():
    plan = plan_layers(chain(3), Machine((1, 1), (1e9, 1e9)))
    assert plan.configuration == "1"


def test_linear_orders_of_few_ideals_are_searched_together(monkeypatch):
    monkeypatch.setattr(pipedream_model, "MOST_IDEALS", 5)
    graph = parallel_layers(6)
    plan = plan_layers(graph, Machine((3,), (1e9,)))
    monkeypatch.undo()
    assert plan.cost_seconds >= plan_layers(graph, Machine((3,), (1e9,))).cost_seconds
    assert {name for stage in plan.stages for name in stage.layers} == set(graph.names)


def test_a_cycle_is_refused():
    with pytest.raises(PlanError, match="the profile's graph has a cycle through 'node0'"):
        Dag(layers(2, [(0, 1), (1, 0)])).order(deep=True)
