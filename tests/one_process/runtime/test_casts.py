"""One 16-bit cast of a weight serves all microbatches of its version, and the gradients are those of separate casts."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.pipelines import (
    Captured,
    assert_equals_oracle,
    build,
    captured_file,
    measured_with,
    minibatches,
    plan_for,
    profile_of,
)
from support.samples import SAMPLES
from torch import nn
from torch.nn import functional as F

from autopipe.casts import CastObserver
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.measure import estimate, measure
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.peaks import with_peaks
from autopipe.runtime.casts import StageCasts
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.weights import WeightVersions
from autopipe.stage import Stage
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

CONTEXT, WIDTH = 128, 128  # of the sample gpt.py
SHARED = {"a.weight", "a.bias", "b.weight", "b.bias"}


class Layers(Stage):
    """A stage whose forward casts ``a`` and ``b`` once, ``twice`` in two regions, and reads ``norm`` as it is."""

    RECEIVES, RETURNS = ("x",), ("loss",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.twice = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.twice(F.relu(self.b(F.relu(self.a(x)))))
        h = h.float() * self.scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (self.twice(h).float().pow(2).mean(),)


NAMES = frozenset(Layers().state_dict())


def runner_of(stage: Layers, staleness: int = 0, recompute: str = "never") -> StageRunner:
    versions = WeightVersions(stage, staleness)
    return StageRunner(
        stage,
        versions,
        seed=0,
        carries_gradient=frozenset({"x"}),
        exact_ties={},
        recompute=recompute,
        cast_once=NAMES,
    )


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def plain_gradients(stage: Layers, microbatches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a loop without shared casts."""
    for x in microbatches:
        (stage(x)[0] * 0.25).backward()
    return {name: parameter.grad.clone() for name, parameter in stage.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("recompute", ["never", "stage"])
def test_gradients_are_those_of_a_cast_in_every_forward(recompute: str, halves: bool) -> None:
    stage = Layers()
    expected, microbatches = plain_gradients(copy.deepcopy(stage), batches(4)), batches(4)
    runner = runner_of(stage, recompute=recompute)
    for j, x in enumerate(microbatches[:3]):
        runner.forward((0, j), [], {"x": x}, 0.25)
    for j in range(4):
        if halves:
            runner.backward_inputs((0, j), {})
            runner.backward_weights((0, j))
        else:
            runner.backward((0, j), {})
        if j == 0:
            runner.forward((0, 3), [], {"x": microbatches[3]}, 0.25)
    assert {name: p.grad for name, p in stage.named_parameters()}.keys() == expected.keys()
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in stage.named_parameters())


def kept_casts(runner: StageRunner, key: tuple[int, int], x: torch.Tensor) -> set[int]:
    """Run a forward and return the memory of the 16-bit matrices that its backward keeps."""
    memory = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.shape == (8, 8):
            memory.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        runner.forward(key, [], {"x": x}, 0.25)
    return memory


def test_microbatches_in_flight_share_the_casts_of_their_version() -> None:
    runner = runner_of(Layers())
    first, second, third = (kept_casts(runner, (0, j), x) for j, x in enumerate(batches(3)))
    # ``a`` and ``b`` are shared, also with the first forward, which was observed; ``twice`` is cast in both regions
    assert runner.versions.casts.keys() == SHARED
    shared = {runner.versions.casts[name].untyped_storage().data_ptr() for name in ("a.weight", "b.weight")}
    assert first & second & third == shared
    assert len(second) == len(third) == len(shared) + 2
    assert not (first | second) & (third - shared)


def test_a_step_drops_the_casts_of_the_old_weights() -> None:
    stage, steps = Layers(), 3
    plain = copy.deepcopy(stage)
    runner = runner_of(stage)
    for step in range(steps):
        for parameter in plain.parameters():
            parameter.grad = None
        expected = plain_gradients(plain, batches(2))
        for j, x in enumerate(batches(2)):
            runner.forward((step, j), [], {"x": x}, 0.25)
            runner.backward((step, j), {})
        assert all(torch.equal(p.grad, expected[name]) for name, p in stage.named_parameters()), step
        runner.versions.begin_step(step)
        assert not runner.versions.casts
        for module in (stage, plain):
            torch.optim.SGD(module.parameters(), 0.1).step()
        for parameter in stage.parameters():
            parameter.grad = None
        runner.versions.end_step()


