"""Microbatches sum to the batch, whatever the divisor of the loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle
from support.models.losses import CASES, MODEL, Batch, LossCase, samples
from support.pipelines import Captured, build, captured_file, minibatches, plan_for

from autopipe.generate import load_divisor
from autopipe.ir.microbatch_loss import Shares
from autopipe.runtime.step.loss_weights import divisors_of, shares_of
from autopipe.verify.full_batch import full_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("losses")


def captured(case: LossCase, folder: Path) -> Captured:
    path = folder / f"model_{CASES.index(case)}.py"
    if not path.exists():
        path.write_text(MODEL % (case.body, case.ignored))
    return captured_file(path, batch_size=7)


def of_minibatch(subject: Captured, item: Batch, parts: list[Batch], plan: Any, folder: Path) -> Shares:
    graph = subject.capture.graph
    divisor = load_divisor(folder, graph.divisor, graph_digest=graph.digest, plan_digest=plan.digest)
    return shares_of(divisors_of(divisor, item, parts), [samples(part) for part in parts])


def gradients(subject: Captured, model: torch.nn.Module, parts: list[Batch], factors: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the weighted sum; a part with divisor 0 is left out."""
    model.zero_grad(set_to_none=True)
    for part, factor in zip(parts, factors, strict=True):
        if factor:
            (subject.workload.loss(model, part)[0] * factor).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weighted_microbatches_equal_the_complete_batch(case: LossCase, folder: Path) -> None:
    subject = captured(case, folder)
    item = next(subject.workload.items(7))
    model = subject.workload.build_model()
    for count in (1, 2, 3, 7):  # with 7, two microbatches have divisor 0
        plan = plan_for(subject, 2, "gpipe", count, 7)
        run = build(subject, plan).run
        parts = subject.workload.split(item, count)
        shares = of_minibatch(subject, item, parts, plan, run.stages)
        by_samples = tuple(samples(part) / samples(item) for part in parts)
        if case.divisor is None:
            assert shares.factors == by_samples
            assert count == 1 or case.name != "tokens and elements" or shares.disagreement > 0.01
            continue
        assert shares.factors == pytest.approx([case.divisor(part) / case.divisor(item) for part in parts], rel=1e-12)
        if case.divisor is samples:
            assert shares.factors == by_samples  # bit for bit
        wanted = gradients(subject, model, [item], [1.0])
        actual = gradients(subject, model, parts, shares.factors)
        assert wanted.keys() == actual.keys()
        for name, gradient in wanted.items():
            scale = max(float(gradient.abs().max()), 1.0)
            assert float((gradient - actual[name]).abs().max()) <= 1e-12 * scale, name


IN_STAGES = ["ignore_index", "module with class weights", "mask by hand", "sum", "label smoothing"]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", IN_STAGES)
def test_stages_train_as_the_weighted_plain_loop_does(name: str, schedule: str, folder: Path) -> None:
    """Bit for bit as a loop that weighs by hand, and as a loop over whole batches up to rounding."""
    case = next(case for case in CASES if case.name == name)
    subject = captured(case, folder)
    pipeline = build(subject, plan_for(subject, 2, schedule, 7, 7))
    items = minibatches(subject.workload, 3, 7, last=6)
    weights = pipeline.weights(pipeline.train(items))
    path = Path(subject.workload.spec.target)
    loop = plain(path, items, 7, case.divisor)
    for tensor_name, tensor in loop.state_dict().items():
        assert torch.equal(weights[tensor_name], tensor), tensor_name
    whole = plain(path, items, 1, case.divisor)
    for tensor_name, tensor in whole.state_dict().items():
        torch.testing.assert_close(weights[tensor_name], tensor, rtol=1e-9, atol=1e-9)


def plain(path: Path, items: list[Batch], count: int, divisor: Callable[[Batch], float] | None) -> torch.nn.Module:
    """Train by hand: a microbatch has the weight ``divisor(part) / divisor(batch)``."""
    assert divisor is not None
    torch.manual_seed(0)
    model = oracle.load(path).build_model().train()
    optimizer = torch.optim.AdamW(model.parameters())
    for item in items:
        for part in oracle.chunks(item, count):
            if divisor(part):
                (model(**part)["loss"] * (divisor(part) / divisor(item))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def test_correctly_weighted_microbatches_differ_from_the_full_batch_by_rounding(folder: Path) -> None:
    cpu = torch.device("cpu")
    errors = {}
    for name in ("ignore_index", "sum", "contrastive"):
        subject = captured(next(case for case in CASES if case.name == name), folder)
        item = next(subject.workload.items(7))
        plan = plan_for(subject, 2, "gpipe", 7, 7)
        run = build(subject, plan).run
        parts = subject.workload.split(item, 7)
        factors = of_minibatch(subject, item, parts, plan, run.stages).factors
        errors[name] = full_batch(subject.workload, item, parts, factors, cpu).error
        stepped = full_batch(subject.workload, item, parts, factors, cpu, step=True)
        assert len(stepped.parameters) >= 4
        worst = max(pair.gradient or 0.0 for pair in stepped.parameters)
        assert (worst < 1e-9) == (name != "contrastive")
        assert (max(pair.weight or 0.0 for pair in stepped.parameters) > 1e-4) == (name == "contrastive")
    assert errors["ignore_index"] < 1e-12 > errors["sum"]
    assert errors["contrastive"] > 0.1
