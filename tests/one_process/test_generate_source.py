"""What a stage file looks like, and that it is what runs: in a fresh interpreter, from any folder, never stale."""

import ast
import collections
import enum
import functools
import inspect
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from chain import differences, even_cuts, load, plan_of
from pipelines import captured, captured_file
from torch import fx, nn
from trace_cases import CASES, Toy, vectors, workload

import autopipe
from autopipe.errors import ArtifactError, TraceError
from autopipe.generate import generate, load_constants, load_stage
from autopipe.generate.expression import Writer, path_text
from autopipe.generate.layout import Group, flat, wrapped
from autopipe.generate.targets import Imports
from autopipe.ir.cuts import Cuts
from autopipe.stage import Stage
from autopipe.trace import capture

ROOT = Path(__file__).resolve().parents[2]


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
    _, found = small()
    cuts = Cuts(found.graph)
    plan = plan_of(found.graph, [next(position for position in cuts.legal if cuts.crossing[position] == ("add",))])
    paths = generate(found, plan, tmp_path)
    assert [path.name for path in paths] == ["stage_0.py", "stage_1.py"]
    here = f"one_process/{Path(__file__).name}"
    expected = textwrap.dedent(f'''\
        """Stage 0 of 2 of toy.py:Model: blocks.0.qk to blocks.0.

        Written by autopipe {autopipe.__version__}; this is what the ranks run. `autopipe generate` writes it anew.
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
            SENDS = ("add",)
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

                # x (add): float32[batch, 4], to stage 1
                return (x,)
        ''')
    assert paths[0].read_text() == expected


@pytest.mark.parametrize("name", CASES)
def test_every_stage_file_is_clean_python_in_120_columns(name, tmp_path):
    found = capture(workload(name), verify=False)
    for path in generate(found, plan_of(found.graph, even_cuts(found.graph, 3)), tmp_path):
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


def test_a_users_name_is_used_again_as_the_user_does(tmp_path):
    made = captured("hf_llama")
    path = generate(made.capture, plan_of(made.capture.graph, []), tmp_path)[0]
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {"hidden_states", "query_states", "key_states", "value_states", "attn_output"} <= names
    numbered = {name for name in names if re.fullmatch(r"(hidden_states|attn_output|variance)_?\d+", name)}
    assert numbered <= {"hidden_states2"}  # the residual is alive while the block works on its own


def test_no_file_knows_a_batch_size(tmp_path):
    made = captured("gpt")
    for path in generate(made.capture, plan_of(made.capture.graph, even_cuts(made.capture.graph, 3)), tmp_path):
        assert ".view(5," not in path.read_text()
        assert "batch = ids.size(0)" in path.read_text()


class Parts(nn.Module):
    """Tuples on lines that assign something else, and tuples inside tuples."""

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


def test_a_tuple_is_taken_apart_only_by_the_line_that_names_its_parts(tmp_path):
    work = Toy(Parts, vectors)
    found = capture(work, verify=False)
    plan = plan_of(found.graph, [])
    assert differences(work, found, plan, tmp_path, 4, (0, 0, 0)) == []
    text = (tmp_path / "stage_0.py").read_text()
    assert "a = x.max(1)[0]\n" in text and "a, b, c" not in text and "a, _, _" not in text
    assert "y, (h, _) = self.lstm(x[:, None])\n" in text
    assert "unbind = x.unbind(1)\n" in text


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
def test_a_value_is_written_in_the_form_that_gives_it_back(text):
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
    assert "an argument of type object has no form in Python source" in str(raised.value)
    assert "pass plain numbers" in raised.value.remedy


def test_a_function_that_no_import_reaches_is_refused_with_its_name():
    def inner():
        return None

    with pytest.raises(TraceError) as raised:
        Writer(Imports(), {}, {}, "cpu").value(inner)
    assert "no import reaches" in str(raised.value)
    assert raised.value.remedy == "define inner at the top level of a module"


def test_operators_keep_their_order_and_no_more_brackets_than_they_need():
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
def test_a_path_is_reached_whatever_its_names_are(path, text):
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


class Awkward(nn.Module):
    """Names that a stage has for itself, names that are no identifiers, and a tensor of one's own under no name."""

    def __init__(self):
        super().__init__()
        self.train_ = nn.Linear(4, 4)
        self._modules["place"] = nn.Linear(4, 4)
        self.parts = nn.ModuleDict({"a-b": nn.Linear(4, 4), "1": nn.Linear(4, 4), "class_": nn.Linear(4, 4)})
        self.frozen = nn.BatchNorm1d(4)
        self._buffers["seed"] = torch.ones(4)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        lambda_ = self._modules["place"](x) * self._buffers["seed"]
        x = self.parts["class_"](lambda_)
        x = self.parts["a-b"](x) + self.parts["1"](x)
        return self.frozen(self.train_(x)).pow(2).mean()


def test_names_that_a_stage_has_for_itself_do_no_harm(tmp_path):
    work = Toy(Awkward, vectors)
    found = capture(work, verify=False)
    model, plain = work.build_model(), work.build_model()
    stages = load(found, plan_of(found.graph, []), tmp_path, model)
    item = work.example_item(3)
    assert torch.equal(stages[0](item["x"])[0], plain(item["x"]))
    assert sorted(stages[0].state_dict()) == sorted(model.state_dict())


def test_what_the_user_keeps_in_evaluation_mode_stays_in_it(tmp_path):
    work = Toy(Awkward, vectors)
    found = capture(work, verify=False)
    (stage,) = load(found, plan_of(found.graph, []), tmp_path, work.build_model())
    stage.eval()
    stage.train()
    assert stage.training and stage.train_.training and not stage.frozen.training


