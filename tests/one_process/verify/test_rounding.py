"""The tolerance for an unknown order of sums is the one that help and README promise and the report shows."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from autopipe.ir.rounding import NOISE_FACTOR, TOLERANCE, USUAL_FACTOR, allowed
from autopipe.report.results import CheckReport, ParameterError
from autopipe.report.tables import check

ROOT = Path(__file__).resolve().parents[3]


def shown(report):
    console = Console(width=400, record=True, file=io.StringIO())
    for part in check(report):
        console.print(part)
    return console.export_text()


@pytest.mark.parametrize(
    ("usual", "own", "expected"),
    [(0, 0, 1e-6), (1e-8, 1e-8, 1e-6), (1e-6, 0, 16e-6), (1e-6, 1e-5, 4e-5), (0, 1e-5, 4e-5)],
)
def test_the_tolerance_is_the_largest_of_three(usual, own, expected):
    assert allowed(usual, own) == pytest.approx(expected)


def test_help_and_readme_promise_the_applied_tolerance():
    assert (TOLERANCE, NOISE_FACTOR, USUAL_FACTOR) == (1e-6, 4, 16)
    help_text = re.sub(r"\s+", " ", (ROOT / "docs/cli.md").read_text())
    assert "a tensor may differ by 1e-6 of its largest value" in help_text
    assert "4 times for the tensor itself, 16 times for the median tensor" in help_text
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert "a tensor may differ by 1e-6 of its largest value" in readme


def reordered(gradient, weight):
    entries = (
        ParameterError("a", 0.0, 0, weight, gradient / 2, weight),
        ParameterError("b", 0.0, 0, 0.0, gradient, 0.0),
    )
    return CheckReport(
        True, True, 0.0, entries, losses=(1.0, 1.0), orders=("a is tied over stages [0, 1]",), order_error=weight
    )


def test_rounding_is_shown_before_and_after_the_optimizer():
    text = shown(reordered(1.2e-6, 4.8e-3))
    assert "that order differs from one process's: a is tied over stages [0, 1]" in text
    assert "gradients differ by up to 1.2e-06 (b), the weights after 2 steps by up to 4.8e-03 (a)" in text
    assert "--exact-ties always adds in the order of one process" in text
    assert "4000 times as much: an optimizer that divides by the size of the gradient" in text
    assert "times as much" not in shown(reordered(1.2e-6, 1.2e-6))


def test_the_tolerance_is_shown_next_to_the_difference():
    entry = ParameterError("a", 3e-4, 0, gradient=2e-7)
    report = CheckReport(True, False, 3e-4, (entry,), gradient_error=2e-7, tolerance=5e-4, gradient_tolerance=1e-6)
    text = shown(report)
    assert "allowed: 1.0e-06 in gradients, 5.0e-04 in weights; gradients differ by 2.0e-07 at most" in text
    assert "1500 times as much" in text
