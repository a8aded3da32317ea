"""DimensionFactors: views of one tensor agree on which elements a member has."""

import math
import random

import pytest
import torch

from autopipe.ir.teams.axes import Place, Segment
from autopipe.trace.axes.dimension_factors import DimensionFactors, NoRuleError
from autopipe.trace.axes.shapes import reshaped
from autopipe.trace.axes.sums_over_members import cut, joined


def elements(leaves, tensor, dims, leaf, member):
    """Return the elements that member ``member`` of 2 has, or None if no dimension carries the leaf."""
    for at, dimension in enumerate(dims):
        places, hidden = leaves.carried(dimension)
        if leaf in places and leaf not in hidden:
            part = cut(tensor, Place("x", at, places[leaf]), leaves.size[leaf], member, 2)
            return set(part.flatten().tolist())
    return None


def factored(length, choose):
    """Return random factors of a number."""
    factors = []
    while length > 1:
        factors.append(choose.choice([k for k in range(2, length + 1) if length % k == 0]))
        length //= factors[-1]
    return factors


def test_random_views_of_a_tensor_agree_on_the_elements_of_a_member():
    choose, num_compared = random.Random(0), 0
    for _ in range(300):
        leaves = DimensionFactors()
        shape = [choose.choice([1, 2, 3, 4, 6, 8]) for _ in range(3)]
        first = tensor = torch.arange(math.prod(shape)).reshape(shape)
        base = dims = leaves.fresh(shape)
        for _ in range(4):
            order = choose.sample(range(len(dims)), len(dims))
            tensor, dims = tensor.permute(order), [dims[at] for at in order]
            sizes = factored(tensor.numel(), choose)
            try:
                dims = reshaped(leaves, dims, tuple(sizes))
            except NoRuleError:
                break
            tensor = tensor.reshape(sizes)
            assert [leaves.length(leaves.flat(dimension)) for dimension in dims] == sizes
        for leaf in {leaf for dimension in dims for leaf in leaves.flat(dimension)}:
            if leaves.size[leaf] % 2 == 0:
                for member in range(2):
                    assert elements(leaves, tensor, dims, leaf, member) == elements(leaves, first, base, leaf, member)
                num_compared += 1
    assert num_compared > 300


def test_parts_are_joined_to_the_tensor_that_was_cut():
    whole = torch.randn(3, 48)
    place = Place("x", 1, (Segment(32, 8), Segment(16, 4)))
    assert torch.equal(joined([cut(whole, place, 4, member, 2) for member in range(2)], place, 4), whole)


def test_sizes_that_are_divided_in_two_ways_stay_whole():
    leaves = DimensionFactors()
    (twelve,) = leaves.fresh([12])
    leaves.unify(twelve, [*leaves.new(4), *leaves.new(3)])
    leaves.unify(twelve, [*leaves.new(3), *leaves.new(4)])
    assert {*leaves.whole().values()} <= {"divided in two ways", "divided unevenly"}
    assert {*leaves.everything(twelve)} <= {*leaves.whole()}


def test_slices_are_segments_and_an_axis_must_be_in_each():
    leaves = DimensionFactors()
    (ten,) = leaves.fresh([10])
    query, key = leaves.cut(ten, 0, 8), leaves.cut(ten, 8, 10)
    heads = leaves.new(2)
    leaves.unify(query, [*heads, *leaves.new(4)])
    assert leaves.root(heads[0]) in leaves.carried(ten)[1]  # only in the first segment
    leaves.unify(key, heads)
    places, hidden = leaves.carried(ten)
    leaf = leaves.root(heads[0])
    assert places[leaf] == (Segment(8, 4), Segment(2, 1))
    assert leaf not in hidden


def test_slices_at_other_places_refine_the_segments():
    leaves = DimensionFactors()
    (six,) = leaves.fresh([6])
    first = leaves.cut(six, 0, 4)
    second = leaves.cut(six, 2, 6)
    middle = leaves.cut(six, 2, 4)
    assert leaves.cut(first, 2, 4) == middle == leaves.cut(second, 0, 2)


def test_a_slice_of_a_view_is_one_of_its_outer_factor():
    leaves = DimensionFactors()
    fused = [*leaves.new(3), *leaves.new(4)]
    part = leaves.cut(fused, 4, 8)
    assert part == [fused[1]]
    assert fused[0] in leaves.whole()
    with pytest.raises(NoRuleError, match="slices a view"):
        leaves.cut(fused, 2, 5)


def test_a_size_of_the_batch_inside_has_no_place():
    leaves = DimensionFactors()
    heads, batch = leaves.new(4), leaves.new(5)
    leaves.mark_varying(batch)
    assert leaves.carried([*batch, *heads], leaves.varying()) == (
        {batch[0]: (Segment(0, 4),), heads[0]: (Segment(0, 1),)},
        set(),
    )
    assert heads[0] in leaves.carried([*heads, *batch], leaves.varying())[1]
