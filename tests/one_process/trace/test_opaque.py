"""Opaque modules run as the user's code: training in stages equals plain training for any calls inside."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.models.opaque import CASES, write
from support.oracle import by_owner
from support.oracle import train as plain
from support.pipelines import Captured, build, captured_file, minibatches, plan_for

from autopipe.cli.main import autopipe
from autopipe.draws import seed_of
from autopipe.errors import TraceError
from autopipe.ir.plan import Plan
from autopipe.runtime.transport.absent import absent, is_absent
from autopipe.trace import capture
from autopipe.trace.tape.survey import Survey
from autopipe.verify.check import compare
from autopipe.workload import LoadOptions, load_workload

OPAQUE = {
    "experts": ("blocks.0.moe", "blocks.1.moe", "blocks.2.moe"),
    "layer_drop": ("stack", "other"),
    "statistics": ("one", "two"),
    "tied": ("pick",),
    "left_behind": ("blocks.0", "blocks.1", "blocks.2"),
    "inner_gradients": ("e", "e2"),
    "early_exit": ("s",),
    "objects": ("d", "s"),
    "aliases": ("o", "p"),
    "augmented": ("aug",),
    "strided": ("encode",),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("opaque")


def recomputing(plan: Plan) -> Plan:
    return dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, recompute="stage") for s in plan.stages))


def train(subject: Captured, plan: Plan, folder: Path, path: Path, steps: int = 5) -> None:
    """Train in stages and in a plain loop; assert that every loss, parameter and buffer is equal."""
    items = minibatches(subject.workload, steps, 8, last=7)
    pipeline = build(subject, plan, folder)
    sessions = pipeline.train(items)
    stages = [stage.parameters for stage in plan.stages]
    staleness = by_owner(stages, [1] * len(stages)) if plan.schedule == "2bw" else lambda name: 0
    losses, model, _ = plain(path, items, 4, staleness=staleness, opaque=subject.workload.spec.opaque_modules)
    assert [sessions[0].executor.stepper.losses[step] for step in range(steps)] == losses
    ours = pipeline.weights(sessions)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", sorted(set(CASES) - {"checkpointed"}))
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_weights_equal_a_plain_loop(name: str, schedule: str, folder: Path, tmp_path: Path) -> None:
    path = write(name, folder)
    subject = captured_file(path)
    assert subject.capture.exact
    assert subject.workload.spec.opaque_modules == OPAQUE[name]
    train(subject, plan_for(subject, 3, schedule, 4, 8), tmp_path, path)


def test_a_checkpoint_call_inside_runs_its_function_once(folder: Path, tmp_path: Path) -> None:
    subject = captured_file(write("checkpointed", folder))
    for plan in (plan_for(subject, 3, "1f1b", 4, 8), recomputing(plan_for(subject, 3, "1f1b", 4, 8))):
        pipeline = build(subject, plan, tmp_path / str(plan.stages[0].recompute), steps=4)
        items = minibatches(subject.workload, 4, 8)
        assert compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True).bitwise


@pytest.mark.parametrize("name", ["experts", "layer_drop", "statistics"])
def test_a_recomputed_forward_equals_the_first(name: str, folder: Path, tmp_path: Path) -> None:
    path = write(name, folder)
    subject = captured_file(path)
    train(subject, recomputing(plan_for(subject, 3, "1f1b", 4, 8)), tmp_path, path)


@pytest.mark.parametrize("name", ["experts", "early_exit"])
def test_a_split_backward_equals_the_complete_backward(name: str, folder: Path, tmp_path: Path) -> None:
    path = write(name, folder)
    subject = captured_file(path)
    train(subject, plan_for(subject, 3, "zero-bubble", 4, 8), tmp_path, path)


def test_clipping_ignores_experts_without_tokens(folder: Path, tmp_path: Path) -> None:
    subject = captured_file(write("experts", folder))
    pipeline = build(subject, plan_for(subject, 3, "1f1b", 4, 8), tmp_path, steps=4, clip_grad_norm=0.05)
    items = minibatches(subject.workload, 4, 8)
    assert compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True).bitwise


def test_an_opaque_module_is_one_node_with_its_own_random_position(folder: Path) -> None:
    graph = captured_file(write("experts", folder)).capture.graph
    nodes = [node for node in graph.nodes if node.opaque]
    assert [(node.kind, node.target) for node in nodes] == [("call_module", f"blocks.{n}.moe") for n in range(3)]
    assert [(node.random_position, node.num_random) for node in nodes] == [(0, 1), (2, 1), (4, 1)]
    assert all(len(node.parameters) == 26 for node in nodes)
    assert str(nodes[0].spec) == "float32[s0, 6, 8]"
    assert nodes[0].spec.requires_grad


@pytest.mark.parametrize(("before", "after"), [("topk(2)", "topk(1)"), ("Dropout(0.2)", "Dropout(0.3)")])
def test_other_code_of_an_opaque_module_changes_the_digest(
    before: str, after: str, folder: Path, tmp_path: Path
) -> None:
    digest = captured_file(write("experts", folder)).capture.graph.digest
    assert captured_file(write("experts", tmp_path)).capture.graph.digest == digest
    changed = write("experts", tmp_path / "..", CASES["experts"].replace(before, after))
    assert capture(load_workload(LoadOptions(str(changed)))).graph.digest != digest


def test_buffers_that_an_opaque_module_writes_are_recorded(folder: Path) -> None:
    graph = captured_file(write("statistics", folder)).capture.graph
    names = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen", "mean")
    assert set(next(n for n in graph.nodes if n.opaque).buffers_written) == {f"one.{name}" for name in names}


def test_the_stage_file_calls_the_module_of_the_user(folder: Path, tmp_path: Path) -> None:
    subject = captured_file(write("experts", folder))
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path)
    text = (pipeline.run.stages / "stage_0.py").read_text()
    assert "with opaque_call(self, 0):\n" in text
    assert "= self.blocks[0].moe(" in text


def test_opaque_modules_are_reported_with_the_reason(folder: Path) -> None:
    notes = captured_file(write("experts", folder)).capture.notes
    assert notes[0].startswith("blocks.0.moe and 2 more modules run as they are: their path depends on the data (")
    notes = captured_file(write("augmented", folder)).capture.notes
    assert notes[0].startswith("aug runs as it is: its path is chosen at random (")


REFUSED = {
    "never": ("experts", "never", "--opaque auto, which runs such a module as it is"),
    "unknown": ("experts", "blocks.0.moo", "unknown module 'blocks.0.moo'"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_opaque_modules_are_refused_if_the_option_forbids_them(case: str, folder: Path) -> None:
    name, policy, text = REFUSED[case]
    workload = load_workload(LoadOptions(str(write(name, folder)), opaque=policy))
    with pytest.raises(TraceError) as caught:
        capture(workload)
    assert text in str(caught.value)


def test_a_named_module_is_opaque(folder: Path) -> None:
    workload = load_workload(LoadOptions(str(write("experts", folder)), opaque="first,blocks.1"))
    capture(workload)
    assert workload.spec.opaque_modules == ("blocks.0.moe", "blocks.1", "blocks.2.moe")


def test_the_option_reaches_the_capture(folder: Path, tmp_path: Path) -> None:
    words = ["profile", str(write("augmented", folder)), "--work-dir", str(tmp_path), "--microbatch-sizes", "2"]
    refused = CliRunner().invoke(autopipe, [*words, "--opaque", "never", "--json"])
    assert refused.exit_code == 1
    assert "--opaque auto" in json.loads(refused.stdout)["error"]["try"]
    measured = CliRunner().invoke(autopipe, [*words, "--json"])
    assert measured.exit_code == 0
    assert "aug runs as it is: its path is chosen at random" in measured.stdout
    workload = json.loads((tmp_path / "profile.json").read_text())["workload"]
    assert (workload["opaque"], workload["opaque_modules"]) == ("auto", ["aug"])


ROOT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.4:
                continue
            x = x + layer(x)
        return x
"""
IN_PLACE = """
class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=-1))
        return F.linear(x * 2 if x.sum() > 0 else x, self.weight)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), Normalized()

    def forward(self, x):
        return self.norm(self.first(x))
"""
COUNTER = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x * 2 if x.sum() > 0 and self.calls % 3 else x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.counting = nn.Linear(8, 8), Counting()

    def forward(self, x):
        return self.counting(self.first(x))
