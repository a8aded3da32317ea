"""Axes: which part of a tensor a member has, and which axes may be sharded together."""

import dataclasses

import pytest

from autopipe.ir import artifact
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.teams.axes import (
    ADDED,
    BY_INDEX,
    CROSS_ENTROPY,
    LOOKED_UP,
    SUMS,
    Axis,
    Entry,
    Place,
    Rewrite,
    Segment,
    Sum,
    share,
)
from autopipe.ir.teams.axis_sets import choose, coverage
from autopipe.ir.tensor import TensorSpec


def place(name: str, dimension: int = 0, inner: int = 1, length: int = 0) -> Place:
    return Place(name, dimension, (Segment(length, inner),))


def test_a_fused_projection_gives_each_member_its_heads_of_queries_keys_and_values():
    fused = place("qkv.weight", inner=32)
    assert fused.ranges(384, 4, 0, 2) == ((0, 64), (128, 192), (256, 320))
    assert fused.ranges(384, 4, 1, 2) == ((64, 128), (192, 256), (320, 384))


def test_members_share_out_every_element_once():
    grouped = Place("qkv", 0, (Segment(64, 32), Segment(32, 16), Segment(32, 16)))
    parts = [grouped.ranges(128, 2, member, 2) for member in range(2)]
    assert parts[0] == ((0, 32), (64, 80), (96, 112))
    indices = [index for ranges in parts for start, stop in ranges for index in range(start, stop)]
    assert sorted(indices) == [*range(128)]


def test_adjacent_ranges_are_one():
    assert place("w", inner=1).ranges(8, 8, 1, 2) == ((4, 8),)


@pytest.mark.parametrize("team", [2, 3, 4, 5, 7])
def test_padded_members_share_out_every_element_once(team):
    table = place("table")
    parts = [table.ranges(97, 97, member, team) for member in range(team)]
    assert [index for ((start, stop),) in parts for index in range(start, stop)] == [*range(97)]
    assert {table.local(97, 97, team)} == {-(-97 // team)} == {stop - start for ((start, stop),) in parts[:-1]}
    assert table.whole(table.local(97, 97, team), 97, team) == 97
    assert place("qkv", inner=32).whole(192, 4, 2) == 384


@pytest.mark.parametrize("outer", [Place("w", 0, (Segment(0, 2),)), Place("w", 0, (Segment(9, 1), Segment(9, 1)))])
def test_only_a_complete_dimension_can_be_padded(outer):
    with pytest.raises(ValueError, match=r"'w'"):
        outer.ranges(18, 9, 0, 2)


def test_a_number_that_counts_along_a_padded_axis():
    axis = Axis("a", 97, (place("w"),))
    assert [axis.local(97, 2), axis.local(194, 2), axis.local(97, 4)] == [49, 98, 25]
    assert dataclasses.replace(axis, size=96).local(192, 2) == 96


@pytest.mark.parametrize(("length", "size", "member", "team"), [(8, 4, 0, 3), (9, 4, 0, 2), (8, 4, 2, 2)])
def test_a_dimension_that_does_not_divide_is_refused(length, size, member, team):
    with pytest.raises(ValueError, match=r"'w'"):
        place("w").ranges(length, size, member, team)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (lambda: Axis("a", 1, ()), "at least 2"),
        (lambda: Axis("a", 2, (place("w"), place("w", 1))), "twice"),
        (lambda: Axis("a", 2, (), sums=(Sum("n", ADDED),)), "does not take part"),
        (lambda: Sum("n", "guessed"), "not one of"),
        (lambda: Place("w", 0, ()), "where it carries"),
        (lambda: Place("w", 0, (Segment(0, 1), Segment(4, 1))), "no length"),
    ],
)
def test_a_value_that_cannot_be_is_refused(axis, message):
    with pytest.raises(ValueError, match=message):
        axis()


def chain(*widths: int) -> Graph:
    """Return the graph of a chain of linear layers; layer ``i`` has the weight ``w{i}`` of widths i + 1 and i."""
    spec = TensorSpec(("s0", 4), "float32", requires_grad=True)
    nodes = tuple(
        Node(f"n{i}", "call_function", "linear", (f"n{i - 1}" if i else "x",), spec, parameters=(f"w{i}",))
        for i in range(len(widths) - 1)
    )
    parameters = {f"w{i}": TensorSpec((widths[i + 1], widths[i]), "float32") for i in range(len(widths) - 1)}
    batch, symbol = Input("x", TensorSpec(("s0", 4), "float32")), Symbol("s0", "x", 0, 2)
    return Graph("chain", (batch,), (symbol,), nodes, (nodes[-1].name,), parameters, {}, {})


def between(i: int, size: int) -> Axis:
    """Return the axis between layers i and i + 1 of a chain."""
    return Axis(
        f"a{i}",
        size,
        (place(f"w{i}", 0), place(f"w{i + 1}", 1)),
        values=(place(f"n{i}", 1),),
        sums=(Sum(f"n{i + 1}", ADDED),),
        entries=(Entry(f"n{i - 1}" if i else "x", (f"n{i}",)),),
        nodes=(f"n{i}", f"n{i + 1}"),
    )


def test_no_tensor_and_no_call_is_cut_along_two_axes():
    graph = chain(4, 8, 4, 8, 4)
    axes = [between(i, size) for i, size in enumerate((8, 4, 8))]
    assert [axis.name for axis in choose(graph, axes, 2)] == ["a0", "a2"]


