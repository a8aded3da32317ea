"""Put a rank together: its stages from the user's model, their optimizers and schedulers, and an executor over them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopipe.errors import PlanError
from autopipe.generate import load_constants, load_stage
from autopipe.ir.plan import Stage as StagePlan
from autopipe.ir.schedule import Schedule
from autopipe.runtime.after_step import AfterStep, Averages
from autopipe.runtime.batches.recording import Recording
from autopipe.runtime.checkpoint.initial import build_stages, weights_of
from autopipe.runtime.compiled import compile_stage, refuse_uncompilable
from autopipe.runtime.context import RunContext
from autopipe.runtime.events import Reporter
from autopipe.runtime.executor import Executor
from autopipe.runtime.first_kernels import FirstKernels
from autopipe.runtime.footprint import Footprint
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.spans import span_recorder
from autopipe.runtime.spilling.build import build_spiller
from autopipe.runtime.spilling.memory_ledger import DeviceBooks
from autopipe.runtime.spilling.token import token_of
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.agreement import Agreement
from autopipe.runtime.step.deferred import DeferredStatistics
from autopipe.runtime.step.finite import FiniteBuffers
from autopipe.runtime.step.gradients import GradientFinisher, GradientHook
from autopipe.runtime.step.losses import LossCollector
from autopipe.runtime.step.replicas import replica_syncs
from autopipe.runtime.step.scaler import LossScaler
from autopipe.runtime.step.sharding import OptimizerShard
from autopipe.runtime.step.stepper import Stepper
from autopipe.runtime.step.ties import TieExchange
from autopipe.runtime.transport.base import Transport
from autopipe.runtime.transport.teams import TeamTransport
from autopipe.runtime.weights import WeightVersions
from autopipe.schedules import REGISTRY, make
from autopipe.schedules.spilling.spill import LATE
from autopipe.stage import Stage
from autopipe.team import Alone
from autopipe.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssembly:
    """Builds one rank of a run."""

    run: RunDirectory
    job: Job
    context: RunContext
    workload: Workload
    transport: Transport
    reporter: Reporter
    on_gradients: GradientHook | None = None

    def executor(self) -> Executor:
        """Return what follows the row of this rank.

        Raises: PlanError for float16 under a schedule whose minibatches overlap, and for ``compile`` under one that
        splits the backward.
        """
        plan, request, job = self.context.plan, self.context.request, self.job
        if job.compile:
            refuse_uncompilable(plan)
        schedule = make(plan.schedule, replace(request, num_minibatches=1))
        scaler = self._scaler(schedule)
        runners = self._runners(schedule, scaler)
        stepper = self._stepper(runners, scaler)
        device = torch.device(job.device)
        recorder = span_recorder(self.transport.rank, device) if job.record_timeline else None
        executor = Executor(plan, request, runners, stepper, self.transport, self.reporter, recorder)
        if device.type == "cuda":
            executor.kernels = FirstKernels(request)
        if REGISTRY[plan.schedule].spills:
            books = DeviceBooks(device, job.device_budget_bytes)
            books.enforce()
            if job.measure_memory or (job.device_budget_bytes and device.type == "cpu"):
                executor.footprint = books
            token = token_of(os.environ, functools.partial(self.reporter.at, waiting=True))
            executor.spiller = build_spiller(plan, stepper, device, books, recorder, token)
            stepper.early = not request.options.get(LATE.name)
        elif job.measure_memory:
            executor.footprint = Footprint(runners, device)
        return executor

    def _scaler(self, schedule: Schedule) -> LossScaler | None:
        if self.context.plan.workload.precision != "fp16":
            return None
        if any(schedule.staleness):
            raise PlanError(
                f"{schedule.name} does not work with fp16: a minibatch starts before the last step sets the loss scale",
                remedy="train with --precision bf16, or choose 1f1b",
            )
        return LossScaler()

    # -- stages --------------------------------------------------------------------------------------------------------

    def _runners(self, schedule: Schedule, scaler: LossScaler | None) -> dict[int, StageRunner]:
        """Build the stages of this rank from one build of the user's model."""
        plan, graph, job = self.context.plan, self.context.graph, self.job
        own = [stage for stage in plan.stages if self.transport.rank in stage.ranks]
        self.reporter.at("building stages", waiting=False)
        constants = load_constants(self.run.stages)
        weights = None
        if job.init_from and job.start_step < 0:
            weights = weights_of(job.init_from, graph, self.workload, trust=job.trust)
        digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
        classes = [load_stage(self.run.stages, stage.index, **digests) for stage in own]
        stages = build_stages(
            classes, self.workload, constants, weights, graph, job.initial, self._report_complete_build
        )
        carries_gradient = Recording.of(plan, graph).carries_gradient
        runners = {}
        for planned, stage in zip(own, stages, strict=True):
            if isinstance(self.transport, TeamTransport):
                stage.join(self.transport)
            stage.place(torch.device(job.device), parameters=not REGISTRY[plan.schedule].spills)
            if job.compile:
                compile_stage(stage, functools.partial(self.reporter.at, waiting=False))
            runners[planned.index] = self._runner(planned, stage, schedule, scaler, carries_gradient)
        return runners

    def _report_complete_build(self, reason: str) -> None:
        self.reporter.event("complete-build", reason=reason)

    def _runner(
        self,
        planned: StagePlan,
        stage: Stage,
        schedule: Schedule,
        scaler: LossScaler | None,
        carries_gradient: frozenset[str],
    ) -> StageRunner:
        graph, index = self.context.graph, planned.index
        exact_ties = {
            tie.parameter: tie.owner == index
            for tie in self.context.message_plan.ties
            if tie.exact and index in (tie.owner, *tie.copies)
        }
        changing = graph.moving & graph.after_step.keys()
        return StageRunner(
            stage,
            WeightVersions(stage, schedule.staleness[index], graph.aliases, changing),
            seed=self.context.plan.workload.seed,
            carries_gradient=carries_gradient,
            exact_ties=exact_ties,
            recompute=planned.recompute,
            replayed=graph.recomputed_with,
            names=graph.aliases,
            cast_once=graph.cast_once,
            distinguish_absent=graph.varies or any(node.opaque for node in graph.nodes),
            scaler=scaler,
            deferred=DeferredStatistics.of(stage) if self.job.deferred_batch_norm else None,
        )

    # -- stepping ------------------------------------------------------------------------------------------------------

    def _stepper(self, runners: Mapping[int, StageRunner], scaler: LossScaler | None) -> Stepper:
        context, job, transport, reporter = self.context, self.job, self.transport, self.reporter
        plan, graph, request = context.plan, context.graph, context.request
        trained = {name: spec for name, spec in graph.parameters.items() if spec.requires_grad}
        dtypes = [getattr(torch, spec.dtype) for spec in trained.values()]
        ties = TieExchange(plan.ties, graph.moving, request, runners, transport, reporter)
        loss = LossCollector(request, runners, transport, reporter, weighted=context.weighted)
        gradients = GradientFinisher(
            rank=transport.rank,
            request=request,
            loss=loss,
            agreement=Agreement(transport, reporter),
            reporter=reporter,
            trainable=list(trained),
            clip_norm=job.clip_grad_norm or None,
            norm_dtype=functools.reduce(torch.promote_types, dtypes, dtypes[0]) if dtypes else torch.float32,
            scaler=scaler,
            on_nonfinite=job.on_nonfinite,
            on_gradients=self.on_gradients,
            team=transport if isinstance(transport, TeamTransport) else Alone(),
            cut={name for runner in runners.values() for name in runner.stage.SHARDS},
        )
        owned = {index: ties.owned(index) for index in runners}
        shards = {
            index: OptimizerShard(owned[index], request.stage_ranks[index], transport)
            for index in runners
            if plan.sharing(plan.stages[index]) > 1
        }
        stepped = {index: shards[index].own if index in shards else owned[index] for index in runners}
        optimizers = {index: self.workload.optimizer(list(stepped[index].items())) for index in runners}
        schedulers = {i: None if o is None else self.workload.scheduler(o) for i, o in optimizers.items()}
        return Stepper(
            runners=runners,
            optimizers=optimizers,
            schedulers=schedulers,
            ties=ties,
            replicas=replica_syncs(context, runners, transport),
            shards=shards,
            partial={index: runner.stage.PARTIAL for index, runner in runners.items()},
            gradients=gradients,
            loss=loss,
            reporter=reporter,
            finite_buffers=self._finite_buffers(runners),
            users_hook=self._users_hook(owned),
            averages=self._averages(owned),
        )

    def _finite_buffers(self, runners: Mapping[int, StageRunner]) -> dict[int, FiniteBuffers]:
        if self.job.on_nonfinite != "skip":
            return {}
        stages = self.context.plan.stages
        return {
            index: FiniteBuffers(runner.stage, self.context.buffers_written(stages[index]))
            for index, runner in runners.items()
        }

    def _users_hook(self, owned: Mapping[int, Mapping[str, nn.Parameter]]) -> AfterStep | None:
        if "after_step" not in self.workload.hooks:
            return None
        context = self.context
        return AfterStep(
            self.workload, context.graph, context.request, self.transport, owned, context.message_plan.loans
        )

    def _averages(self, owned: Mapping[int, Mapping[str, nn.Parameter]]) -> Averages | None:
        if not self.job.ema:
            return None
        moving = self.context.graph.moving
        averaged = {
            index: {name: p for name, p in parameters.items() if name in moving} for index, parameters in owned.items()
        }
        return Averages(self.job.ema, averaged)
