"""The stages of a rank put together: the user's model cut, optimizers and schedulers built, an executor over them."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from autopipe.errors import PlanError
from autopipe.generate import load_constants, load_stage
from autopipe.runtime.after_step import AfterStep, Averages
from autopipe.runtime.batches.recording import Recording
from autopipe.runtime.checkpoint.initial import built, weights_of
from autopipe.runtime.events import Reporter
from autopipe.runtime.executor import Executor
from autopipe.runtime.footprint import Footprint
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.layout import Layout
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.deferred import DeferredStatistics
from autopipe.runtime.step.finite import FiniteBuffers
from autopipe.runtime.step.scaler import LossScaler
from autopipe.runtime.step.stepper import GradientHook, Stepper
from autopipe.runtime.transport.base import Transport
from autopipe.runtime.weights import WeightVersions
from autopipe.schedules import make
from autopipe.workload import Workload


def assembled(
    run: RunDirectory,
    job: Job,
    layout: Layout,
    workload: Workload,
    transport: Transport,
    reporter: Reporter,
    on_gradients: GradientHook | None = None,
) -> Executor:
    """Return what follows a rank's row: one build of the user's model a stage, of which only the stage's part is kept.

    Raises: PlanError for float16 under a schedule whose minibatches overlap.
    """
    plan, graph, request = layout.plan, layout.graph, layout.request
    device = torch.device(job.device)
    schedule = make(plan.schedule, replace(request, num_minibatches=1))
    runners: dict[int, StageRunner] = {}
    carrying = Recording.of(plan, graph).carries_gradient
    scaler = LossScaler() if plan.workload.precision == "fp16" else None
    if scaler is not None and any(schedule.staleness):
        raise PlanError(
            f"{plan.schedule} cannot be scaled for float16: minibatches begin before the last scale is known",
            remedy="train with --precision bf16, or choose 1f1b",
        )
    mine = [stage for stage in plan.stages if transport.rank in stage.ranks]
    constants = load_constants(run.stages)
    fresh = job.init_from and job.start_step < 0
    weights = weights_of(job.init_from, graph, workload, trust=job.trust) if fresh else None
    for stage in mine:
        reporter.at(f"building stage {stage.index}", waiting=False)
        cls = load_stage(run.stages, stage.index, graph_digest=plan.graph_digest, plan_digest=plan.digest)
        adopted = built(cls, workload, constants, weights, graph).place(device)
        ties = {
            tie.parameter: tie.owner == stage.index
            for tie in layout.routes.ties
            if tie.exact and stage.index in (tie.owner, *tie.copies)
        }
        runners[stage.index] = StageRunner(
            adopted,
            WeightVersions(
                adopted, schedule.staleness[stage.index], graph.aliases, graph.moving & graph.after_step.keys()
            ),
            seed=plan.workload.seed,
            carries_gradient=carrying,
            exact_ties=ties,
            recompute=stage.recompute,
            replayed=graph.replayed_buffers,
            names=graph.aliases,
            sparing=any(node.opaque for node in graph.nodes),
            scaler=scaler,
            deferred=DeferredStatistics.of(adopted) if job.deferred_batch_norm else None,
        )
    trained = {name: spec for name, spec in graph.parameters.items() if spec.requires_grad}
    dtypes = [getattr(torch, spec.dtype) for spec in trained.values()]
    stepper = Stepper(
        request=request,
        runners=runners,
        optimizers={},
        schedulers={},
        ties=plan.ties,
        trainable=list(trained),
        moving=graph.moving,
        transport=transport,
        reporter=reporter,
        weighted=layout.weighted,
        clip_norm=job.clip_grad_norm or None,
        on_gradients=on_gradients,
        scaler=scaler,
        on_nonfinite=job.on_nonfinite,
        norm_dtype=functools.reduce(torch.promote_types, dtypes, dtypes[0]) if dtypes else torch.float32,
    )
    for stage in mine:
        used, written = layout.parameters_used(stage), layout.buffers_written(stage)
        if job.on_nonfinite == "skip":
            stepper.kept_buffers[stage.index] = FiniteBuffers(runners[stage.index].stage, written)
        if stage.replicas > 1:
            stepper.bring_together(stage.index, used, written, graph.aliases)
    owned = {index: stepper.owned(index) for index in runners}
    if job.ema:
        moving = {index: {n: p for n, p in named.items() if n in graph.moving} for index, named in owned.items()}
        stepper.averages = Averages(job.ema, moving)
    if "after_step" in workload.hooks:
        stepper.users_hook = AfterStep(workload, graph, request, transport, owned, layout.routes.loans)
    optimizers = {index: workload.optimizer(list(stepper.owned(index).items())) for index in runners}
    stepper.optimizers = optimizers
    stepper.schedulers = {i: None if o is None else workload.scheduler(o) for i, o in optimizers.items()}
    footprint = Footprint(runners, device) if job.measure_memory else None
    return Executor(plan, request, runners, stepper, transport, reporter, job.record_timeline, footprint)
