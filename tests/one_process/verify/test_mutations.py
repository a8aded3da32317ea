"""Bugs injected into the runtime, each of which a comparison with plain training must find.

Most of them have been in pipeline frameworks that were in use; none is visible in a loss curve.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.pipelines import captured
from support.schedule_cases import Case, compared

from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Schedule, ScheduleSpec
from autopipe.runtime import assembly, rows
from autopipe.runtime.batches.graph_variants import GraphVariants
from autopipe.runtime.batches.recording import Microbatch
from autopipe.runtime.checkpoint import state
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step import gradients
from autopipe.runtime.step.reduction import GradientSum
from autopipe.runtime.step.stepper import Stepper
from autopipe.runtime.step.ties import TieExchange
from autopipe.runtime.weights import WeightVersions
from autopipe.schedules.rows import unflushed, warmups

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """``plant`` injects the bug. ``last``: samples of the last minibatch of 8. ``clip``: the norm to clip to."""

    plant: Plant
    case: Case
    last: int = 5
    clip: float = 0.0
    inexact_ties: bool = False


def found_equal(mutation: Mutation, folder: Path) -> bool:
    subject = captured(mutation.case.model)
    plan: Plan = mutation.case.plan(subject)
    if mutation.inexact_ties:
        assert plan.ties
        plan = replace(plan, ties=tuple(replace(tie, exact=False) for tie in plan.ties))
    comparison = compared(subject, plan, folder, steps=3, last=mutation.last, clip_grad_norm=mutation.clip)
    return comparison.equal


def loss_scaled_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageRunner._starts

    def starts(self, flight, gradients):
        return original(self, flight, {value: g * flight.factor for value, g in gradients.items()})

    monkeypatch.setattr(StageRunner, "_starts", starts)


def only_the_last_microbatch_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageRunner.backward

    def backward(self, key, gradients):
        for parameter in self.versions.in_use.values():
            parameter.grad = None
        return original(self, key, gradients)

    monkeypatch.setattr(StageRunner, "backward", backward)


def microbatches_weighed_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GraphVariants.microbatches

    def microbatches(*arguments, **options) -> list[Microbatch]:
        parts = original(*arguments, **options)
        return [replace(part, factor=1 / len(parts)) for part in parts]

    monkeypatch.setattr(GraphVariants, "microbatches", microbatches)


def stash_one_version_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version v holds the values of version v - 1."""
    original = WeightVersions._add
    before: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, version, tensors):
        values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        original(self, version, before.get(id(self), values))
        before[id(self)] = values

    monkeypatch.setattr(WeightVersions, "_add", add)


def gradients_of_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the data of tensors that autograd has saved."""
    original = WeightVersions.end_step

    def end_step(self):
        original(self)
        for leaves in self._leaves.values():
            for name, leaf in leaves.items():
                leaf.data = self.masters[name].data.clone()

    monkeypatch.setattr(WeightVersions, "end_step", end_step)


def vertical_sync_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages but the first read a version that is newer by one."""
    original = rows.make

    def make(name: str, request: ScheduleSpec) -> Schedule:
        right = original(name, request)
        if name != "pipedream":
            return right
        warmup = warmups(request)
        staleness = [right.staleness[0], *(delta - 1 for delta in right.staleness[1:])]
        return unflushed(name, right.request, warmup, staleness, [count + 1 for count in warmup])

    for part in (rows, assembly):
        monkeypatch.setattr(part, "make", make)


def tied_copy_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageRunner._collect

    def collect(self, flight):
        gradients = original(self, flight)
        return {v: torch.zeros_like(g) if v.startswith("parameter:") else g for v, g in gradients.items()}

    monkeypatch.setattr(StageRunner, "_collect", collect)


def tied_sum_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieExchange, "sum_gradients", lambda self, stage: None)


def tied_copy_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieExchange, "broadcast_values", lambda self, stage: None)