"""
BORROWING = """
class Borrowing(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.layer, self.others = nn.Linear(8, 8), [other]

    def forward(self, x):
        assert self.others[0].weight.shape[0] == 8
        return self.layer(x) @ self.others[0].weight if x.sum() > 0 else self.layer(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.borrowing = Borrowing(self.last)

    def forward(self, x):
        return self.last(self.borrowing(x))
"""
AUXILIARY = """
class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.extra = nn.Linear(8, 8), 0.0

    def forward(self, x):
        self.extra = x.square().mean()
        return self.layer(x * 2 if x.sum() > 0 else x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.routers = nn.Linear(8, 8), nn.ModuleList(Router() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for router in self.routers:
            x = router(x)
        return x + sum(router.extra for router in self.routers)
"""


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        (AUXILIARY, "made by a call that cannot be recorded", "return extra from the forward of routers.0"),
        (
            BORROWING,
            "depends on the numbers in the batch",
            "its forward reads last.weight, which belongs to another module",
        ),
        (ROOT, "the model draws from Python's random", "move these lines into a separate module"),
        (IN_PLACE, "depends on the numbers in the batch", "its forward changes parameter norm.weight in place"),
        (COUNTER, "each forward pass changes model.counting.calls, and counting runs as it is", "buffer"),
    ],
)
def test_modules_that_cannot_be_opaque_are_refused(text: str, what: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        path = write("refused", tmp_path, textwrap.dedent(text))
        capture(load_workload(LoadOptions(str(path))), changing=lambda: Survey(None, "a module runs as it is"))
    assert what in caught.value.what
    assert remedy in caught.value.remedy


def test_the_remedy_for_a_parameter_of_another_module_works(tmp_path: Path) -> None:
    """An opaque module may read its own parameters, and the shapes of others."""
    text = BORROWING.replace("[other]", "[other]; self.kept = other.weight")
    text = text.replace(" @ self.others[0].weight", " * self.others[0].weight.shape[0] @ self.kept")
    workload = load_workload(LoadOptions(str(write("borrowed", tmp_path, text))))
    capture(workload)
    assert workload.spec.opaque_modules == ("borrowing",)


def test_the_remedy_for_code_in_the_root_module_works(tmp_path: Path) -> None:
    inner = ROOT.replace("class Model", "class Stack")
    text = f"""{inner}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack, self.last = Stack(), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.stack(x))
"""
    workload = load_workload(LoadOptions(str(write("root", tmp_path, text))))
    assert capture(workload).exact
    assert workload.spec.opaque_modules == ("stack",)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_missing_gradient_differs_from_every_gradient(dtype: torch.dtype) -> None:
    like = torch.ones(2, 3, dtype=dtype).t()
    sent = absent(like)
    assert (sent.shape, sent.dtype, sent.stride()) == (like.shape, like.dtype, like.stride())
    assert is_absent(sent.clone())
    assert not is_absent(like)
    assert not is_absent(torch.full_like(like, float("nan")))
    assert not is_absent(torch.zeros(0, dtype=dtype))


def test_seeds_of_different_positions_differ() -> None:
    inside = {seed_of(seed_of(0, 0, 0, place), 0, 0, k) for place in range(50) for k in range(50)}
    assert len(inside) == 2500
    assert not inside & {seed_of(0, 0, j, k) for j in range(50) for k in range(50)}
