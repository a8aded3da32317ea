"""Shapes as expressions of the batch size."""

from __future__ import annotations

import pytest

from autopipe.ir.tensor import TensorSpec, evaluate, symbols_of


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


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("s0 / 2",), "'s0 / 2' is not a shape expression"),
        (("s0 // 0",), "'s0 // 0' is not a shape expression"),
        (("s0 % -3",), "'s0 % -3' is not a shape expression"),
        (("s0 ** 17",), "'s0 [*][*] 17' is not a shape expression"),
        (("2 ** s0",), "'2 [*][*] s0' is not a shape expression"),
        ((f"s0 + {2**63}",), "is not a shape expression"),
        (("s0 + 1.0",), "is not a shape expression"),
        (("+".join(["s0"] * 400),), "is not a shape expression"),
        ((4, -1), "a dimension must be at least 0, and is -1"),
    ],
)
def test_an_invalid_dimension_is_refused_when_built(shape: tuple[int | str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorSpec(shape, "float32")


@pytest.mark.parametrize("expression", ["s0 // s1", "s0 % (s1 + 1)", "s0**2 - 1", "-s0 + 9"])
def test_valid_expressions_have_their_symbols(expression: str) -> None:
    assert symbols_of(expression) == {name for name in ("s0", "s1") if name in expression}
    assert symbols_of(7) == frozenset()


@pytest.mark.parametrize(
    ("expression", "sizes", "message"),
    [
        ("s0 // s1", {"s0": 4, "s1": 0}, "divides by zero"),
        ("s0 * s0", {"s0": 2**32}, "does not fit in 64 bits"),
        ("s0 ** s1", {"s0": 2, "s1": 17}, "17 is not a valid exponent of a shape"),
        ("s0 ** s1", {"s0": 2, "s1": -1}, "-1 is not a valid exponent of a shape"),
        ("-" * 900 + "s0", {"s0": 1}, "is not a shape expression"),
    ],
)
def test_an_expression_without_a_value_is_refused(expression: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(expression, sizes)


def test_a_spec_is_written_as_dtype_and_shape() -> None:
    spec = TensorSpec(("s0", 4), "float32")
    assert str(spec) == "float32[s0, 4]"
    assert spec.concrete({"s0": 3}) == (3, 4)