def test_each_weight_version_has_its_own_casts() -> None:
    stage = Layers()
    plain = copy.deepcopy(stage)
    runner = runner_of(stage, staleness=1)
    versions, (one, two) = runner.versions, batches(2)
    runner.forward((0, 0), [], {"x": one}, 0.25)
    versions.begin_step(0)
    with torch.no_grad():
        for master in versions.masters.values():
            master.mul_(1.5)
    versions.end_step()
    versions.use(1)
    runner.forward((1, 0), [], {"x": two}, 0.25)
    versions.use(0)
    old = versions.casts["a.weight"]
    assert torch.equal(old, plain.a.weight.bfloat16())
    runner.backward((0, 0), {})
    expected = plain_gradients(copy.deepcopy(plain), [one])
    assert torch.equal(versions.in_use["a.weight"].grad, expected["a.weight"])
    versions.use(1)
    assert torch.equal(versions.casts["a.weight"], (plain.a.weight * 1.5).bfloat16())
    versions.take_gradients(1)
    assert versions.versions == (1,)


def test_modules_have_their_parameters_after_a_forward_and_after_an_error() -> None:
    stage = Layers()
    before = dict(stage.named_parameters())
    runner = runner_of(stage)
    for j, x in enumerate(batches(2)):
        runner.forward((0, j), [], {"x": x}, 0.25)
    with pytest.raises(RuntimeError, match="shape"):
        runner.forward((0, 2), [], {"x": torch.randn(4, 3)}, 0.25)
    after = dict(stage.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def observed(forward: object, *parameters: nn.Parameter) -> list[bool]:
    """Return for each parameter whether a forward reads it through one cast alone."""
    assert callable(forward)
    with CastObserver() as observer, torch.autocast("cpu", dtype=torch.bfloat16):
        forward()
    shared = {id(parameter) for parameter, _ in observer.only_cast()}
    return [id(parameter) in shared for parameter in parameters]


def test_only_a_weight_that_is_read_through_one_cast_is_shared() -> None:
    x, w = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
    frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    half = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))
    assert observed(lambda: x @ w, w) == [True]
    assert observed(lambda: (x @ w, x @ w), w) == [True]  # autocast keeps the cast until its region ends
    assert observed(lambda: (x @ frozen, x @ frozen), frozen) == [True]
    assert observed(lambda: (x @ w, w * 2), w) == [False]
    assert observed(lambda: x @ w.t(), w) == [False]
    assert observed(lambda: w.double(), w) == [False]
    assert observed(lambda: x @ half, half) == [False]


