"""Errors name the line that draws or decides; for a line of a library, the line of the model comes first."""

import contextlib
import cProfile
import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
from support.models.trace import Toy, vectors

from autopipe.errors import TraceError
from autopipe.trace import capture
from autopipe.trace.explain import own_and_library

HEAD = """
    import random as pythons
    from random import random

    import numpy as np
    import torch
    from torch import nn
    import linelib


    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln = nn.LayerNorm(4)

        def forward(self, x):
            return self.ln(x)


    def drawn_by_a_helper():
        value = random()  # drawn in the helper
        return value


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
"""

LIBRARY = """
    from random import random

    import torch
    from torch import nn


    def coin():
        return random() < 0.5  # the library draws


    def positive(x):
        if x.sum() > 0:  # the library decides
            return x * 2
        return x


    class Decides(nn.Module):
        def forward(self, x):
            return positive(x)


    class Modes(nn.Module):
        def forward(self, x):
            return twice(x) if self.training else x + 1


    def twice(x):
        for _ in range(20):
            x = x.cos()
        return x
"""

# the lines of a forward, up to its return
THIS = "  # THIS"
DRAWS = {
    "a bare function": ["if random() < 2:" + THIS, "    x = self.norm(x)"],
    "a short test": ["if self.training and random() < 2:" + THIS, "    x = x + 1"],
    "numpy": ["x = self.norm(x) * np.random.rand()" + THIS],
    "Python's own code": ["x = self.norm(x)", "pick = pythons.choice([1, 2, 3])" + THIS, "x = x * pick"],
    "in a comprehension": ["scales = [random() for _ in range(3)]" + THIS, "x = x * sum(scales)"],
    "in an argument": ["x = self.norm(x * random())" + THIS],
    "behind a call": ["x = self.norm(x).mean() * pythons.uniform(0, 1)" + THIS],
    "in a helper": ["x = self.norm(x)", "scale = drawn_by_a_helper()  # not this", "x = x * scale"],
    "in a library": ["x = self.norm(x)", "if linelib.coin():" + THIS, "    x = x + 1"],
}
ELSEWHERE = {"in a helper": "drawn in the helper"}
LIBRARYS = {"in a library": "the library draws"}


@pytest.fixture
def model_of(tmp_path, monkeypatch):
    """Return a function that builds a class ``Model`` with a forward, next to an installed library."""
    packages = tmp_path / "lib" / "site-packages"
    (packages / "linelib").mkdir(parents=True)
    (packages / "linelib" / "__init__.py").write_text(textwrap.dedent(LIBRARY))
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(forward):
        name = f"linemodel_{len(list(tmp_path.glob('linemodel_*')))}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(HEAD) + textwrap.indent(forward, " " * 8) + "\n")
        importlib.invalidate_caches()
        return importlib.import_module(name).Model

    yield make
    for name in [name for name in sys.modules if name.startswith(("linemodel_", "linelib"))]:
        del sys.modules[name]


@pytest.mark.parametrize("case", DRAWS)
def test_the_line_that_draws_is_named(case, model_of):
    forward = "\n".join([*DRAWS[case], "return x.mean()"])
    with pytest.raises(TraceError, match="draws from") as caught:
        capture(Toy(model_of(forward), vectors))
    library = LIBRARYS.get(case, "")
    own, _, rest = caught.value.where.partition(", which runs ")
    assert re.search(r"linemodel_\d+\.py:\d+: ", own), caught.value.where
    assert own.endswith(f"# {ELSEWHERE.get(case, 'THIS')}")
    assert rest == "" if not library else rest.startswith("linelib/__init__.py:") and rest.endswith(f"# {library}")


@pytest.mark.parametrize("drawn", ["random()", "np.random.rand()"])
def test_tracing_and_profiling_functions_are_restored(drawn, model_of):
    def mine(*_):
        return None

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(mine)
    sys.setprofile(mine)
    try:
        with pytest.raises(TraceError, match="draws from"):
            capture(Toy(model_of(f"return x.mean() * {drawn}"), vectors))
        assert (sys.gettrace(), sys.getprofile()) == (mine, mine)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])


@pytest.mark.parametrize("drawn", ["", " * random()"])
def test_a_capture_runs_under_a_profiler_that_is_no_function(drawn, model_of):
    profiler = cProfile.Profile()
    with profiler:
        with contextlib.nullcontext() if not drawn else pytest.raises(TraceError, match="draws from"):
            capture(Toy(model_of(f"return self.a(x).mean(){drawn}"), vectors))
        # it profiles again; from Python 3.12 on, it is not a profiling function
        assert sys.getprofile() is not None or sys.version_info >= (3, 12)
    assert any("capture" in str(entry.code) for entry in profiler.getstats())


