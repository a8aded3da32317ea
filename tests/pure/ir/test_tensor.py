"""Shapes as expressions of the batch size."""

from __future__ import annotations

import pytest

from autopipe.ir.tensor import TensorSpec, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (3, 3),
        ("s0", 5),
        ("s0*16", 80),
        ("2*s0 + 1", 11),
        ("(s0 + 1)//2", 3),
        ("s0 % 3", 2),
        ("s0**2", 25),
        ("-s0 + 9", 4),
    ],
)
def test_a_dimension_is_integer_arithmetic(expression: int | str, value: int) -> None:
    assert evaluate(expression, {"s0": 5}) == value


@pytest.mark.parametrize("bad", ["s1", "s0.real", "__import__('os')", "s0/2", "f(s0)", "s0 if s0 else 1", "'a'", "1.5"])
def test_anything_else_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="cannot evaluate"):
        evaluate(bad, {"s0": 5})


def test_a_broken_expression_is_refused() -> None:
    with pytest.raises(ValueError, match="not a shape expression"):
        evaluate("s0 *", {"s0": 5})


def test_bytes_follow_the_batch_and_the_dtype() -> None:
    assert TensorSpec(("s0", 4), "float32").num_bytes({"s0": 3}) == 48
    assert TensorSpec(("s0", 4), "bfloat16").num_bytes({"s0": 3}) == 24
    assert TensorSpec((), "int64").num_bytes({}) == 8


def test_an_unknown_dtype_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        TensorSpec((1,), "float31")