def test_a_recurrent_layer_keeps_its_own_weights() -> None:
    class Recurrent(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (self.a(self.rnn(x[:, None])[0]).float().pow(2).mean(),)

    stage = Recurrent()
    runner = StageRunner(
        stage,
        WeightVersions(stage, 0),
        seed=0,
        carries_gradient=frozenset({"x"}),
        exact_ties={},
        cast_once=frozenset(stage.state_dict()),
    )
    expected = plain_gradients(copy.deepcopy(stage), batches(2))
    for j, x in enumerate(batches(2)):
        runner.forward((0, j), [], {"x": x}, 0.25)
    for j in range(2):
        runner.backward((0, j), {})
    assert runner.versions.casts.keys() == {"a.weight", "a.bias"}
    assert all(torch.equal(dict(stage.named_parameters())[name].grad, grad) for name, grad in expected.items())


CASTS_ITSELF = """
import torch
from torch import nn

class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            CODE
            return x + torch.tanh(x.bfloat16() @ w).float() + self.bias

def build_model():
    return nn.Sequential(Cast(), Cast(), Cast())

def data(batch_size):
    while True:
        yield torch.randn(batch_size, 8), torch.randn(batch_size, 8)

def loss(output, target):
    return (output - target).pow(2).mean()
"""


@pytest.mark.parametrize(
    "code",
    [
        "w = self.w.bfloat16(); w.mul_(0.5)",
        "w = self.w.to(torch.bfloat16).masked_fill_(torch.eye(8, dtype=torch.bool), 0.25)",
        "torch.set_grad_enabled(False); w = self.w.bfloat16(); torch.set_grad_enabled(True)",
    ],
    ids=["changed in place", "masked in place", "without gradient"],
)
def test_a_cast_in_the_code_of_the_model_is_not_shared(tmp_path: Path, code: str) -> None:
    path = tmp_path / "net.py"
    path.write_text(CASTS_ITSELF.replace("CODE", code))
    subject = captured_file(path)
    plan = plan_for(subject, 2, "1f1b", 4, 8)
    pipeline, items = build(subject, plan, tmp_path / "run"), minibatches(subject.workload, 2, 8)
    assert_equals_oracle(plan, items, pipeline.weights(pipeline.train(items)))


SEVERAL_READERS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.sigmoid(self.query(x)) * torch.tanh(self.key(x)) * self.value(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return x

def build_model():
    return Net()

def data(batch_size):
    while True:
        yield torch.randn(batch_size, 8), torch.randn(batch_size, 8)

def loss(output, target):
    return (output - target).pow(2).mean()
"""


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "pipedream"])
@pytest.mark.parametrize("recompute", ["never", "stage"])
def test_gradients_of_several_readers_of_a_received_value_add_in_float32(
    tmp_path: Path, schedule: str, recompute: str
) -> None:
    path = tmp_path / "net.py"
    path.write_text(SEVERAL_READERS)
    subject = captured_file(path)
    plan = plan_for(subject, 4, schedule, 4, 8)
    sent = {boundary.value for boundary in plan.boundaries}
    assert max(sum(value in node.inputs for node in subject.capture.graph.nodes) for value in sent) == 4
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    pipeline, items = build(subject, plan, tmp_path / "run"), minibatches(subject.workload, 2, 8)
    assert_equals_oracle(plan, items, pipeline.weights(pipeline.train(items)))


@pytest.fixture(scope="module")
def subject() -> Captured:
    workload = load_workload(LoadOptions(str(SAMPLES / "gpt.py"), arguments={"blocks": "2"}, precision="bf16"))
    return profile_of(workload, capture(workload, batch_size=5))


def test_the_profile_counts_a_cast_once_and_not_for_each_microbatch(subject: Captured) -> None:
    graph = subject.capture.graph
    profile = measure(subject.capture, subject.workload, device="cpu", microbatch_sizes=(2,))
    counted = estimate(subject.capture, subject.workload, microbatch_sizes=(2,))
    casts = profile.measurements[0].casts
    assert casts == counted.measurements[0].casts
    linear = {name for name in graph.parameters if "attention" in name or "mlp" in name}
    assert {name: casts.get(name) for name in linear} == {
        name: graph.parameters[name].num_bytes({}) // 2 for name in linear
    }
    assert casts.keys() <= graph.cast_once
    assert "tokens.weight" not in casts  # an embedding and a product read it
    saved = {name: cost.saved_bytes for name, cost in profile.measurements[0].costs.items()}
    assert saved == {name: cost.saved_bytes for name, cost in counted.measurements[0].costs.items()}
    product = next(node for node in graph.nodes if "blocks.1.mlp.2.weight" in node.parameters)
    assert saved[product.name] == 2 * CONTEXT * 4 * WIDTH * 2  # its input alone, for a microbatch of two


def test_a_stage_needs_one_cast_for_all_microbatches_in_flight(
    subject: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = measure(subject.capture, subject.workload, device="cpu", microbatch_sizes=(1,))
    machine = Cluster((Level("host", 2, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
    options = PlanOptions(num_ranks=2, batch_size=4, num_microbatches=4, schedule="gpipe", recompute="never")
    plan = with_peaks(make_plan(profile, machine, options), profile)
    shared = measured_with(subject, plan, tmp_path / "shared")
    monkeypatch.setattr(StageCasts, "in_place", lambda casts, code, cast_once: contextlib.nullcontext())
    separate = measured_with(subject, plan, tmp_path / "separate")
    for stage in plan.stages:
        casts = sum(profile.measurements[0].casts.get(name, 0) for name in stage.parameters)
        assert separate[stage.index]["bytes"] - shared[stage.index]["bytes"] > 1.5 * casts
        assert shared[stage.index]["bytes"] <= stage.peak_bytes
