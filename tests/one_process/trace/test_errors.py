import logging
import random
import re
import socket
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.models.trace import Toy, tokens, vectors
from torch import nn

from autopipe.devices import reraise_failure_of_device
from autopipe.errors import RunError, TraceError
from autopipe.guards import expect
from autopipe.trace import capture
from autopipe.trace.verify import verify


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)


class Branch(Base):
    def forward(self, x):
        h = self.a(x)
        if h.sum() > 0:  # the branch
            h = h * 2
        return h.pow(2).mean()


class IntRead(Base):
    def forward(self, x):
        return self.a(x)[: int(x.argmax())].pow(2).mean()  # the read


class NumpyDetour(Base):
    def forward(self, x):
        return (self.a(x) * float(np.mean(x.numpy()))).mean()  # the detour


class OutsideParameter(Base):
    outside = torch.ones(4, requires_grad=True)

    def forward(self, x):
        return (self.a(x) * self.outside).mean()  # the outsider


class Hook(Base):
    def forward(self, x):
        h = self.a(x)
        h.register_hook(lambda gradient: gradient * 2)  # the hook
        return h.mean()


class Coin(Base):
    def forward(self, x):
        h = self.a(x)
        scale = 2.0 if random.random() < 0.5 else 1.0  # the coin
        return (h * scale).pow(2).mean()


class NumpyCoin(Base):
    def forward(self, x):
        return (self.a(x) * np.random.rand()).pow(2).mean()  # the coin


class OneBatchSize(Base):
    def forward(self, x):
        total = self.a(x)[0] * 0
        for row in range(x.shape[0]):  # the loop
            total = total + self.a(x)[row]
        return total.mean()


class DataAssignment(Base):
    def forward(self, x):
        h = self.a(x)
        h.data = h * 2  # the assignment
        return h.mean()


class ChangedParameter(Base):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-1, 1)  # the change
        return self.a(x).mean()


class ChangedConstant(Base):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x):
        self.count.add_(1)  # the change
        return (self.a(x) * self.count).mean()


class ReboundBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x):
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(4.0) / 4  # the table
        return (self.a(x) * self.table.view(1, 4)).mean()


class InnerBackward(Base):
    def forward(self, x):
        loss = self.a(x).mean()
        loss.backward()  # the backward
        return loss


class Penalty(Base):
    def forward(self, x):
        x = x.detach().requires_grad_()
        h = self.a(x).sum()
        return torch.autograd.grad(h, x, create_graph=True)[0].mean()  # the grad


class Failing(Base):
    def forward(self, x):
        return self.a(x[:, :3]).mean()  # the mistake


class OwnGenerator(Base):
    def forward(self, x):
        return (self.a(x) + torch.rand(4, generator=torch.Generator())).mean()  # the generator


CASES = {
    Branch: ("__bool__: its result depends on the numbers in the batch", "the branch", "torch.where"),
    IntRead: ("__int__: its result depends", "the read", "keep the value as a tensor"),
    NumpyDetour: ("numpy", "the detour", ""),
    OutsideParameter: ("that requires a gradient is not a parameter of the model", "the outsider", "nn.Parameter"),
    Hook: ("a tensor hook (register_hook)", "the hook", "torch.autograd.Function"),
    Coin: ("draws from Python's random in its forward", "the coin", "layerdrop=0.0"),
    NumpyCoin: ("draws from numpy.random in its forward", "the coin", "draw with torch"),
    OneBatchSize: ("accepts only batches of 5 samples: dimension 0 of x", "the loop", "x.shape[0]"),
    DataAssignment: ("x.data = y", "the assignment", "x.copy_(y)"),
    ChangedParameter: ("the forward changes parameter a.weight in place", "the change", "register_buffer"),
    ChangedConstant: ("neither parameter nor buffer", "the change", "register_buffer"),
    ReboundBuffer: ("buffer table is bound to a tensor of another shape", "the table", "run the model on one batch"),
    InnerBackward: ("backward() inside the forward", "the backward", "trainer"),
    Penalty: ("torch.autograd.grad inside the forward", "the grad", "remove the call"),
    Failing: ("the model itself fails on a batch of 5 (['x']: float32[5, 4]): Runtime", "the mistake", "one batch"),
    OwnGenerator: ("a torch.Generator that the model owns", "the generator", "omit generator="),
}