def test_a_set_covers_most_bytes_even_if_the_largest_axis_is_not_in_it():
    graph = chain(10, 10, 12, 10, 10)  # the middle axis is the largest, the two others cover more together
    axes = [between(i, size) for i, size in enumerate((10, 12, 10))]
    assert [axis.name for axis in choose(graph, axes, 2)] == ["a0", "a2"]


def test_only_sizes_that_the_team_divides_are_chosen():
    graph = chain(4, 6, 4)
    assert [axis.name for axis in choose(graph, [between(0, 6)], 3)] == ["a0"]
    assert choose(graph, [between(0, 6)], 4) == ()
    assert choose(graph, [between(0, 6)], 1) == ()


def vocabulary(words: int, how: str = LOOKED_UP) -> tuple[Graph, Axis]:
    """Return a graph that looks a word up and multiplies by the same table, and the axis of the words."""
    ids, row = TensorSpec(("s0",), "int64"), TensorSpec(("s0", 4), "float32", requires_grad=True)
    nodes = (
        Node("row", "call_function", "embedding", ("x",), row, parameters=("w",)),
        Node("logits", "call_function", "linear", ("row",), TensorSpec(("s0", words), "float32"), parameters=("w",)),
        Node("loss", "call_function", "cross_entropy", ("logits", "x"), TensorSpec((), "float32")),
    )
    graph = Graph(
        "tied", (Input("x", ids),), (Symbol("s0", "x", 0, 2),), nodes, ("loss",),
        {"w": TensorSpec((words, 4), "float32")}, {"mask": TensorSpec((words,), "float32")}, {},
    )  # fmt: skip
    axis = Axis(
        f"model/{words}",
        words,
        (place("w"),),
        values=(place("logits", 1),),
        sums=(Sum("row", how), Sum("loss", CROSS_ENTROPY)),
        entries=(Entry("row", ("logits",)),),
        nodes=("row", "logits", "loss"),
    )
    return dataclasses.replace(graph, axes=(axis,)), axis


@pytest.mark.parametrize("how", SUMS)
def test_padding_is_for_sums_that_know_the_size(how):
    graph, axis = vocabulary(97, how)
    assert choose(graph, [axis], 2) == ((axis,) if how in BY_INDEX else ())
    graph, axis = vocabulary(96, how)
    assert choose(graph, [axis], 2) == (axis,)


@pytest.mark.parametrize(
    "change",
    [
        {"draws": ("logits",)},
        {"rewrites": (Rewrite("logits", (1, 1), 0),)},  # computed from the batch
        {"values": (place("logits", 1, inner=2),)},
        {"values": (place("row", 0),)},  # of another length
        {"values": (Place("logits", 1, (Segment(90, 1), Segment(7, 1))),)},
        {"state": (place("of no known shape"),)},
    ],
)
def test_an_axis_that_padding_could_change_stays_whole(change):
    graph, axis = vocabulary(97)
    kept = dataclasses.replace(axis, rewrites=(Rewrite("logits", (1, 1), 97),), state=(place("mask"),))
    assert choose(graph, [kept], 2) == (kept,)
    changed = dataclasses.replace(kept, **change)
    assert choose(graph, [changed], 2) == ()
    graph = dataclasses.replace(graph, axes=(changed,))
    assert coverage(graph, 2).whole == {"a size of 97, which 2 does not divide": 1.0}


@pytest.mark.parametrize("words", [5, 9, 10, 16, 97])
@pytest.mark.parametrize("team", [2, 3, 4, 5, 8])
def test_every_member_has_a_part_of_what_is_padded(words, team):
    graph, axis = vocabulary(words)
    last = words - share(words, team) * (team - 1)
    assert choose(graph, [axis], team) == ((axis,) if last > 0 else ())


def test_an_axis_of_few_bytes_is_left_out_however_deep_the_model_is():
    graph = chain(*(2, 3000) * 200, 2)  # each axis is less than 1 % of the model, and as large as the largest
    axes = [between(2 * i, 3000) for i in range(200)]
    assert len(choose(graph, axes, 2)) == 200
    parameters = {**graph.parameters, "w2": TensorSpec((3000, 2), "float32"), "w1": TensorSpec((2, 4), "float32")}
    small = dataclasses.replace(axes[0], name="small", size=4, parameters=(place("w1", 1),))
    graph = dataclasses.replace(graph, parameters=parameters)
    assert [axis.name for axis in choose(graph, [small, axes[1]], 2)] == ["a2"]


def test_a_parameter_whose_gradient_would_be_summed_for_some_uses_only_excludes_its_axis():
    graph = chain(4, 6, 4)
    axis = dataclasses.replace(between(0, 6), partial=("norm",))
    outside = Node("n2", "call_function", "norm", ("n1",), graph.nodes[0].spec, parameters=("norm",))
    parameters = {**graph.parameters, "norm": TensorSpec((4,), "float32")}
    assert choose(dataclasses.replace(graph, parameters=parameters), [axis], 2) == (axis,)
    graph = dataclasses.replace(graph, nodes=(*graph.nodes, outside), parameters=parameters)
    assert choose(graph, [axis], 2) == ()


def test_axes_are_stored_and_leave_the_digest_as_it_is(tmp_path):
    graph = chain(4, 8, 4)
    axis = dataclasses.replace(between(0, 8), rewrites=(Rewrite("n0", ("size", 2), 8), Rewrite("n1", (1, 0), 8)))
    with_axes = dataclasses.replace(graph, axes=(axis,))
    artifact.save(with_axes, tmp_path / "graph.json")
    assert artifact.load(Graph, tmp_path / "graph.json", renew="") == with_axes
    assert with_axes.digest == graph.digest
