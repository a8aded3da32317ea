"""Batch forms: which batches a graph holds for, and the description of the first difference."""

from __future__ import annotations

import dataclasses

import pytest

from autopipe.ir.batch import ORDER, STRIDES, BatchForm

FORM = BatchForm(
    structure="dict(x, name, scale)",
    paths=("['x']", "['name']", "['scale']"),
    leaves=("tensor float32, 2 dimensions", "'a.png'", "0.5"),
    orders=("contiguous",),
    strides=("(4, 1)",),
)


def changed(**fields: object) -> BatchForm:
    return dataclasses.replace(FORM, **fields)  # type: ignore[arg-type]


SHORTER = changed(structure="dict(x, name)", paths=FORM.paths[:2], leaves=FORM.leaves[:2])


def test_fields_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 paths for 1 leaves, 0 strides for 0 orders"):
        BatchForm(paths=("a", "b"), leaves=("1",))
    with pytest.raises(ValueError, match="0 paths for 0 leaves, 0 strides for 1 orders"):
        BatchForm(orders=("contiguous",))


def test_an_unknown_memory_property_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown property of the memory layout: 'alignment'"):
        BatchForm(reads="alignment")


def test_a_form_without_structure_fits_every_batch() -> None:
    assert BatchForm().fits(FORM)
    assert not FORM.fits(BatchForm())


def test_another_structure_or_value_does_not_fit() -> None:
    assert FORM.fits(FORM)
    assert not FORM.fits(changed(structure="OrderedDict(x, name, scale)"))
    assert not FORM.fits(changed(leaves=(*FORM.leaves[:2], "0.25")))


def test_only_the_memory_property_that_is_read_must_be_equal() -> None:
    transposed, sliced = changed(orders=("transposed",), strides=("(1, 4)",)), changed(strides=("(8, 1)",))
    assert FORM.fits(transposed) and FORM.fits(sliced)
    order, strides = changed(reads=ORDER), changed(reads=STRIDES)
    assert order.fits(sliced) and not order.fits(transposed)
    assert not strides.fits(sliced) and not strides.fits(transposed)


def test_an_unread_value_may_differ_but_not_its_type() -> None:
    form = changed(unread=("['name']", "['scale']"))
    assert form.fits(changed(leaves=(FORM.leaves[0], '"b.png"', "2.5")))
    assert form.varying(changed(leaves=(FORM.leaves[0], "b'b.png'", "0.5"))) == ("['name']",)
    assert form.varying(changed(leaves=(FORM.leaves[0], "'a.png'", "2"))) == ("['scale']",)
    assert form.varying(changed(leaves=(FORM.leaves[0], "'a.png'", "None"))) == ("['scale']",)


@pytest.mark.parametrize(
    ("form", "batch", "difference"),
    [
        (FORM, FORM, ""),
        (SHORTER, FORM, "['scale'] is new (0.5)"),
        (FORM, changed(leaves=(*FORM.leaves[:2], "1.5")), "['scale'] is 1.5, where 0.5 was captured"),
        (FORM, SHORTER, "['scale'] is missing"),
        (FORM, changed(structure="list"), "its containers are list, where dict(x, name, scale) were captured"),
        (FORM, changed(orders=("transposed",), strides=("(1, 4)",)), ""),
        (
            changed(reads=ORDER),
            changed(orders=("transposed",)),
            "['x'] has another memory layout (transposed, where contiguous was captured)",
        ),
        (changed(reads=ORDER), changed(strides=("(8, 1)",)), ""),
        (changed(reads=STRIDES), changed(strides=("(8, 1)",)), "['x'] has strides (8, 1), where (4, 1) were captured"),
    ],
)
def test_the_first_difference_is_described(form: BatchForm, batch: BatchForm, difference: str) -> None:
    assert form.difference(batch) == difference
    assert form.fits(batch) == (difference == "")


def test_leaves_are_distinguished_by_type() -> None:
    assert FORM.is_tensor("['x']") and not FORM.is_tensor("['name']")
    assert FORM.is_text("['name']") and not FORM.is_text("['x']") and not FORM.is_text("['missing']")