@pytest.mark.parametrize("model", CASES, ids=lambda model: model.__name__)
def test_unsupported_code_is_refused_with_its_line_and_an_edit(model):
    what, line, remedy = CASES[model]
    with pytest.raises(TraceError) as caught:
        capture(Toy(model, vectors))
    error = caught.value
    assert what in error.what
    assert re.search(r"test_errors\.py:\d+: ", error.where)
    assert line in error.where
    assert remedy in error.remedy


def _global_state():
    return {
        "call": nn.Module.__call__,
        "training": vars(nn.Module).get("training"),
        "apply": torch.autograd.Function.__dict__["apply"],
        "enter": torch.autocast.__enter__,
        "exit": torch.autocast.__exit__,
        "compiling": (torch.compiler.is_compiling, torch.compiler.is_exporting),
        "checkpoint": torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        "reentrant": torch.utils.checkpoint.CheckpointFunction.__dict__.get("apply"),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "functions": torch.overrides._get_current_function_mode_stack(),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "len": globals().get("len"),
    }


@pytest.mark.parametrize("model", CASES, ids=lambda model: model.__name__)
def test_a_failure_leaves_torch_and_the_model_unchanged(model):
    work = Toy(model, vectors)
    built = work.build_model()
    tensors = {name: id(value) for name, value in built.state_dict(keep_vars=True).items()}
    before = _global_state()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), pytest.raises(TraceError):
        capture(work, model=built)
    assert _global_state() == before
    assert {name: id(value) for name, value in built.state_dict(keep_vars=True).items()} == tensors
    assert all(type(p) is nn.Parameter for p in built.parameters())


def test_a_failure_inside_no_grad_and_autocast_exits_both():
    class Inside(Base):
        def forward(self, x):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                return self.a(x)[: x.sum().item() > 0]

    before = _global_state()
    with pytest.raises(TraceError):
        capture(Toy(Inside, vectors))
    assert _global_state() == before


def test_a_scripted_module_is_refused_with_its_line():
    class Scripted(Base):
        def __init__(self):
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

        def forward(self, x):
            return self.inner(self.a(x)).mean()  # the scripted

    with pytest.raises(TraceError, match=r"inner was compiled by torch\.jit\.script") as caught:
        capture(Toy(Scripted, vectors))
    assert "the scripted" in caught.value.where
    assert "remove torch.jit.script" in caught.value.remedy


def test_a_lazy_module_is_refused_with_its_parameter():
    model = nn.Sequential(nn.LazyLinear(3))
    work = Toy(lambda: model, lambda n, g: {"input": vectors(n, g)["x"]}, loss=lambda out, item: out.mean())
    with pytest.raises(TraceError, match=r"parameter 0\.weight has no shape yet"):
        capture(work, model=model)


def test_a_graph_that_differs_from_the_model_is_an_error_with_both_numbers():
    sender, numbers = socket.socketpair()
    sender.sendall(bytes(range(1, 256)))

    class Counting(Base):
        """Its result depends on the number of calls, which the system keeps: what is left in a socket."""

        def forward(self, x):
            (steps,) = numbers.recv(1)
            return (self.a(x) * steps).pow(2).mean()

    with sender, numbers, pytest.raises(TraceError) as caught:
        capture(Toy(Counting, vectors))
    assert re.match(
        r"the captured graph is not the model: loss differs, \d+\.\d+ and \d+\.\d+ \(batch of 3, seed 0\)",
        caught.value.what,
    )


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Reversal(Base):
    def forward(self, x):
        return Reversed.apply(self.a(x)).pow(2).mean()


