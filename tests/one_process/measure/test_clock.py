"""How a graph is cut into runs that are timed, and the statistics of repeated times."""

import logging

import pytest

from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.profile import Measurement
from autopipe.ir.tensor import TensorSpec
from autopipe.measure.clock import Times, Windows, repeat
from autopipe.measure.measure import block_of, log_noise, segments


def test_a_block_is_the_outermost_numbered_module():
    assert block_of("model.layers.3.mlp.experts.7.up") == "model.layers.3"
    assert block_of("features.12") == "features.12"
    assert block_of("head") == ""


def chain(paths):
    """Return a chain of one node for each module path."""
    spec, nodes, last = TensorSpec(("s0", 2), "float32", True), [], "x"
    for index, path in enumerate(paths):
        nodes.append(Node(f"n{index}", "call_module", path, (last,), spec, module_path=path))
        last = f"n{index}"
    return Graph("chain", (Input("x", spec),), (Symbol("s0", "x", 0, 2),), tuple(nodes), (last,), {}, {}, {})


def test_runs_cover_all_nodes_and_respect_the_blocks():
    graph = chain(["embed", *(f"blocks.{i}.{part}" for i in range(3) for part in "abcd"), "head"])
    runs = segments(graph, [0.1] + [1.0] * 12 + [0.1], 2.0)
    assert runs == [(0, 1), (1, 3), (3, 5), (5, 7), (7, 9), (9, 11), (11, 13), (13, 14)]


def test_blocks_that_are_too_short_are_joined_whole():
    graph = chain([f"blocks.{i}.{part}" for i in range(4) for part in "ab"])
    assert segments(graph, [1.0] * 8, 3.0) == [(0, 4), (4, 8)]
    assert segments(graph, [1.0] * 8, 100.0) == [(0, 8)]


def test_the_median_and_spread_of_repeated_times():
    times = Times((1.0, 2.0, 3.0, 4.0, 5.0), (1.0,) * 5)
    assert times.medians == (3.0, 1.0)
    assert Times((1.0,) * 3, (1.0,) * 3).spread is None
    assert times.spread == pytest.approx(
        3.0 / 4.0
    )  # the quartiles of the forwards are 1.5 and 4.5, the median is 3 + 1


def test_repetitions_warm_up_once_and_stop_at_the_budget():
    calls = []

    def once():
        calls.append(1)
        return 0.05, 0.05

    assert len(repeat(once, 0.4).forward) == 4 and len(calls) == 5
    assert len(repeat(once, 0.0).forward) == 3
    assert len(repeat(once, 1e9).forward) == 15


def test_a_long_call_is_timed_once():
    calls = iter([(0.2, 0.4)])
    times = repeat(lambda: next(calls), 8.0)
    assert times.medians == (0.2, 0.4) and times.spread is None


def test_the_fastest_window_counts_with_its_own_spread():
    quiet, busy = Times((1.0, 1.0, 1.0, 1.2), (2.0,) * 4), Times((1.5, 1.4, 1.6, 1.9), (3.0, 2.9, 3.1, 3.9))
    windows = Windows(()).with_another(busy).with_another(quiet).with_another(busy)
    assert windows.counting == quiet
    assert windows.spread == quiet.spread != busy.spread


def test_windows_of_few_repetitions_are_judged_together():
    quiet, busy = Times((1.0, 1.0), (2.0, 2.0)), Times((1.5, 1.5), (3.0, 3.0))
    windows = Windows(()).with_another(busy).with_another(quiet)
    assert quiet.spread is None
    assert windows.spread == Times(busy.forward + quiet.forward, busy.backward + quiet.backward).spread
    assert windows.spread > 0.2


def test_a_noisy_machine_is_warned_about(caplog):
    measured = [Measurement(size, {}, spread) for size, spread in ((1, 0.3), (2, 0.05), (4, 0.01))]
    with caplog.at_level(logging.INFO, "autopipe"):
        log_noise(measured, {1: 0.0, 2: 0.8, 4: 0.0})
        log_noise(measured, {1: 0.0, 2: 0.5, 4: 0.0})
        log_noise(measured[2:], {4: 0.0})
    extraordinary, usual = caplog.records
    for text in ("microbatches of 1, 2: the times vary by up to 30 %", "other programs took up to 80 % of the time"):
        assert text in extraordinary.getMessage()
    assert (extraordinary.levelname, usual.levelname) == ("WARNING", "INFO")
