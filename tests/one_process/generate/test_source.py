"""The source of a stage file."""

import ast
import functools
import inspect
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.chain import differences, even_cuts, in_stages, plan_of
from support.models.trace import CASES, Base, Toy, vectors, workload
from support.pipelines import captured
from torch import nn

import autopipe
from autopipe.generate import generate
from autopipe.ir.cuts import Cuts
from autopipe.trace import capture


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(4, 8)
        self.p = 0.25

    def forward(self, x):
        q, k = self.qk(x).chunk(2, dim=-1)
        weights = F.dropout(F.softmax(q @ k.t() / math.sqrt(4), dim=-1), self.p, self.training)
        return weights @ x


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.never = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(4, 4)
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            places = torch.arange(x.shape[0], device=x.device, dtype=torch.float32)[:, None] * self.scale
        x = x + places
        for block in self.blocks:
            x = x + block(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.head(x)
        return x.float().logsumexp(dim=-1).mean()


@functools.cache
def small():
    work = Toy(Small, vectors)
    return work, capture(work, verify=False)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if text in line)


def test_a_stage_file_reads_like_the_users_source(tmp_path):
    _, traced = small()
    cuts = Cuts(traced.graph)
    plan = plan_of(traced.graph, [next(position for position in cuts.legal if cuts.crossing[position] == ("x_3",))])
    paths = generate(traced, plan, tmp_path)
    assert [path.name for path in paths] == ["stage_0.py", "stage_1.py"]
    here = f"generate/{Path(__file__).name}"
    expected = textwrap.dedent(f'''\
        """Stage 0 of 2 of toy.py:Model: blocks.0.qk to blocks.0.

        Written by autopipe {autopipe.__version__}; this is what the ranks run. `autopipe generate` writes it again.
        """

        import torch
        import torch.nn.functional as F

        from autopipe.stage import Stage, device_of, draw


        class Stage0(Stage):
            """Its parameters: 3 tensors, 43 numbers."""

            MODEL_DIGEST = "{plan.graph_digest}"
            PLAN_DIGEST = "{plan.digest}"
            INDEX = 0
            INPUTS = ("x",)
            SENDS = ("x_3",)
            MODULES = ("blocks.0.qk",)
            PARAMETERS = ("never",)
            BUFFERS = ("scale",)

            def forward(self, x):
                # x: float32[batch, 4], of the batch

                # Small  {here}:{line_of(Small.forward, "places = ")}
                with torch.no_grad():
                    places = torch.arange(x.size(0), device=device_of(self), dtype=torch.float32)[:, None] * self.scale
                x = x + places

                # blocks.0 (Attention)  {here}:{line_of(Attention.forward, "q, k = ")}
                q, k = self.blocks[0].qk(x).chunk(2, dim=-1)
                with draw(self, 0):
                    weights = F.dropout(F.softmax(q @ k.t() / 2.0, dim=-1), p=0.25, training=self.training)
                matmul = weights @ x

                # Small  {here}:{line_of(Small.forward, "x = x + block")}
                x = x + matmul

                # x (x_3): float32[batch, 4], to stage 1
                return (x,)
        ''')
    assert paths[0].read_text() == expected


@pytest.mark.parametrize("name", CASES)
def test_every_stage_file_passes_the_linter_in_120_columns(name, tmp_path):
    traced = capture(workload(name), verify=False)
    for path in generate(traced, plan_of(traced.graph, even_cuts(traced.graph, 3)), tmp_path):
        text = path.read_text()
        assert max(map(len, text.splitlines())) <= 120
        assert not re.search(r" = None$|^\s*del |cpu", text, re.MULTILINE)
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert [name for name in names if re.search(r"_\d+_\d+$", name)] == []
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,W", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_a_name_of_the_user_is_reused_as_the_user_does(tmp_path):
    subject = captured("hf_llama")
    path = generate(subject.capture, plan_of(subject.capture.graph, []), tmp_path)[0]
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {"hidden_states", "query_states", "key_states", "value_states", "attn_output"} <= names
    numbered = {name for name in names if re.fullmatch(r"(hidden_states|attn_output|variance)_?\d+", name)}
    assert numbered <= {"hidden_states2"}  # the residual is alive while the block runs


def test_no_file_knows_a_batch_size(tmp_path):
    subject = captured("gpt")
    for path in generate(
        subject.capture, plan_of(subject.capture.graph, even_cuts(subject.capture.graph, 3)), tmp_path
    ):
        assert ".view(5," not in path.read_text()
        assert "batch = ids.size(0)" in path.read_text()


class Parts(nn.Module):
    """Tuples on lines that assign other values, and nested tuples."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    @staticmethod
    def three(x):
        return x + 1, x + 2, x + 3

    def forward(self, x):
        a, b, c = self.three(x.max(1)[0])
        y, (h, _) = self.lstm(x[:, None])
        first, *rest = x.unbind(1)
        return (y[:, 0].sum(1) + h[0].sum(1) + a + b * c + first + rest[0]).pow(2).mean()


def test_a_tuple_is_unpacked_only_on_the_line_that_names_its_parts(tmp_path):
    work = Toy(Parts, vectors)
    traced = capture(work, verify=False)
    plan = plan_of(traced.graph, [])
    assert differences(work, traced, plan, tmp_path, 4, (0, 0, 0)) == []
    text = (tmp_path / "stage_0.py").read_text()
    assert "max_0 = x.max(1)[0]\n" in text and "a, b, c" not in text and "a, _, _" not in text
    assert "y, (h, _) = self.lstm(x[:, None])\n" in text
    assert "unbind = x.unbind(1)\n" in text


class Powers(Base):
    def forward(self, x):
        h = self.a(x) ** 2 + 2**x + x ** (x > 0)
        h **= 2
        return self.b(h).mean()


def test_powers_are_written_with_the_operator(tmp_path):
    text, _ = in_stages(Toy(Powers, vectors), tmp_path, 3)
    assert "self.a(x) ** 2" in text and "2 ** x" in text and "x ** (x > 0)" in text


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        result = self.down(F.silu(self.gate(x)) * self.up(x))
        return result * 2


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        batch, width = x.shape
        for block in self.blocks:
            hidden = block(x)
            x = x + hidden
        for layer in self.layers:
            x = layer(x)
        pairs = x.view(batch * 2, width // 2).repeat(1, 2)
        return self.finished(pairs)

    def finished(self, values):
        return values.pow(2).mean()


def test_results_of_calls_have_the_callers_names_and_sizes_are_inlined(tmp_path):
    text, graph = in_stages(Toy(Named, vectors), tmp_path, 3)
    names = [node.name for node in graph.nodes]
    assert [name for name in names if name.startswith("hidden")] == ["hidden", "hidden_2"]
    assert [name for name in names if name.startswith(("gate", "up", "result"))] == [
        "gate", "up", "result", "gate_2", "up_2", "result_2",
    ]  # fmt: skip
    assert "x = self.layers[0](x)\n" in text and "x = self.layers[1](" in text
    assert "x.view(batch * 2, 2)" in text
