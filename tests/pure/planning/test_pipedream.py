"""PipeDream's profile format, its formulas compared with brute force, and published profiles with its optimizer."""

import itertools
import math
import random

import pytest
from support.pipedream_cases import GOLDEN, TEXT, cut_bytes, golden_case, golden_rows, random_layers, stage_sums

from autopipe.errors import PlanError
from benchmarks.pipedream.file_format import parse_pipedream, read_pipedream
from benchmarks.pipedream.model import Machine, data_parallel_seconds, plan_layers


def test_the_reader_takes_lists_stage_ids_and_edges_indented_by_spaces_and_drops_inputs():
    graph = parse_pipedream(TEXT)
    assert graph.names == ("node2", "node3")
    assert graph.descriptions == ("Conv2d(3, 64, kernel_size=(3, 3))", "LSTM(2, 3)")
    assert graph.forward_seconds == (0.0015, 0.001)
    assert graph.backward_seconds == (0.0025, 0.001)
    assert graph.activation_bytes == (8.0, 9.0)
    assert graph.parameter_bytes == (4.0, 2.0)
    assert graph.edges == ((0, 1),)


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("", "the profile has no nodes", "profile"),
        ("nonsense\n", "neither a node nor an edge: 'nonsense'", "profile:1"),
        (TEXT + "\tnode3 -- node9\n", "an edge names 'node9', which is not a node", "profile:8"),
        (TEXT + TEXT.splitlines()[0], "node 'node2' is listed twice", "profile:8"),
        (TEXT.replace("parameter_size=4.000", "size=4"), "parameter_size is missing", "profile:1"),
        (TEXT.replace("=1.500", "=1.5.0"), "not a number: could not convert", "profile:1"),
        (TEXT.replace("=1.500", "=-1.5"), "a time or size is negative or too large", "profile:1"),
        (TEXT.splitlines()[2], "the profile has only inputs", "profile"),
    ],
)
def test_a_damaged_profile_is_refused_with_its_line(text, message, where):
    with pytest.raises(PlanError) as caught:
        parse_pipedream(text)
    assert caught.value.what.startswith(message)
    assert caught.value.where == where


def test_a_missing_profile_and_a_cycle_are_refused(tmp_path):
    with pytest.raises(PlanError, match=r"absent\.txt cannot be read"):
        read_pipedream(tmp_path / "absent.txt")
    with pytest.raises(PlanError, match="cycle through 'node2'"):
        plan_layers(parse_pipedream(TEXT + "\tnode3 -- node2\n"), Machine((2,), (1e9,)))


def closed(graph, inside):
    return all(a in inside for a, b in graph.edges if b in inside)


def best_by_hand(graph, devices, bandwidth, limit, straight):
    """Try every chain of ideals with every replica count, on devices with one kind of link."""
    everything = frozenset(range(len(graph.names)))
    ideals = [
        frozenset(s)
        for size in range(1, len(everything) + 1)
        for s in itertools.combinations(sorted(everything), size)
        if closed(graph, frozenset(s))
    ]
    best = math.inf

    def follow(inside, left, worst):
        """Place the remaining layers on exactly ``left`` devices."""
        nonlocal best
        if inside == everything:
            best = min(best, worst) if left == 0 else best
            return
        for ideal in ideals:
            for r in range(1, 2 if straight else left + 1):
                if not inside < ideal or worst >= best:
                    continue
                c, p, a = stage_sums(graph, ideal - inside)
                cost = (c + 4 * (r - 1) * p / (r * bandwidth)) / r
                if inside:
                    cost = max(cost, 2 * cut_bytes(graph, inside) / (bandwidth * r))
                    cost = max(cost, 2 * cut_bytes(graph, ideal) / (bandwidth * r))
                if ideal == everything or math.ceil((left - r) / r) * (a + p) <= limit:
                    follow(ideal, left - r, max(worst, cost))

    for total in range(1, devices + 1):
        follow(frozenset(), total, 0.0)
    return best


@pytest.mark.parametrize("block", range(4))
def test_one_level_of_links_is_solved_exactly_over_all_ideals(block):
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(seed)
        graph = random_layers(rng, rng.randrange(2, 7))
        devices, bandwidth = rng.randrange(1, 6), 10 ** rng.uniform(-1, 2)
        limit = rng.choice((math.inf, math.inf, rng.lognormvariate(3, 1)))
        straight = rng.random() < 0.3
        expected = best_by_hand(graph, devices, bandwidth, limit, straight)
        machine = Machine((devices,), (bandwidth,), 0 if limit == math.inf else limit)
        plan = plan_layers(graph, machine, straight=straight)
        assert plan.cost_seconds == pytest.approx(expected, rel=1e-8), seed
        assert sorted(name for stage in plan.stages for name in stage.layers) == sorted(graph.names)
        assert sum(stage.replicas for stage in plan.stages) <= devices


def test_two_levels_of_equal_links_are_never_worse_than_their_nested_formula_allows():
    for seed in range(60):
        rng = random.Random(seed)
        graph = random_layers(rng, rng.randrange(2, 8))
        bandwidth = 10 ** rng.uniform(-1, 2)
        two = plan_layers(graph, Machine((2, 2), (bandwidth * 4, bandwidth)))
        slow = plan_layers(graph, Machine((4,), (bandwidth / 2,)))
        assert two.cost_seconds <= slow.cost_seconds * (1 + 1e-9), seed
        assert two.cost_seconds <= data_parallel_seconds(graph, Machine((2, 2), (bandwidth * 4, bandwidth))) * (
            1 + 1e-9
        )


def golden_plan(row):
    layers, machine, straight = golden_case(row)
    return plan_layers(layers, machine, straight=straight)


@pytest.mark.skipif(not golden_rows(), reason="PipeDream's profiles are not beside the repository")
def test_no_plan_is_worse_than_the_one_of_pipedreams_own_optimizer():
    rounding = 5e-10  # the table has nine decimal places
    lower = 0
    for row in golden_rows():
        cost = golden_plan(row).cost_seconds
        theirs = float(row["pipedream_predicted_s"] or "inf")
        ours_before = float(row["prototype_cost_s"] or "inf")
        assert cost <= theirs * (1 + 1e-8) + rounding, row["case"]
        assert cost <= ours_before * (1 + 1e-8) + rounding, row["case"]
        if ours_before < theirs * 0.999:
            assert cost < theirs * 0.999, row["case"]
            lower += theirs < math.inf
    assert lower >= 14


@pytest.mark.skipif(not golden_rows(), reason="PipeDream's profiles are not beside the repository")
def test_data_parallelism_is_predicted_as_pipedream_does():
    for row in golden_rows():
        if row["predicted_dp_s"]:
            counts = tuple(int(count) for count in row["level_sizes"].split("x"))
            machine = Machine(counts, tuple(float(b) * 1e9 for b in row["bandwidths_GBps"].split("/")))
            graph = read_pipedream(GOLDEN / row["profile"])
            assert data_parallel_seconds(graph, machine) == pytest.approx(float(row["predicted_dp_s"]), abs=6e-10)


def test_blank_lines_of_a_profile_are_skipped():
    assert parse_pipedream(f"\n{TEXT}\n  \n") == parse_pipedream(TEXT)
