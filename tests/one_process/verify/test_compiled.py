"""Compiled stages: the masks of eager code, a tolerance that is measured, and errors of the compiler."""

from __future__ import annotations

import functools
import json
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import train as plain
from support.pipelines import Captured, build, captured_file, minibatches, plan_for

from autopipe.errors import PlanError, WorkerError
from autopipe.runtime import compiled
from autopipe.runtime.compiled import forward_of, refuse_uncompilable
from autopipe.verify import compiled_model
from autopipe.verify.check import compare

# torch's own, while it compiles the code after a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    def forward(self, x):
        return x + F.dropout(self.norm(self.l(x)).tanh(), 0.5, self.training)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 3)
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if CHECKPOINT else block(x)
        return self.head(torch.rrelu(x, training=self.training))

CHECKPOINT = False
build_model = Net
loss = nn.CrossEntropyLoss()

def data(batch_size):
    g = torch.Generator().manual_seed(0)
    x = lambda: torch.randn(batch_size, 8, generator=g)
    return [(x(), torch.randint(0, 3, (batch_size,), generator=g)) for _ in range(4)]

def example_inputs(batch_size):
    return data(batch_size)[0]

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
"""


LAYERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1)
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

build_model = Net
loss = nn.MSELoss()

def data(batch_size):
    g = torch.Generator().manual_seed(0)
    values = [torch.randn(batch_size, 8, generator=g) for _ in range(4)]
    return [(x, x.sum(1, keepdim=True)) for x in values]

def example_inputs(batch_size):
    return data(batch_size)[0]

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(MODEL)
    return captured_file(path)


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Let stages be compiled by a backend."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **more: compile_(*a, **{"backend": backend, **more}))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile with autograd's graphs, and without generating machine code. Returns the graphs."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compile_with(monkeypatch, backend)
    monkeypatch.setattr(compiled_model, "generated", lambda part, inputs: part)
    return graphs


def test_random_operations_are_moved_out_of_their_blocks(subject: Captured, tmp_path: Path) -> None:
    pipeline = build(subject, plan_for(subject, 1, "1f1b", 2, 8), tmp_path)
    text = (pipeline.run.stages / "stage_0.py").read_text()
    assert text.count("with draw(self, ") == 5
    from autopipe.generate import load_stage

    digests = {"graph_digest": pipeline.plan.graph_digest, "plan_digest": pipeline.plan.digest}
    code = load_stage(pipeline.run.stages, 0, **digests)
    forward = forward_of(code)
    assert compiled._OUTSIDE in forward.__code__.co_names
    assert forward.__code__.co_filename == code.forward.__code__.co_filename
    assert forward.__code__.co_firstlineno == code.forward.__code__.co_firstlineno


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_compiled_stages_draw_the_masks_of_plain_training(
    schedule: str, subject: Captured, fast: list[Any], tmp_path: Path
) -> None:
    plan = plan_for(subject, 2, schedule, 4, 8)
    items = minibatches(subject.workload, 3, 8)
    eager = build(subject, plan, tmp_path / "eager")
    pipeline = build(subject, plan, tmp_path / "compiled", compile=True)
    wanted, weights = eager.weights(eager.train(items)), pipeline.weights(pipeline.train(items))
    assert len(fast) >= 2  # graphs of both stages
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    if schedule == "1f1b":
        _, model, _ = plain(Path(plan.workload.target), items, 4)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.data, rtol=1e-5, atol=1e-6)


def test_a_check_allows_the_difference_of_the_compiled_plain_loop(
    subject: Captured, monkeypatch: pytest.MonkeyPatch, fast: list[Any], tmp_path: Path
) -> None:
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path, steps=2, compile=True)
    items = minibatches(subject.workload, 2, 8)

    def comparison() -> Any:
        return compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True)

    result = comparison()
    assert result.equal and not result.promised
    assert any("a compiler fuses operations" in reason for reason in result.reasons)
    assert any("the compiled plain loop differs from the eager one by" in reason for reason in result.reasons)
    right = compiled.outside

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        return right(*arguments, **keywords) * 1.05

    monkeypatch.setattr(compiled, "outside", wrong)
    result = comparison()
    assert not result.equal
    assert not any("more than rounding can explain" in reason for reason in result.reasons)


@pytest.mark.parametrize("name", ["blocks.0.l.weight", ""])
def test_wrong_gradients_of_compiled_stages_are_no_noise(
    name: str, subject: Captured, monkeypatch: pytest.MonkeyPatch, fast: list[Any], tmp_path: Path
) -> None:
    right = compiled.compile_stage

    def wrong(stage: Any, *more: Any) -> None:
        right(stage, *more)
        for path, parameter in stage.named_parameters():
            if path == name or not name:
                parameter.register_hook(lambda gradient: gradient * 1.5)

    for module in [module for module in sys.modules.values() if vars(module).get("compile_stage") is right]:
        monkeypatch.setattr(module, "compile_stage", wrong)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 2, 8), tmp_path, steps=2, compile=True)
    items = minibatches(subject.workload, 2, 8)
    result = compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True)
    assert not result.equal
    assert result.tolerance < 1e-3
    assert result.max_relative_error > 0.4


def test_a_compiler_that_is_wrong_everywhere_raises_no_tolerance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "layers.py").write_text(LAYERS)
    subject = captured_file(tmp_path / "layers.py")
    changed = []

    def wrong(module: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        for node in [node for node in module.graph.nodes if node.target in ("tanh", torch.tanh)]:
            with module.graph.inserting_after(node):
                larger = module.graph.call_function(operator.mul, (node, 1.005))
            node.replace_all_uses_with(larger, delete_user_cb=lambda user, larger=larger: user is not larger)
            changed.append(node)
        module.recompile()
        return module

    compile_with(monkeypatch, wrong)
    monkeypatch.setattr(compiled_model, "generated", wrong)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 2, 8), tmp_path, steps=2, compile=True)
    items = minibatches(subject.workload, 2, 8)
    result = compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True)
    assert len(changed) >= 8  # in the stages and in the plain model
    assert not result.equal


def test_a_model_that_cannot_be_compiled_as_a_whole_has_the_noise_of_sums_in_parts(
    subject: Captured, monkeypatch: pytest.MonkeyPatch, fast: list[Any], tmp_path: Path
) -> None:
    def failing(part: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(compiled_model, "generated", failing)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 2, 8), tmp_path, steps=2, compile=True)
    items = minibatches(subject.workload, 2, 8)
    result = compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True)
    assert result.equal, (result.reasons, result.differences)
    assert any("cannot be compiled as a whole" in reason for reason in result.reasons)


def test_a_failing_compiler_is_named_with_the_way_out(
    subject: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise FileNotFoundError("g++")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=failing))
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 2, 8), tmp_path, compile=True)
    with pytest.raises(
        WorkerError, match=r"stage 0 cannot be compiled: BackendCompilerFailed: .* FileNotFoundError: g[+][+]"
    ) as e:
        pipeline.train(minibatches(subject.workload, 1, 8))
    assert e.value.remedy.startswith("omit --compile")


def test_zero_bubble_is_refused(subject: Captured, tmp_path: Path) -> None:
    plan = plan_for(subject, 2, "zero-bubble", 4, 8)
    with pytest.raises(PlanError, match="--compile does not work with zero-bubble: it runs the backward in two parts"):
        refuse_uncompilable(plan)
    with pytest.raises(PlanError, match="--compile does not work with zero-bubble"):
        build(subject, plan, tmp_path, compile=True).train(minibatches(subject.workload, 1, 8))


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    fixed = ("net.py", "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "2", "--json")
    line = [sys.executable, "-m", "autopipe.cli", words[0], *fixed, *words[1:]]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_command_checks_with_the_compiler_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("CHECKPOINT = False", "CHECKPOINT = True"))
    for more in ([], ["--recompute", "block"]):
        done = command(tmp_path, "check", *more, "--compile")
        report = json.loads(done.stdout)
        assert report["equal"], done.stderr
        assert any("a compiler fuses operations" in warning for warning in report["warnings"])
    losses = []
    for more in ([], ["--compile"]):
        done = command(tmp_path, "train", *more, "--steps", "4", "--schedule", "1f1b")
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    done = command(tmp_path, "train", "--compile", "--recompute", "never", "--schedule", "zero-bubble", "--steps", "1")
    assert done.returncode == 1
    assert "--compile does not work with zero-bubble" in done.stderr