def test_a_wrong_gradient_with_an_equal_loss_is_found():
    work = Toy(Reversal, vectors)
    model = work.build_model()
    captured = capture(work, model=model)
    node = next(node for node in captured.module.graph.nodes if node.name == "reversed_")
    node.target = torch.clone  # the graph of a tracer that records inside the function
    with pytest.raises(TraceError, match=r"the captured graph is not the model: gradient of a\.weight differs"):
        verify(work, model, captured.module, captured.graph, [work.example_item(5)])


def test_a_guarded_decision_is_checked_at_every_step():
    captured = capture(Toy(Branch, vectors), allow_data_dependent=True)
    assert "decisions kept" in captured.method
    assert any("the branch" in note for note in captured.notes)
    guard = next(node for node in captured.graph.nodes if node.target == "autopipe.guards.expect")
    assert not guard.input_only
    recorded = next(n for n in captured.module.graph.nodes if n.name == guard.name).args[1]
    with pytest.raises(RunError, match="this batch takes another branch of the model"):
        expect(torch.tensor(not recorded), recorded, "model.py:3")
    expect(torch.tensor(recorded), recorded, "model.py:3")


def test_there_is_no_guard_if_nothing_depends_on_the_data():
    class Simple(Base):
        def forward(self, x):
            return F.relu(self.a(x)).mean()

    captured = capture(Toy(Simple, vectors), allow_data_dependent=True)
    assert captured.notes == ()
    assert "decisions" not in captured.method


def test_a_loss_that_couples_samples_is_noted_with_the_amount():
    class Contrastive(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8)

        def forward(self, ids):
            h = F.normalize(self.embed(ids).mean(1), dim=-1)
            return F.cross_entropy(h @ h.T, torch.arange(len(h)))

    captured = capture(Toy(Contrastive, tokens))
    assert captured.exact
    assert captured.coupling.error > 0.1
    assert "couples the samples" in captured.coupling.text()


def test_a_loss_of_batch_statistics_is_noted():
    class Whitened(Base):
        def forward(self, x):
            h = self.a(x)
            h = (h - h.mean(0)) / (h.std(0) + 0.1)  # of the batch
            return (h - x).abs().mean()

    captured = capture(Toy(Whitened, vectors))
    assert captured.coupling.error > 1e-3


def test_draws_from_a_numpy_generator_of_the_model_are_refused():
    class OwnGenerator(Base):
        def forward(self, x):
            return (self.a(x) * float(np.random.default_rng().random())).pow(2).mean()

    with pytest.raises(TraceError, match="the captured graph is not the model"):
        capture(Toy(OwnGenerator, vectors))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return (self.b(torch.tanh(self.a(x))).float() - x).pow(2).mean()


class Failing(TwoLayers):
    def forward(self, x):
        torch.set_grad_enabled(False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x[: x.shape[0] // 2 + 1])
            return h[: int(h.sum())].mean()


def test_a_refused_model_leaves_nothing_behind_for_the_next_capture():
    item = vectors(5, torch.Generator().manual_seed(1))
    failing = Toy(Failing, lambda n, g: item if n == 5 else vectors(n, g))
    with pytest.raises(TraceError):
        capture(failing)
    assert vars(item["x"]) == {}  # no mark of a symbolic dimension
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert capture(Toy(TwoLayers, lambda n, g: item if n == 5 else vectors(n, g))).exact


class WrongShape(TwoLayers):
    """Fails with fake tensors only."""

    def forward(self, x):
        return torch.mm(self.a(x), self.a(x).t() if torch.compiler.is_compiling() is False else self.a(x)).mean()


def test_torchs_log_of_a_failed_fake_call_is_suppressed(caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(TraceError, match="recorded in mm"):
        capture(Toy(WrongShape, vectors))
    assert [record for record in caplog.records if record.name.startswith("torch._sub")] == []


def test_only_an_error_that_a_device_caused_is_raised_again() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__ = one  # an error may be its own cause, or that of its cause
    reraise_failure_of_device(one)
    one.__cause__, other.__cause__ = other, one
    reraise_failure_of_device(one)
    one.__cause__, other.__cause__ = other, RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(ValueError, match="one"):
        reraise_failure_of_device(one)
