"""What crosses to the process that compares, and back."""

from __future__ import annotations

import json
import math

from autopipe.commands.checking.task import Compared
from autopipe.report.results import FullBatchParameter, FullBatchReport
from autopipe.verify.comparison import Comparison, TensorDifference


def test_a_comparison_crosses_with_numbers_that_are_not_finite() -> None:
    difference = TensorDifference("w", math.inf, bitwise=False, owner=1, noise=2.0)
    comparison = Comparison((difference,), (1.5, math.nan), (1.5, 2.0), True, ("a", "b"), nonfinite="loss 1")
    full = FullBatchReport(2, (4, 4), None, "the samples", (), (FullBatchParameter("w", None, 1.0),))
    compared = Compared(comparison, "on the CPU", full)
    again = Compared.decode(json.loads(json.dumps(compared.encode())))
    assert repr(again) == repr(compared)
    assert Compared.decode(json.loads(json.dumps(Compared(None, "left out").encode()))) == Compared(None, "left out")
