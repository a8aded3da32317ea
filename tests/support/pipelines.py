"""Pipelines for tests: a sample model captured once, cut evenly by node count, run with ranks as threads."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopipe.commands.trusted_code import record_stages
from autopipe.generate import generate
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile
from autopipe.planning import PlanOptions, make_plan
from autopipe.runtime.context import RunContext
from autopipe.runtime.events import Silent
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.session import RankSession
from autopipe.runtime.transport.threads import run_in_threads
from autopipe.schedules import make
from autopipe.trace import Capture, capture
from autopipe.workload import LoadOptions, Workload, load_workload
from support import oracle
from support.samples import SAMPLES

# smaller than the defaults of the samples: the same layers, but fewer and narrower
ARGUMENTS: dict[str, dict[str, str]] = {
    "gpt": {"blocks": "3", "width": "32", "dropout": "0.1"},
    "resnet": {},
    "seq2seq_lstm": {},
    "unet": {},
    "vgg16": {},
    "hf_llama": {"layers": "3", "width": "32"},
}
BATCH = {"gpt": 6, "resnet": 12, "seq2seq_lstm": 6, "unet": 6, "vgg16": 8, "hf_llama": 6}


@dataclass(frozen=True)
class Captured:
    """A sample that has been captured. ``profile``: every node costs the same, whatever the machine."""

    workload: Workload
    capture: Capture
    profile: Profile


@functools.cache
def captured(sample: str) -> Captured:
    """Capture and verify a sample, once per test process."""
    path = SAMPLES / f"{sample}.py"
    return captured_file(path, tuple(sorted(ARGUMENTS.get(sample, {}).items())))


@functools.cache
def captured_file(path: Path, arguments: tuple[tuple[str, str], ...] = (), batch_size: int = 5) -> Captured:
    """Capture any model file."""
    workload = load_workload(LoadOptions(str(path), arguments=dict(arguments)))
    return profile_of(workload, capture(workload, batch_size=batch_size))


def profile_of(workload: Workload, taken: Capture) -> Captured:
    """Return a capture with a profile in which every node costs the same."""
    costs = {node.name: NodeCost(1e-3, 2e-3, 1000, 1000) for node in taken.graph.nodes}
    profile = Profile(workload.spec, taken.graph, Device("cpu", "test", 0), (Measurement(1, costs),))
    return Captured(workload, taken, profile)


def plan_for(
    subject: Captured, num_stages: int, schedule: str, num_microbatches: int, batch_size: int, **options: Any
) -> Plan:
    """Plan a pipeline without replicas."""
    cluster = Cluster((Level("host", num_stages, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
    requested = PlanOptions(
        num_ranks=num_stages, batch_size=batch_size, num_microbatches=num_microbatches, schedule=schedule, **options
    )
    return make_plan(subject.profile, cluster, requested)


@dataclass(frozen=True)
class Pipeline:
    """A generated pipeline in its own directory."""

    captured: Captured
    plan: Plan
    context: RunContext
    run: RunDirectory
    job: Job

    def train(self, items: Sequence[Any], steps: int | None = None, **options: Any) -> list[RankSession]:
        """Train to a step, by default one step for each minibatch, with ranks as threads; return the sessions."""
        job = replace(self.job, steps=len(items) if steps is None else steps)
        return run_in_threads(
            self.run, job, self.context, lambda session: session.train(), items=lambda epoch: iter(items), **options
        )

    def weights(self, sessions: Sequence[RankSession]) -> dict[str, Any]:
        """Return every tensor of the trained model by name."""
        return {name: tensor for session in sessions for name, tensor in session.tensors().items()}


def build(subject: Captured, plan: Plan, folder: Path | None = None, **job: Any) -> Pipeline:
    """Generate the stage files of a plan into a run directory."""
    run = RunDirectory(folder or Path(tempfile.mkdtemp(prefix="autopipe-test-")))
    settings = Job(**{"steps": 0, "epochs": 1, "batch_size": plan.batch_size, "save": False, **job})
    run.write(settings, plan, subject.capture.graph)
    generate(subject.capture, plan, run.stages)
    record_stages(run.stages)
    return Pipeline(subject, plan, RunContext.of(plan, subject.capture.graph), run, settings)


def minibatches(workload: Workload, count: int, batch_size: int, last: int = 0) -> list[Any]:
    """Return the first minibatches of the data; ``last``: the number of samples of the last one."""
    source: Iterator[Any] = workload.items(batch_size)
    items = list(itertools.islice(source, count))
    if last:
        items[-1] = workload.resized(items[-1], last)
    return items


def with_exact_ties(plan: Plan) -> Plan:
    """Return the plan with exact ties: gradients of tied parameters are summed in the order of one process."""
    return replace(plan, ties=tuple(replace(tie, exact=True) for tie in plan.ties))


def staleness_of(plan: Plan) -> Callable[[str], int]:
    """Return the number of steps by which the weights of a parameter are old under the schedule of a plan."""
    deltas = make(plan.schedule, plan.request()).staleness
    return oracle.by_owner([stage.parameters for stage in plan.stages], deltas)


def assert_equals_oracle(plan: Plan, items: Sequence[Any], weights: dict[str, torch.Tensor]) -> None:
    """Assert that the weights are, bit for bit, those of a plain loop over these minibatches."""
    path = Path(plan.workload.target)
    _, model, _ = oracle.train(path, items, plan.num_microbatches, staleness=staleness_of(plan))
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


class Ear(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[int, dict[str, Any]] = {}

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "peak":
            self.peaks[fields["stage"]] = fields


def measured_with(subject: Captured, plan: Plan, folder: Path) -> dict[int, Any]:
    """Train three steps of a plan with ranks as threads, and return the peak event of each stage."""
    pipeline = build(subject, plan, folder, measure_memory=True, steps=3)
    ears = [Ear() for _ in range(plan.num_ranks)]

    def body(session: RankSession) -> None:
        session.train()
        session.report_timeline()

    items = minibatches(subject.workload, 3, plan.batch_size)
    run_in_threads(pipeline.run, pipeline.job, pipeline.context, body, items=lambda epoch: iter(items), reporters=ears)
    return {stage: books for ear in ears for stage, books in ear.peaks.items()}