def replicas_averaged_as_if_they_had_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the mean of each replica over its own samples, and then the mean of the replicas."""
    forward, start = StageRunner.forward, GradientSum._start_next
    own = threading.local()  # a rank is a thread

    def sharing(self, key, inputs, received, factor, *more):
        own.share = getattr(own, "share", 0.0) + factor
        return forward(self, key, inputs, received, factor, *more)

    def averaged(self, leaves):
        for name in self.buckets[self._next].names:
            if leaves[name].grad is not None:
                leaves[name].grad /= len(self.group) * own.share
        start(self, leaves)
        if self._next == len(self.buckets):
            own.share = 0.0

    monkeypatch.setattr(StageRunner, "forward", sharing)
    monkeypatch.setattr(GradientSum, "_start_next", averaged)


def replica_gradients_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "replica_syncs", lambda *arguments: {})


def bucket_started_before_its_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends a bucket at its first gradient."""
    original = GradientSum._noting

    def noting(self, name, leaves):
        note = original(self, name, leaves)

        def early(leaf):
            self._of[name].missing.clear()
            note(leaf)

        return early

    monkeypatch.setattr(GradientSum, "_noting", noting)


def clip_norm_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(contributed, values, trainable, dtype, agree):
        return torch.linalg.vector_norm(values)

    monkeypatch.setattr(gradients, "global_norm", norm)


def recompute_with_other_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageRunner._starts

    def starts(self, flight, gradients):
        flight.draws = (flight.draws[0] + 1, *flight.draws[1:])
        return original(self, flight, gradients)

    monkeypatch.setattr(StageRunner, "_starts", starts)


def randomness_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageRunner._run

    def run(self, flight):
        flight.draws = (self.seed + self.stage.INDEX, *flight.draws[1:])
        return original(self, flight)

    monkeypatch.setattr(StageRunner, "_run", run)


def recompute_on_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageRunner._starts

    def starts(self, flight, gradients):
        for name, leaf in self.versions._leaves[self.versions.newest].items():
            self.versions.in_use[name].data = leaf.data
        return original(self, flight, gradients)

    monkeypatch.setattr(StageRunner, "_starts", starts)


def batch_norm_updated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageRunner, "_frozen_buffers", lambda self, values: contextlib.nullcontext())


def gradients_kept_over_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stepper.step

    def step(self, stage, minibatch):
        kept = {name: p.grad for name, p in self.parameters(stage).items()}
        original(self, stage, minibatch)
        for name, parameter in self.parameters(stage).items():
            parameter.grad = kept[name]

    monkeypatch.setattr(Stepper, "step", step)


