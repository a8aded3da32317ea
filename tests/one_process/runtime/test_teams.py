"""Ranks that are teams, with members as threads: as plain training within rounding, and the same in any layout."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle
from support.pipelines import build, captured, minibatches, plan_for, profile_of

from autopipe.errors import AutopipeError
from autopipe.ir.teams.axis_sets import choose
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.directory import directory_of
from autopipe.trace.axes import find_axes
from autopipe.trace.axes.sums_over_members import joined
from autopipe.trace.teams import of_team

BATCH = 4


@functools.cache
def subject_of(sample: str, size: int):
    whole = captured(sample)
    axes = choose(whole.capture.graph, find_axes(whole.capture).axes, size)
    assert axes
    return profile_of(whole.workload, of_team(whole.capture, axes, size))


def trained(sample: str, size: int, ranks: int, folder, schedule="1f1b", **job: Any):
    """Return the weights of each member after three steps, in the order of processes."""
    subject = subject_of(sample, size)
    plan = dataclasses.replace(plan_for(subject, ranks, schedule, 2, BATCH), team=size)
    pipeline = build(subject, plan, folder, **job)
    sessions = pipeline.train(minibatches(subject.workload, 3, BATCH))
    members: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
    for process, session in enumerate(sessions):
        members[process % size].update(session.tensors())
    return subject, members


@pytest.mark.parametrize("sample", ["gpt", "hf_llama"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_team_trains_as_plain_training(sample, clip, tmp_path):
    subject, members = trained(sample, 2, 1, tmp_path, clip_grad_norm=clip)
    items = minibatches(subject.workload, 3, BATCH)
    for schedule in ("1f1b", "gpipe"):
        _, others = trained(sample, 2, 2, tmp_path / schedule, schedule, clip_grad_norm=clip)
        for one, other in zip(members, others, strict=True):
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    cut = subject.capture.shards
    assert all(torch.equal(members[0][name], members[1][name]) for name in members[0] if name not in cut)
    spec = captured(sample).workload.spec
    _, model, _ = oracle.train(
        Path(spec.target),
        items,
        2,
        arguments={k: float(v) if "." in v else int(v) for k, v in spec.arguments.items()},
        clip_norm=clip,
    )
    for name, expected in model.named_parameters():
        if name in cut:
            parts = [one[name] for one in members]
            actual = joined(parts, cut[name].place, cut[name].size)
        else:
            actual = members[0][name]
        # AdamW divides by the root of the square of gradients: those of rounding may step either way
        assert torch.allclose(actual, expected.detach(), rtol=0, atol=2e-3), name
        assert float((actual - expected.detach()).abs().mean()) < 2e-6, name


def replicated(subject, replicas):
    """Return a plan of one stage on several teams of two members."""
    plan = dataclasses.replace(plan_for(subject, 1, "1f1b", 2, BATCH), team=2)
    stage = dataclasses.replace(plan.stages[0], ranks=tuple(range(replicas)))
    return dataclasses.replace(plan, stages=(stage,), num_ranks=replicas)


def test_replicas_that_are_teams_divide_the_optimizer_state(tmp_path):
    """The weights are those without a division, bit for bit, and the state resumes in a team without replicas."""
    subject = subject_of("gpt", 2)
    items = minibatches(subject.workload, 3, BATCH)
    complete = replicated(subject, 2)
    divided = dataclasses.replace(complete, shard_optimizer=True)
    results = []
    for name, plan in (("complete", complete), ("divided", divided)):
        pipeline = build(subject, plan, tmp_path / name, save=True)
        pipeline.train(items[:2])
        other = dataclasses.replace(plan_for(subject, 2, "1f1b", 2, BATCH), team=2)
        resumed = build(subject, other, tmp_path / name, save=True, start_step=2)
        sessions = resumed.train(items, steps=3)
        results.append([session.tensors() for session in sessions])
    for one, two in zip(*results, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("replicas", "spoiled"), [(1, "norm.bias"), (2, "norm.bias"), (2, "blocks.0.mlp.0.weight")])
def test_a_checkpoint_refuses_members_that_differ(replicas, spoiled, tmp_path):
    """A whole tensor is equal on all members, a part on one member of all replicas. The last process is changed."""
    subject = subject_of("gpt", 2)
    pipeline = build(subject, replicated(subject, replicas), tmp_path, save=True)

    def hook(process):
        def change(stage, step, parameters):
            if process == 2 * replicas - 1 and step == 1:
                parameters[spoiled].grad += 1e-3

        return change

    items = minibatches(subject.workload, 2, BATCH)
    pipeline.train(items[:1])
    with pytest.raises(AutopipeError, match=f"no longer equal: number {2 * replicas - 1} .* in .*{spoiled}"):
        pipeline.train(items, on_gradients=hook)


@pytest.mark.parametrize("sample", ["gpt", "hf_llama"])
def test_checkpoints_move_between_layouts(sample, tmp_path):
    """A step in each of four layouts gives the weights of plain training, and tensors keep names and shapes."""
    whole = captured(sample)
    items = minibatches(whole.workload, 4, BATCH)
    layouts = [(1, 1, "1f1b"), (2, 1, "1f1b"), (2, 2, "gpipe"), (1, 2, "1f1b")]
    folder = tmp_path / "run"
    for step, (size, ranks, schedule) in enumerate(layouts):
        subject = whole if size == 1 else subject_of(sample, size)
        plan = dataclasses.replace(plan_for(subject, ranks, schedule, 2, BATCH), team=size)
        job = {"save": True, "start_step": step if step else -1}
        pipeline = build(subject, plan, folder, **job)
        sessions = pipeline.train(items, steps=step + 1)
        shapes = Checkpoint(directory_of(pipeline.run.checkpoints, step + 1)).shapes()
        for name, parameter in whole.capture.module.named_parameters():
            assert shapes[f"model.{name}"] == tuple(parameter.shape)
    spec = whole.workload.spec
    arguments = {key: float(text) if "." in text else int(text) for key, text in spec.arguments.items()}
    _, model, _ = oracle.train(Path(spec.target), items, 2, arguments=arguments)
    weights = pipeline.weights(sessions)
    for name, expected in model.named_parameters():
        assert float((weights[name] - expected.detach()).abs().mean()) < 2e-6, name
