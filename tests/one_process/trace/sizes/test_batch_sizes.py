"""A capture holds for every batch size: sizes stay symbolic, and branches on a size are noticed."""

import pytest
import torch
import torch.nn.functional as F
from support.chain import in_stages
from support.models.trace import Base, Toy, vectors
from torch import nn

from autopipe.errors import RunError, TraceError
from autopipe.trace import capture, replay
from autopipe.trace.record.follow import follow


def test_the_batch_size_is_not_a_constant_of_the_graph():
    class Reshaping(Base):
        def forward(self, x):
            n, width = x.shape
            h = self.a(x).view(n * 2, width // 2)
            return (h + torch.zeros(2 * len(x), 1)).view(n, -1).pow(2).sum() / n

    captured = capture(Toy(Reshaping, vectors))
    assert captured.exact
    assert {"operator.mul"} <= {node.target for node in captured.graph.nodes if node.spec is None}


def test_a_square_of_the_batch_size_is_recognised():
    class Pairs(Base):
        def forward(self, x):
            h = self.a(x)
            return (h @ h.T).view(x.shape[0] * x.shape[0]).pow(2).mean()

    captured = capture(Toy(Pairs, vectors))
    assert captured.exact
    assert {node.spec.shape for node in captured.graph.nodes if node.target == "view"} == {("s0*s0",)}


def test_nonlinear_arithmetic_is_recorded_with_a_symbolic_size():
    class Halves(Base):
        def forward(self, x):
            half = x.shape[0] // 2
            return self.a(x)[:half].pow(2).mean() / (1 + 1 / x.shape[0])

    captured = capture(Toy(Halves, vectors))
    assert captured.exact
    assert "symbolic" in captured.method


def test_a_branch_on_the_batch_size_is_noted_and_guarded():
    class Threshold(Base):
        def forward(self, x):
            h = self.a(x)
            if x.shape[0] > 64:
                h = h * 2
            return h.pow(2).mean()

    captured = capture(Toy(Threshold, vectors))
    assert any("if x.shape[0] > 64" in note for note in captured.notes)
    with pytest.raises(RunError, match="takes another branch of the model"):
        replay(captured.module, {"x": torch.ones(100, 4)}, (0, 0, 0))


def test_padding_does_not_fix_the_batch_size():
    class Padding(Base):
        def forward(self, x):
            h = F.pad(self.a(x), (1, 1))
            return torch.baddbmm(h[:, None], h[:, None], torch.eye(6).expand(x.shape[0], 6, 6)).pow(2).mean()

    assert capture(Toy(Padding, vectors)).exact


def test_padding_keeps_a_symbolic_batch_size_symbolic():
    class Padding(Base):
        def forward(self, x):
            h = F.pad(self.a(x), (1, 1))
            return torch.baddbmm(h[:, None], h[:, None], torch.eye(6).expand(x.shape[0], 6, 6)).pow(2).mean()

    work = Toy(Padding, vectors)
    recording = follow(work, work.build_model(), work.example_item(5))
    shapes = {node.target: node.meta["val"].shape for node in recording.graph.nodes if "val" in node.meta}
    assert isinstance(shapes[F.pad][0], torch.SymInt)
    assert isinstance(shapes[torch.baddbmm][0], torch.SymInt)


def test_the_batch_size_differs_from_every_size_of_the_model():
    class Five(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 6)

        def forward(self, x):
            return self.a(x).flatten().view(-1, 6).pow(2).mean()

    captured = capture(Toy(Five, lambda n, g: {"x": torch.randn(n, 5, generator=g)}))
    assert captured.graph.symbols[0].hint == 7
    assert captured.graph.inputs[0].spec.shape == ("s0", 5)


class PerSample(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(torch.cat([row.mean(0, keepdim=True) for row in x])).pow(2).mean()


def test_a_loop_over_the_samples_is_refused_with_its_line():
    with pytest.raises(TraceError, match="accepts only batches of") as caught:
        capture(Toy(PerSample, lambda n, g: {"x": torch.randn(n, 3, 4, generator=g)}))
    assert "for row in x" in caught.value.where


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, count):
        return (self.a(x) + x.new_zeros(count, 1)).pow(2).mean()


def test_a_number_that_counts_the_samples_is_named():
    with pytest.raises(TraceError, match="accepts only batches of") as caught:
        capture(Toy(Counted, lambda n, g: {"x": torch.randn(n, 4, generator=g), "count": n}))
    assert "['count'] of the batch counts the samples" in caught.value.remedy


class ContiguousWhenLarge(Base):
    """The graph differs between two batch sizes, so sizes are symbolic; the noise is drawn with ``generator=None``."""

    def forward(self, x):
        h = self.a(x)
        if h.shape[0] >= 64:
            h = h.contiguous()
        noise = torch.randn(h.shape, generator=None, device=h.device, dtype=h.dtype, layout=torch.strided)
        return self.b(h + noise).pow(2).mean()


def test_noise_of_a_symbolic_size_may_pass_no_generator(tmp_path):
    _, graph = in_stages(Toy(ContiguousWhenLarge, vectors), tmp_path, 3)
    assert "symbolic" in graph.captured_by
