"""Ranks get the statements of the script that define what stages call, or the script is refused with the line."""

from __future__ import annotations

import pytest

from autopipe.script.calls.script_functions import ScriptSource
from autopipe.script.refusals import EffectError

START = "import math\nimport torch\n"
SQUARE = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * {used}
"""


def source(text: str, name: str = "Square") -> str:
    values: dict[str, object] = {"__name__": "script"}
    exec(compile(text, "train.py", "exec"), values)
    return ScriptSource(text, "train.py", values).source_of({name})


def defined_by(text: str) -> set[str]:
    values: dict[str, object] = {"__name__": "defined"}
    exec(text, values)
    return values.keys() - {"__name__", "__builtins__"}


@pytest.mark.parametrize(
    ("more", "used", "names"),
    [
        ("", "x", set()),
        ("RATE = 0.5\n", "RATE", {"RATE"}),
        ("RATE: float = math.pi\n", "RATE", {"RATE"}),  # only its value is needed
        ("RATE, SIZES = float('-inf'), (1,)\n", "max(RATE, SIZES[0])", {"RATE", "SIZES"}),
        ("SIZES, RATE = (1, 2), 'a'\n", "len(RATE)", {"RATE"}),
        ("SIZES, RATE = (1, 2), 'a'\n", "len(RATE) * SIZES[0]", {"RATE", "SIZES"}),
        ("def half(x):\n    return x * math.sqrt(0.25)\n", "half(x)", {"half", "math"}),
        ("def half(x, y=[1]):\n    return (lambda z: z * x * len(y))(x)\n", "half(x)", {"half"}),
        ("from math import pi as PI, tau\n", "PI", {"PI", "tau"}),
        ("import torch.nn.functional as F\n", "F.relu(x)", {"F"}),
        ("class Rate:\n    value = 2\nclass Other(Rate):\n    pass\n", "Other.value", {"Rate", "Other"}),
        ("model = torch.nn.Linear(2, 2)\ndef half(model):\n    return model / 2\n", "half(x)", {"half"}),
    ],
)
def test_what_a_function_uses_is_defined_with_it(more: str, used: str, names: set[str]) -> None:
    text = source(START + more + SQUARE.format(used=used) + "print(Square)\n")
    assert defined_by(text) == {"torch", "Square", *names}


@pytest.mark.parametrize(
    ("more", "used", "line", "why"),
    [
        ("RATE = 1\nRATE = 2\n", "RATE", 3, "uses RATE, which is set in lines 3 and 4"),
        ("RATE = 1\ndef change():\n    global RATE\n    RATE = 2\n", "RATE", 3, "is set in lines 3 and 4"),
        ("RATE = [1]\n", "RATE[0]", 3, "uses RATE, which is a list"),
        ("model = torch.nn.Linear(2, 2)\n", "model(x)", 3, "uses model, which is a Linear"),
        ("if True:\n    RATE = 1\n", "RATE", 3, "uses RATE, which is set inside of another statement"),
        ("from math import *\n", "tau", 4, "uses tau, which no statement of it sets"),
        ("RATE = [1]\ndef half(x):\n    return x * RATE[0]\n", "half(x)", 3, "half runs in the stages"),
    ],
)
def test_what_ranks_cannot_have_is_refused_with_its_line(more: str, used: str, line: int, why: str) -> None:
    with pytest.raises(EffectError, match="which do not run the script") as caught:
        source(START + more + SQUARE.format(used=used))
    assert why in caught.value.what
    assert caught.value.where.startswith("train.py:") and int(caught.value.where.split(":")[1]) >= line
    assert "in a module that the script imports" in caught.value.remedy


def test_a_function_that_is_defined_twice_is_refused() -> None:
    with pytest.raises(
        EffectError, match="Square runs in the stages, which do not run the script, and is set in lines"
    ):
        source(START + 2 * SQUARE.format(used="x"))
