"""A backward in stages sums in the order of plain autograd: hand-written stages, without tracing and transport."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopipe.ir.messages import tied
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.weights import WeightVersions
from autopipe.stage import Stage


class Plain(nn.Module):
    """Reads x once in its stage, twice in the middle and twice at the end; uses the table first and last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(7, 5))
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def first(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table[ids] * 1.7
        return x, torch.tanh(self.a(x))

    def middle(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(h) * x) + x * 0.3

    def end(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return ((self.c(h) * x + x.sin()) @ self.table.t()).pow(2).mean()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, h = self.first(ids)
        return self.end(x, self.middle(x, h))


class First(Stage):
    INPUTS, SENDS = ("ids",), ("x", "h")

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return Plain.first(self, ids)  # type: ignore[arg-type]


class Middle(Stage):
    RECEIVES, SENDS = ("x", "h"), ("h2",)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (Plain.middle(self, x, h),)  # type: ignore[arg-type]


class End(Stage):
    RECEIVES, RETURNS = ("x", "h2"), ("loss",)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (Plain.end(self, x, h),)  # type: ignore[arg-type]


def runners(recompute: str) -> list[StageRunner]:
    stage_runners = []
    for kind, names, owned in ((First, ("table", "a"), True), (Middle, ("b",), None), (End, ("table", "c"), False)):
        model, stage = Plain(), kind()
        for name in names:
            setattr(stage, name, getattr(model, name))
        ties = {} if owned is None else {"table": owned}
        gradients = frozenset({"x", "h", "h2"})
        versions = WeightVersions(stage, 0)
        stage_runners.append(
            StageRunner(stage, versions, seed=0, carries_gradient=gradients, exact_ties=ties, recompute=recompute)
        )
    return stage_runners


def pipeline(stages: list[StageRunner], ids: torch.Tensor, j: int, factor: float, *, halves: bool) -> None:
    first, middle, end = stages
    key = (0, j)
    sent = {name: tensor.clone() for name, tensor in first.forward(key, [ids], {}, factor).items()}
    sent2 = middle.forward(key, [], {name: tensor.clone() for name, tensor in sent.items()}, factor)
    end.forward(key, [], {"x": sent["x"].clone(), "h2": sent2["h2"].clone()}, factor)

    def back(runner: StageRunner, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not halves:
            return runner.backward(key, gradients)
        input_gradients = runner.backward_inputs(key, gradients)
        runner.backward_weights(key)
        return input_gradients

    from_end = back(end, {})
    assert from_end.keys() == {"x", "h2", tied("table")}
    from_middle = back(middle, {"x": from_end["x"], "h2": from_end["h2"]})  # the gradient of x follows its chain
    back(first, {**from_middle, tied("table"): from_end[tied("table")]})


@pytest.mark.parametrize("recompute", ["never", "stage"])
@pytest.mark.parametrize("halves", [False, True])
def test_gradients_equal_plain_autograd_bit_for_bit(recompute: str, halves: bool) -> None:
    batches = [torch.randint(0, 7, (n,), generator=torch.Generator().manual_seed(n)) for n in (4, 4, 3)]
    total = sum(len(b) for b in batches)
    plain = Plain()
    for ids in batches:
        (plain(ids) * (len(ids) / total)).backward()
    stages = runners(recompute)
    for j, ids in enumerate(batches):
        pipeline(stages, ids, j, len(ids) / total, halves=halves)
    actual = {name: p.grad for stage in reversed(stages) for name, p in stage.stage.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert torch.equal(actual[name], parameter.grad), name


def test_star_shaped_gradients_would_not_be_equal() -> None:
    # the reason for chains: summed per stage first, the last bits differ
    ids = torch.randint(0, 7, (64,), generator=torch.Generator().manual_seed(1))
    plain = Plain()
    plain(ids).backward()
    first, middle, end = runners("never")
    sent = first.forward((0, 0), [ids], {}, 1.0)
    sent2 = middle.forward((0, 0), [], {name: t.clone() for name, t in sent.items()}, 1.0)
    end.forward((0, 0), [], {"x": sent["x"].clone(), "h2": sent2["h2"].clone()}, 1.0)
    from_end = end.backward((0, 0), {})
    from_middle = middle.backward((0, 0), {"h2": from_end["h2"]})
    star = from_middle["x"] + from_end["x"]
    first.backward((0, 0), {"x": star, "h": from_middle["h"], tied("table"): from_end[tied("table")]})
    actual = dict(first.stage.named_parameters())["table"].grad
    assert torch.allclose(actual, plain.table.grad)
    assert not torch.equal(actual, plain.table.grad)


def test_a_missing_gradient_is_sent_as_zeros() -> None:
    class Deaf(Stage):
        RECEIVES, RETURNS = ("x",), ("loss",)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return ((x.detach() * self.w).sum(),)

    stage = Deaf()
    stage.w = nn.Parameter(torch.ones(1))
    runner = StageRunner(
        stage, WeightVersions(stage, 0), seed=0, carries_gradient=frozenset({"x"}), exact_ties={}, recompute="never"
    )
    runner.forward((0, 0), [], {"x": torch.ones(2)}, 1.0)
    (gradient,) = runner.backward((0, 0), {}).values()
    assert torch.equal(gradient, torch.zeros(2))


def test_a_recomputed_forward_does_not_update_statistics_again() -> None:
    class Norm(Stage):
        INPUTS, RETURNS = ("x",), ("loss",)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self.norm(x).pow(3).sum(),)

    stage, x = Norm(), torch.randn(8, 3)
    stage.norm = nn.BatchNorm1d(3)
    runner = StageRunner(
        stage, WeightVersions(stage, 0), seed=0, carries_gradient=frozenset(), exact_ties={}, recompute="stage"
    )
    runner.forward((0, 0), [x], {}, 1.0)
    after = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    runner.backward((0, 0), {})
    assert after["norm.num_batches_tracked"].item() == 1
    assert all(torch.equal(buffer, after[name]) for name, buffer in stage.named_buffers())
