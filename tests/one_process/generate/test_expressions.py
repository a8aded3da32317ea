"""Values, calls and paths as Python source, and the wrapping of long lines."""

import collections
import enum
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autopipe.errors import TraceError
from autopipe.generate.expression import Writer, path_text
from autopipe.generate.formatting import Group, flat, wrapped
from autopipe.generate.targets import Imports


class Small(nn.Module):
    """A class of the user."""


class Color(enum.Enum):
    RED = "red"


Pair = collections.namedtuple("Pair", "left right")


VALUES = {
    "None": None,
    "True": True,
    "-3": -3,
    "1e-05": 1e-05,
    'float("inf")': float("inf"),
    'float("-inf")': float("-inf"),
    'float("nan")': float("nan"),
    "complex(0.0, -2.0)": complex(0, -2),
    '"text"': "text",
    "'say \"so\"'": 'say "so"',
    "...": ...,
    "torch.bfloat16": torch.bfloat16,
    "torch.channels_last": torch.channels_last,
    "torch.strided": torch.strided,
    "device_of(self)": torch.device("cpu"),
    'torch.device("cuda:1")': torch.device("cuda:1"),
    "(1, 2)": torch.Size((1, 2)),
    "(1,)": (1,),
    "()": (),
    "[1, [2]]": [1, [2]],
    '{"a": (1,)}': {"a": (1,)},
    "slice(None, 3, None)": slice(3),
    "range(0, 3)": range(3),
    "Color.RED": Color.RED,
    "Pair(1, 2)": Pair(1, 2),
    "functools.partial(F.gelu, approximate=\"tanh\")": functools.partial(F.gelu, approximate="tanh"),
    "torch.cat": torch.cat,
    "F.cross_entropy": F.cross_entropy,
    "F.scaled_dot_product_attention": torch._C._nn.scaled_dot_product_attention,
    "torch.fft.rfft": torch.fft.rfft,
    "torch.linalg.norm": torch.linalg.norm,
    "torch.ops.aten.relu.default": torch.ops.aten.relu.default,
    "math.sqrt": math.sqrt,
    "float": float,
    "max": max,
    "Small": Small,
}  # fmt: skip


@pytest.mark.parametrize("text", VALUES)
def test_the_source_of_a_value_evaluates_to_the_value(text):
    value, imports = VALUES[text], Imports()
    written = flat(Writer(imports, {}, {}, "cpu").value(value).doc)
    assert written == text
    if "self" in text:
        return
    names = {}
    exec("\n".join(imports.lines()), names)
    back = eval(written, names)
    assert back == value or back != back or repr(back) == repr(value)


def test_a_value_without_a_source_form_is_refused_with_its_type():
    with pytest.raises(TraceError) as raised:
        Writer(Imports(), {}, {}, "cpu").value(object())
    assert "an argument of type object cannot be written as Python source" in str(raised.value)
    assert "pass plain numbers" in raised.value.remedy


def test_a_function_that_cannot_be_imported_is_refused_with_its_name():
    def inner():
        return None

    with pytest.raises(TraceError) as raised:
        Writer(Imports(), {}, {}, "cpu").value(inner)
    assert "which cannot be imported by that name" in str(raised.value)
    assert raised.value.remedy == "define inner at the top level of a module"


def test_operators_keep_their_order_with_minimal_parentheses():
    class Sums(nn.Module):
        def forward(self, a, b):
            return (a + b) * -a - (a - (b - a)) ** 2 / (a @ b) + (-a) ** 2 + (a < b) * (a & b)

    graph = fx.symbolic_trace(Sums()).graph
    writer = Writer(Imports(), {}, {}, "cpu")
    for node in graph.nodes:
        if node.op == "placeholder":
            writer.names[node.name] = writer.value("a")
            writer.names[node.name] = type(writer.names[node.name])((node.name,))
        elif node.op != "output":
            writer.names[node.name] = writer.call(node)
    text = flat(writer.names[list(graph.nodes)[-2].name].doc)
    assert text == "(a + b) * -a - (a - (b - a)) ** 2 / (a @ b) + (-a) ** 2 + (a < b) * (a & b)"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("h.1.attn", "self.h[1].attn"),
        ("layers.block-1.w", 'self.layers["block-1"].w'),
        ("blocks.class.x", 'self.blocks["class"].x'),
        ("place.01", 'self["place"]["01"]'),
    ],
)
def test_a_path_with_any_names_is_reached(path, text):
    assert flat(path_text(path)) == text


def test_long_lines_are_wrapped_at_their_brackets():
    def call(count):
        return "y = f", Group("(", tuple((f"argument_{index}",) for index in range(count)), ")")

    assert wrapped(call(9), 8) == [
        "        y = f(",
        "            " + ", ".join(f"argument_{index}" for index in range(9)),
        "        )",
    ]
    assert wrapped(call(12), 8) == ["        y = f(", *(f"            argument_{i}," for i in range(12)), "        )"]
    numbers = ("y = ", Group("(", tuple((str(index),) for index in range(90)), ")"))
    assert len(wrapped(numbers, 8)) == 6
    chain = ("result = ", "x.view", Group("(", (("1" * 48,),), ")"), ".view", Group("(", (("2" * 48,),), ")"))
    assert wrapped(chain, 4) == ["    result = (", f"        x.view({'1' * 48}).view({'2' * 48})", "    )"]
    subscript = ("y = x", Group("[", (("1" * 80,), ("2" * 80,)), "]", comma=False))
    assert wrapped(subscript, 4)[-2:] == ["        " + "2" * 80, "    ]"]