def test_a_buffer_with_two_names_stays_one_when_the_stage_moves():
    class Two(Stage):
        BUFFERS = ("a.table", "b.table")

    model = nn.Module()
    table = torch.ones(3)
    for name in ("a", "b"):
        model.add_module(name, nn.Module())
        model.get_submodule(name).register_buffer("table", table, persistent=False)
    stage = Two.adopt(model, {}).place(torch.device("meta"))
    assert stage.a.table is stage.b.table
    assert stage.a.table.is_meta
    assert stage.state_dict() == {}


def test_adopting_another_model_says_what_it_lacks():
    class Wants(Stage):
        INDEX = 2
        MODULES = ("encoder.first",)
        CONSTANTS = ("constant_mask",)

    with pytest.raises(ArtifactError) as raised:
        Wants.adopt(nn.Module(), {"constant_mask": torch.ones(1)})
    assert raised.value.what == "stage 2 was written for a model with encoder.first, which this model lacks"
    assert raised.value.remedy == "autopipe generate"


def files(folder, num_stages=2):
    _, found = small()
    plan = plan_of(found.graph, even_cuts(found.graph, num_stages))
    generate(found, plan, folder)
    return plan


def test_a_plan_with_fewer_stages_leaves_no_old_files(tmp_path):
    files(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("mine")
    files(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "stage_0.py", "stage_1.py"]


def test_constants_lie_beside_the_files_and_go_when_they_are_not_needed(tmp_path):
    found = capture(workload("plain tensors"), verify=False)
    generate(found, plan_of(found.graph, []), tmp_path)
    assert sorted(load_constants(tmp_path)) == sorted(found.constants)
    for name, tensor in load_constants(tmp_path).items():
        assert torch.equal(tensor, found.constants[name])
    (tmp_path / "constants.safetensors").write_bytes(b"broken")
    with pytest.raises(ArtifactError, match=r"constants\.safetensors is damaged"):
        load_constants(tmp_path)
    files(tmp_path)
    assert load_constants(tmp_path) == {}


@pytest.mark.parametrize("kind", ("model", "plan"))
def test_a_stale_file_is_refused_with_both_digests_and_the_command(kind, tmp_path):
    plan = files(tmp_path)
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    was = digests["graph_digest" if kind == "model" else "plan_digest"]
    digests["graph_digest" if kind == "model" else "plan_digest"] = "0123456789abcdef"
    with pytest.raises(ArtifactError) as raised:
        load_stage(tmp_path, 1, **digests)
    assert raised.value.what == f"the file of stage 1 was written for {kind} {was}; this is {kind} 0123456789abcdef"
    assert raised.value.where == str(tmp_path / "stage_1.py")
    assert raised.value.remedy == "autopipe generate"


def test_a_missing_or_broken_file_is_refused_with_the_command(tmp_path):
    plan = files(tmp_path)
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    with pytest.raises(ArtifactError, match="there is no file for stage 7"):
        load_stage(tmp_path, 7, **digests)
    path = tmp_path / "stage_0.py"
    path.write_text(path.read_text() + "\nimport no_such_module\n")
    with pytest.raises(ArtifactError, match="cannot be run: ModuleNotFoundError: No module named 'no_such_module'"):
        load_stage(tmp_path, 0, **digests)


def test_what_is_written_is_what_runs_even_within_one_tick_of_the_clock(tmp_path):
    plan = files(tmp_path)
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    path = tmp_path / "stage_0.py"
    before = path.stat()
    load_stage(tmp_path, 0, **digests)
    path.write_text(path.read_text().replace("INDEX = 0", "INDEX = 9"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_stage(tmp_path, 0, **digests).INDEX == 9
    assert not list(tmp_path.rglob("*.pyc"))


def test_a_capture_of_another_model_is_refused_with_both_digests(tmp_path):
    _, found = small()
    other = capture(workload("plain"), verify=False)
    with pytest.raises(ArtifactError) as raised:
        generate(other, plan_of(found.graph, []), tmp_path)
    assert found.graph.digest in raised.value.what and other.graph.digest in raised.value.what


def test_stages_run_in_a_fresh_interpreter_that_has_loaded_the_users_file(tmp_path):
    user = tmp_path / "user" / "ste_model.py"
    user.parent.mkdir()
    user.write_text(
        textwrap.dedent("""\
            import torch
            from torch import nn

            class Sign(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x.sign()

                @staticmethod
                def backward(ctx, gradient):
                    return gradient

            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

                def forward(self, x):
                    x = Sign.apply(self.a(x))
                    return self.b(x).pow(2).mean()

            def example_inputs(batch_size):
                return {"x": torch.ones(batch_size, 4)}
            """)
    )
    made = captured_file(user)
    plan = plan_of(made.capture.graph, even_cuts(made.capture.graph, 2))
    generate(made.capture, plan, tmp_path / "stages")
    assert "from ste_model import Sign" in (tmp_path / "stages" / "stage_0.py").read_text()
    code = textwrap.dedent(f"""\
        from pathlib import Path
        import torch
        from autopipe.generate import load_stage
        from autopipe.workload import LoadOptions, load_workload
        model = load_workload(LoadOptions({str(user)!r})).build_model()
        digests = dict(graph_digest={plan.graph_digest!r}, plan_digest={plan.digest!r})
        value = torch.ones(2, 4)
        for index in range(2):
            stage = load_stage(Path({str(tmp_path / "stages")!r}), index, **digests).adopt(model, {{}})
            (value,) = stage(value)
        value.backward()
        print(bool(torch.equal(value, model(torch.ones(2, 4)))), model.a.weight.grad.abs().sum().item() > 0)
        """)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["True", "True"]
