"""Stages that take turns on a device: equal to plain training bit for bit, and within a budget of memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.pipelines import BATCH, Captured, build, captured, captured_file, measured_with, minibatches
from support.samples import NAMES
from support.schedule_cases import compared
from support.slow import mostly_slow
from torch import nn

from autopipe.errors import DoesNotFitError, PlanError, RunError, WorkerError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import Instruction, Op
from autopipe.measure import measure
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.spilled.costs import copied_bytes
from autopipe.runtime.spilling.copies import ThreadLane
from autopipe.runtime.spilling.flat_buffers import Flat
from autopipe.runtime.spilling.spiller import Spiller
from autopipe.runtime.spilling.stage_memory import SpilledPart, refuse_unmovable

SAMPLES = mostly_slow(NAMES, ("gpt", "resnet"))
MLP = """
import torch
from torch import nn


def build_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(60)]
    return nn.Sequential(*layers, nn.Linear(64, 1))


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def data(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        yield torch.randn(batch_size, 64, generator=generator), torch.randn(batch_size, 1, generator=generator)


def optimizer(parameters):
    return %s
"""
ADAM, MOMENTUM = "torch.optim.AdamW(parameters)", "torch.optim.SGD(parameters, 0.01, momentum=0.9)"
ADAFACTOR = "torch.optim.Adafactor(parameters)"


def device_with(memory: int) -> Cluster:
    return Cluster((Level("host", 1, 1e9, 1e-6),), (ClusterDevice("cpu", memory),), "test")


def plan_within(profile: Profile, memory: int, m: int, batch: int, **changes: object) -> Plan:
    options = PlanOptions(num_ranks=1, batch_size=batch, num_microbatches=m, schedule="spilled", **changes)  # type: ignore[arg-type]
    return make_plan(profile, device_with(memory), options)


TIGHTEST: dict[tuple[str, int, int], int] = {}


def tightest(profile: Profile, m: int, batch: int) -> int:
    """Return about the least memory that a plan fits: less than 4/3 of it."""
    key = profile.graph.digest, m, batch
    if key not in TIGHTEST:
        memory = plan_within(profile, 0, m, batch).stages[0].peak_bytes * 2
        with contextlib.suppress(DoesNotFitError):
            while True:
                plan_within(profile, memory * 3 // 4, m, batch)
                memory = memory * 3 // 4
        TIGHTEST[key] = memory
    return TIGHTEST[key]


@functools.cache
def subject_of(sample: str) -> tuple[Captured, Profile]:
    subject = captured(sample)
    sizes = tuple({-(-BATCH[sample] // m) for m in (2, 4)})
    return subject, measure(subject.capture, subject.workload, device="cpu", microbatch_sizes=sizes)


@pytest.mark.parametrize("sample", SAMPLES)
def test_training_within_the_tightest_budget_equals_plain_training(sample: str, tmp_path: Path) -> None:
    subject, profile = subject_of(sample)
    plan = plan_within(profile, tightest(profile, 2, BATCH[sample]), 2, BATCH[sample])
    assert len(plan.stages) > 1
    plain = compared(subject, plan, tmp_path / "plain", last=0)
    clipped = compared(subject, plan, tmp_path / "clipped", last=0, clip_grad_norm=0.1, ema=0.9)
    assert plain.bitwise and clipped.bitwise


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_memory_stays_within_budgets(sample: str, tmp_path: Path) -> None:
    """Five budgets of each sample: the runtime refuses to exceed them, and needs no more than is planned."""
    subject, profile = subject_of(sample)
    m, batch = 4, BATCH[sample]
    least = tightest(profile, m, batch)
    for number, factor in enumerate((1.0, 1.2, 1.5, 2.0, 4.0)):
        budget = round(least * factor)
        plan = plan_within(profile, budget, m, batch)
        clip = 1.0 if number % 2 else 0.0
        pipeline = build(subject, plan, tmp_path / str(number), device_budget_bytes=budget, clip_grad_norm=clip)
        (session,) = pipeline.train(minibatches(subject.workload, 3, batch))
        assert session.executor.footprint is not None
        measured = {fields["stage"]: fields["bytes"] for fields in session.executor.footprint.report()}
        assert all(measured[stage.index] <= stage.peak_bytes * 1.08 for stage in plan.stages)


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    mostly_slow(itertools.product((ADAM, MOMENTUM, ADAFACTOR), (0.0, 0.05)), {(MOMENTUM, 0.0), (ADAFACTOR, 0.05)}),
)
def test_a_model_eight_times_as_large_as_its_budget(optimizer: str, clip: float, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MLP % optimizer)
    subject = captured_file(tmp_path / "model.py", batch_size=4)
    profile = measure(subject.capture, subject.workload, device="cpu", microbatch_sizes=(4,))
    state = round(profile.trained_bytes * (2 + profile.optimizer_bytes_per_byte))  # weights, gradients, state
    plan = plan_within(profile, state // 8, 2, 8)
    run = tmp_path / "run"
    assert compared(subject, plan, run, last=0, clip_grad_norm=clip).bitwise
    limited = build(subject, plan, tmp_path / "limited", device_budget_bytes=state // 8, clip_grad_norm=clip)
    (session,) = limited.train(minibatches(subject.workload, 6, 8))
    assert session.executor.spiller is not None
    copied = session.executor.spiller.bytes_per_step()
    assert copied == pytest.approx(copied_bytes(plan, profile, late=bool(clip)), rel=0.1)


def test_more_than_the_budget_is_an_error_that_names_the_stage(tmp_path: Path) -> None:
    subject, profile = subject_of("gpt")
    plan = plan_within(profile, tightest(profile, 2, 6), 2, 6)
    pipeline = build(subject, plan, tmp_path, device_budget_bytes=max(s.peak_bytes for s in plan.stages) // 2)
    with pytest.raises(WorkerError, match=r"stage \d+ needs .* of the device, and its budget is"):
        pipeline.train(minibatches(subject.workload, 1, 6))


def test_peaks_are_reported_for_the_whole_device(tmp_path: Path) -> None:
    subject, profile = subject_of("gpt")
    plan = plan_within(profile, tightest(profile, 2, 6), 2, 6)
    peaks = measured_with(subject, plan, tmp_path)
    assert sorted(peaks) == [stage.index for stage in plan.stages]
    for stage in plan.stages:
        assert 0.4 * stage.peak_bytes < peaks[stage.index]["bytes"] <= stage.peak_bytes


def test_an_inexact_tie_and_sixteen_bits_are_as_close_as_without_spilling(tmp_path: Path) -> None:
    subject, profile = subject_of("gpt")
    plan = plan_within(profile, tightest(profile, 2, 6), 2, 6)
    assert plan.ties
    inexact = replace(plan, ties=tuple(replace(tie, exact=False) for tie in plan.ties))
    assert compared(subject, inexact, tmp_path / "inexact", last=0).equal
    assert compared(subject, inexact, tmp_path / "late", last=0, clip_grad_norm=0.1).equal


def test_a_stage_that_keeps_its_activations_is_refused(tmp_path: Path) -> None:
    subject, profile = subject_of("gpt")
    plan = plan_within(profile, 0, 2, 6)
    kept = replace(plan, stages=tuple(replace(stage, recompute="never") for stage in plan.stages))
    with pytest.raises(PlanError, match="a spilled stage must recompute its forward"):
        build(subject, kept, tmp_path).train(minibatches(subject.workload, 1, 6))


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_tensors_in_a_flat_block_keep_their_order_in_memory() -> None:
    tensors = [torch.randn(3, 5).t(), torch.randn(7), torch.randn(2, 1, 4).expand(2, 3, 4), torch.empty(0, 2)]
    flat = Flat(tensors)
    block = torch.zeros(flat.num_bytes, dtype=torch.uint8)
    for tensor, view in zip(tensors, flat.views(block), strict=True):
        assert view.stride() == tensor.stride() and view.shape == tensor.shape
        assert view.data_ptr() % 64 == 0 or not view.numel()
    assert flat.fits(tensors) and not flat.fits(tensors[1:])


def step(spiller: Spiller, stage: int) -> None:
    for op in (Op.LOAD, Op.LOAD_OPTIMIZER):
        spiller.carry_out(Instruction(op, stage, 0))
    spiller.ready(Instruction(Op.STEP, stage, 0))
    with torch.no_grad():
        for parameter in spiller.parts[stage].parameters:
            parameter += 1
    spiller.stepped(stage)
    spiller.carry_out(Instruction(Op.UNLOAD, stage, 0))


def test_stages_that_are_given_back_are_on_the_host_with_what_was_changed() -> None:
    parameters = [nn.Parameter(torch.full((100,), float(stage))) for stage in range(4)]
    slots: dict[int, list[torch.Tensor]] = {stage: [] for stage in range(4)}
    parts = {s: SpilledPart(s, [parameters[s]], functools.partial(slots.get, s, [])) for s in range(4)}
    spiller = Spiller(parts, torch.device("cpu"))
    for round_ in range(3):
        for stage in (0, 1, 2, 3, 2, 1, 0):
            step(spiller, stage)
        slots[round_] = [torch.full((5,), 7.0)]
        spiller.settle()
        assert [int(p[0]) for p in parameters] == [s + (round_ + 1) * (1 if s == 3 else 2) for s in range(4)]
    assert all(int(tensor[0]) == 7 for tensors in slots.values() for tensor in tensors)
    spiller.close()


def test_weights_that_are_replaced_or_assigned_on_the_host_are_brought_again() -> None:
    parameters = [nn.Parameter(torch.zeros(10)) for _ in range(2)]
    spiller = Spiller({s: SpilledPart(s, [parameters[s]], list) for s in range(2)}, torch.device("cpu"))
    step(spiller, 0)
    parameters[0].data = torch.full((10,), 5.0)  # as a checkpoint does
    step(spiller, 0)
    spiller.assign(0, parameters[0], torch.full((10,), 20.0))
    step(spiller, 0)
    spiller.settle()
    assert parameters[0].tolist() == [21.0] * 10
    spiller.close()


def test_parameters_that_share_memory_are_refused() -> None:
    memory = torch.zeros(20)
    shared = [nn.Parameter(memory[:10]), nn.Parameter(memory[5:])]
    with pytest.raises(RunError, match="stage 3 has parameters that share memory"):
        refuse_unmovable(3, shared)
    with pytest.raises(RunError, match="stage 3 has parameters that share memory"):
        refuse_unmovable(3, [nn.Parameter(memory)], [memory[3:]])
    with pytest.raises(RunError, match=r"with layout torch\.sparse_coo"):
        refuse_unmovable(3, [nn.Parameter(torch.eye(3).to_sparse())])


def test_a_failed_copy_is_raised_by_what_waits_for_it() -> None:
    def failing(pairs: object) -> None:
        raise OSError("no memory")

    lane = ThreadLane(None, failing)
    copy = lane.copy(Instruction(Op.LOAD, 0, 0), [(torch.zeros(1), torch.zeros(1))], [])
    with pytest.raises(OSError, match="no memory"):
        copy.wait()
    lane.close()