def last_gradient_of_a_replica_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica drops a gradient in the last step, after which its weights are not compared with a gradient."""
    original = gradients.GradientFinisher.finish

    def finish(self, minibatch, owned):
        if self.rank == 0 and minibatch == 2:
            for parameters in owned.values():
                for parameter in parameters.values():
                    parameter.grad = None
        return original(self, minibatch, owned)

    monkeypatch.setattr(gradients.GradientFinisher, "finish", finish)


def weights_of_the_second_replica_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stepper.step

    def step(self, stage, minibatch):
        original(self, stage, minibatch)
        if self.gradients.rank == 1 and minibatch == 2:
            for parameter in self.parameters(stage).values():
                parameter.data.copy_(parameter.data.bfloat16())

    monkeypatch.setattr(Stepper, "step", step)


def state_of_the_last_step_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stepper.step

    def step(self, stage, minibatch):
        original(self, stage, minibatch)
        if minibatch == 2 and self.optimizers[stage] is not None:
            self.optimizers[stage].state.clear()

    monkeypatch.setattr(Stepper, "step", step)


def statistics_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "buffers", lambda runner: {})


def staleness_one_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rows.make

    def make(name: str, request: ScheduleSpec) -> Schedule:
        right = original(name, request)
        warmup = warmups(request)
        return unflushed(name, right.request, warmup, [delta + 1 for delta in right.staleness], [3] * len(warmup))

    for part in (rows, assembly):
        monkeypatch.setattr(part, "make", make)


GPT = Case("1f1b", "gpt", (1, 1, 1), "p + 1")
RESNET = Case("1f1b", "resnet", (1, 1), "p + 1")
STASHED = Case("pipedream", "resnet", (1, 1, 1), "1")
MUTATIONS = {
    "loss scaled per stage": Mutation(loss_scaled_per_stage, RESNET),
    "only the last microbatch trained": Mutation(only_the_last_microbatch_trained, RESNET),
    "microbatches weighed equally": Mutation(microbatches_weighed_equally, RESNET),
    "gradients kept over the step": Mutation(gradients_kept_over_the_step, RESNET),
    "stash one version off, pipedream": Mutation(stash_one_version_off, STASHED),
    "stash one version off, 2bw": Mutation(stash_one_version_off, replace(RESNET, schedule="2bw")),
    "stashed weights overwritten, pipedream": Mutation(gradients_of_the_newest_version, STASHED),
    "stashed weights overwritten, 2bw": Mutation(gradients_of_the_newest_version, replace(RESNET, schedule="2bw")),
    "vertical sync off by one": Mutation(vertical_sync_off_by_one, replace(STASHED, vertical_sync=True)),
    "tied copy not summed": Mutation(tied_copy_not_summed, GPT),
    "tied copy not summed at the step": Mutation(tied_sum_left_out, GPT, inexact_ties=True),
    "tied copy not renewed": Mutation(tied_copy_not_renewed, GPT),
    "replicas averaged wrongly, ragged batch": Mutation(
        replicas_averaged_as_if_they_had_the_same_samples, Case("1f1b", "gpt", (2, 1), "2p")
    ),
    "replica gradients not added": Mutation(replica_gradients_not_added, Case("1f1b", "gpt", (1, 2), "2p")),
    "bucket started before its last gradient": Mutation(
        bucket_started_before_its_last_gradient, Case("1f1b", "gpt", (1, 2), "2p")
    ),
    "last gradient of a replica left out": Mutation(
        last_gradient_of_a_replica_left_out, Case("1f1b", "gpt", (2, 1), "2p")
    ),
    "weights of a replica rounded": Mutation(weights_of_the_second_replica_rounded, Case("1f1b", "gpt", (2, 1), "2p")),
    "state of the last step lost": Mutation(state_of_the_last_step_lost, RESNET),
    "statistics not reported": Mutation(statistics_not_reported, RESNET),
    "staleness one higher, 2bw": Mutation(staleness_one_higher, replace(RESNET, schedule="2bw")),
    "clip norm per stage": Mutation(clip_norm_per_stage, RESNET, clip=0.5),
    "recompute with other randomness": Mutation(recompute_with_other_randomness, replace(GPT, recompute=("stage",))),
    "randomness of the rank": Mutation(randomness_of_the_rank, GPT),
    "a unit with other randomness": Mutation(recompute_with_other_randomness, replace(GPT, recompute=("block",))),
    "recompute on the newest version": Mutation(
        recompute_on_the_newest_version, replace(STASHED, recompute=("stage",))
    ),
    "BatchNorm updated twice by a unit": Mutation(batch_norm_updated_twice, replace(RESNET, recompute=("block",))),
    "BatchNorm updated twice": Mutation(batch_norm_updated_twice, replace(RESNET, recompute=("stage",))),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_injected_bug_is_found_and_without_it_all_is_equal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation = MUTATIONS[name]
    assert found_equal(mutation, tmp_path / "right")
    mutation.plant(monkeypatch)
    assert not found_equal(mutation, tmp_path / "wrong")


def test_the_wrong_average_of_replicas_shows_only_with_ragged_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the reason why every comparison ends with a ragged minibatch
    mutation = replace(MUTATIONS["replicas averaged wrongly, ragged batch"], last=8)
    mutation.plant(monkeypatch)
    assert found_equal(mutation, tmp_path)