@pytest.mark.parametrize(
    "forward",
    [
        "x = self.a(x)\nreturn linelib.positive(x).mean()  # THIS",
        "self.a(x)\nreturn linelib.Decides()(x).mean()  # THIS",
    ],
)
def test_for_a_decision_of_a_library_the_line_of_the_model_comes_first(forward, model_of):
    with pytest.raises(TraceError, match="__bool__: its result depends on the numbers") as caught:
        capture(Toy(model_of(forward), vectors))
    own, _, library = caught.value.where.partition(", which runs ")
    assert re.search(r"linemodel_\d+\.py:\d+: .*# THIS$", own)
    assert re.fullmatch(r"linelib/__init__\.py:\d+: if x\.sum\(\) > 0:  # the library decides", library)


def test_a_call_of_a_library_keeps_the_line_of_the_model(model_of):
    model = model_of("x = self.a(x)\nreturn linelib.twice(x).mean()  # THIS")
    graph = capture(Toy(model, vectors)).graph
    places = {node.target.rpartition(".")[2]: node.place for node in graph.nodes}
    assert re.fullmatch(r"\S*linemodel_\d+\.py:\d+ \(linelib/__init__\.py:\d+\)", places["cos"])
    assert re.fullmatch(r"\S*linemodel_\d+\.py:\d+", places["mean"])
    assert all(bool(node.own_source) == (node.target.rpartition(".")[2] == "cos") for node in graph.nodes)


def test_a_different_path_in_evaluation_is_named_in_the_model_first(model_of):
    model = model_of("x = self.a(x)\nif not hasattr(self, 'modes'):\n    pass\nreturn self.modes(x).mean()  # THIS")

    def build():
        built = model()
        built.modes = sys.modules["linelib"].Modes()
        return built

    captured = capture(Toy(build, vectors))
    source = Path(sys.modules[model.__module__].__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "THIS" in text)
    note = rf"eval mode traces differently: another call at \S*linemodel_\d+\.py:{line} \(linelib/__init__\.py:\d+\)"
    assert re.fullmatch(note, captured.evaluation_note)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/me/model.py"], (0, None)),
        (["/p/site-packages/einops/a.py", "/p/site-packages/einops/b.py", "/me/model.py"], (2, 0)),
        (["/p/site-packages/einops/a.py", "/p/site-packages/hf/m.py", "/p/site-packages/hf/n.py"], (1, 0)),
        (["/p/site-packages/hf/m.py", "/p/site-packages/hf/n.py"], (0, None)),
    ],
)
def test_the_innermost_frame_of_the_model_and_that_of_a_library(files, expected):
    assert own_and_library(files) == expected


DECISIONS = {
    "a tensor": "if torch.rand(1) < 0.5:  # THIS",
    "its number": "if torch.rand(1).item() < 0.5:  # THIS",
    "drawn in place": "if float(torch.empty(1).uniform_(0, 1)) < 0.5:  # THIS",
    "one of two": "for _ in range(int(torch.randint(1, 3, ()))):  # THIS",
}


@pytest.mark.parametrize("case", DECISIONS)
def test_a_decision_by_random_numbers_is_not_blamed_on_the_batch(case, model_of):
    forward = f"x = self.a(x)\n{DECISIONS[case]}\n    x = x + 1\nreturn x.mean()"
    with pytest.raises(TraceError, match="makes a decision from random numbers, so other steps") as caught:
        capture(Toy(model_of(forward), vectors))
    assert caught.value.where.endswith("# THIS")
    assert "--allow-data-dependent" not in caught.value.remedy
    assert "torch.where" in caught.value.remedy and "data()" in caught.value.remedy


@pytest.mark.parametrize("value", ["(x * torch.rand(4)).sum()", "x.sum().item()", "torch.dropout(x, 0.5, True).max()"])
def test_a_decision_by_the_batch_is_blamed_on_the_batch_despite_draws(value, model_of):
    with pytest.raises(TraceError, match="depends on the numbers in the batch") as caught:
        capture(Toy(model_of(f"x = self.a(x)\nif {value} > 0:  # THIS\n    x = x + 1\nreturn x.mean()"), vectors))
    assert caught.value.where.endswith("# THIS")
