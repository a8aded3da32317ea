"""Plans for a profile in PipeDream's (and DAPPLE's) format, with autopipe's costs or with PipeDream's formulas.

Such a profile contains no model, so nothing is written that a run could use. One minibatch of the file counts as one
sample here, and so is the smallest microbatch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from autopipe.commands.planning.choose import Chosen, search
from autopipe.commands.planning.request import request_of
from autopipe.commands.settings import PlanSettings, Progress
from autopipe.commands.store import PlanRecord, Work, profile_digest
from autopipe.errors import RunError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Profile
from autopipe.planning import PlanOptions
from autopipe.planning.baselines import compare_plan, explain_plan
from autopipe.planning.clusters import GPU_BANDWIDTH, GPU_LATENCY_SECONDS, LINK_LATENCY_SECONDS
from autopipe.planning.pipedream.file_format import LayerGraph, read_pipedream
from autopipe.planning.pipedream.model import LayerPlan, Machine, data_parallel_seconds, plan_layers
from autopipe.planning.pipedream.profile import profile_of_layers
from autopipe.planning.requests import PlanRequest
from autopipe.planning.space import Space, most_stages
from autopipe.report.results import LayerPlanResult, PlanResult
from autopipe.units import in_bandwidth, in_bytes

# GPipe calls the bubble negligible with at least four microbatches per stage (arXiv:1811.06965, section 2.3)
MICROBATCHES_PER_RANK = 4


@dataclass(frozen=True, slots=True)
class _Case:
    """The file and the options of one command."""

    layers: LayerGraph
    name: str
    request: PlanRequest
    cluster: Cluster
    num_ranks: int


def plan_layers_with_their_formulas(settings: PlanSettings, path: Path) -> LayerPlanResult:
    """Return the plan with the fastest slowest stage by PipeDream's formulas, which ignore fill and drain."""
    case = _case(settings, path)
    levels, device = case.cluster.levels, case.cluster.devices[0]
    machine = Machine(
        tuple(level.count for level in levels), tuple(level.bandwidth for level in levels), device.memory_bytes
    )
    start = time.perf_counter()
    layer_plan = plan_layers(case.layers, machine, straight=case.request.replicas == "never")
    seconds = time.perf_counter() - start
    alone = math.fsum(case.layers.forward_seconds) + math.fsum(case.layers.backward_seconds)
    parallel = data_parallel_seconds(case.layers, machine)
    notes = (*_notes(case), *_uncounted(case.layers, layer_plan, device.memory_bytes))
    return LayerPlanResult(case.name, case.layers, layer_plan, case.cluster, alone, parallel, seconds, notes)


def plan_layers_with_our_costs(
    settings: PlanSettings, path: Path, progress: Progress | None = None, *, explained: bool = False
) -> PlanResult:
    """Return the plan by autopipe's costs, with layers ordered by branch or by level, whichever is faster."""
    case = _case(settings, path)
    work = Work.begin(settings.work_dir, progress)
    batch_size = case.request.batch_size or MICROBATCHES_PER_RANK * case.num_ranks
    space = Space.of(case.request, case.num_ranks, batch_size)
    start = time.perf_counter()
    best: tuple[Chosen, Profile] | None = None
    for deep in (True, False):
        profile = profile_of_layers(case.layers, case.name, deep=deep)
        choices = _choices(case, space, profile)
        plan, search_progress = search(profile, case.cluster, choices, work.progress)
        record = PlanRecord(plan.digest, profile_digest(profile), case.request, case.cluster)
        if best is None or plan.predicted.step_seconds < best[0].plan.predicted.step_seconds * (1 - 1e-9):
            best = Chosen(plan, record, space, 0.0, space.covered_by(choices)), profile
        if search_progress.stopped:
            work.notes.append("interrupted: this is the best plan so far")
            break
    assert best is not None  # the loop runs at least once, or raises
    chosen, profile = best
    seconds = time.perf_counter() - start
    every = chosen.every and not search_progress.stopped
    return PlanResult(
        chosen.plan,
        profile,
        case.cluster,
        "",
        seconds,
        (*work.notes, *_notes(case)),
        (),
        compare_plan(chosen.plan, profile, case.cluster, space, every=every),
        explain_plan(chosen.plan, profile, case.cluster, space) if explained else None,
    )


def _choices(case: _Case, space: Space, profile: Profile) -> tuple[PlanOptions, ...]:
    if case.request.replicas == "never" or not space.replicated:
        return space.unreplicated
    return space.choices("auto") if case.num_ranks <= most_stages(profile) else space.replicated


def _case(settings: PlanSettings, path: Path) -> _Case:
    """Read the file and the options.

    Raises: PlanError for a file of another format; RunError if the number of ranks is not known or contradictory.
    """
    request = request_of(settings)
    if request.device_name is not None:
        raise RunError(
            f"--device-name {request.device_name} cannot scale this profile: the file does not say on which device "
            "its times were taken",
            where=str(path),
            remedy="omit it, or give a cluster file with the device's speed and memory: --cluster",
        )
    num_ranks = request.gpus or (request.cluster.num_ranks if request.cluster is not None else 0)
    if not num_ranks:
        raise RunError("the number of devices is not known", remedy="add --gpus N, or --cluster cluster.toml")
    if request.cluster is not None:
        cluster = request.cluster
        if num_ranks != cluster.num_ranks:
            raise RunError(
                f"--gpus is {num_ranks}, but the cluster file describes {cluster.num_ranks} devices",
                remedy="omit --gpus, or change the counts in the file",
            )
    else:
        level = Level("assumed", num_ranks, GPU_BANDWIDTH, GPU_LATENCY_SECONDS)
        if request.link is not None:
            level = Level("link", num_ranks, request.link, LINK_LATENCY_SECONDS)
        cluster = Cluster((level,), (ClusterDevice("as in the file", request.gpu_memory_bytes or 0),), "command line")
    return _Case(read_pipedream(path), path.name, request, cluster, num_ranks)


def _notes(case: _Case) -> tuple[str, ...]:
    notes = [f"{len(case.layers.names)} layers of {case.name}; a sample is one minibatch of the file"]
    if case.request.cluster is None and case.request.link is None:
        notes.append(
            f"assumed: {in_bandwidth(GPU_BANDWIDTH)} between devices (--link or --cluster give another figure)"
        )
    return tuple(notes)


def _uncounted(layers: LayerGraph, layer_plan: LayerPlan, limit: int) -> tuple[str, ...]:
    """Return a warning if a stage exceeds the memory of a device, which PipeDream's formula does not detect."""
    position = {name: index for index, name in enumerate(layers.names)}
    large = []
    for index, stage in enumerate(layer_plan.stages):
        own = [position[name] for name in stage.layers]
        size = math.fsum(layers.parameter_bytes[k] + layers.activation_bytes[k] for k in own)
        if limit and size > limit:
            large.append(f"stage {index} ({in_bytes(size)})")
    if not large:
        return ()
    return (
        f"warning: parameters and activations of {', '.join(large)} alone exceed the {in_bytes(limit)} of a "
        "device; PipeDream's formula counts one copy per device after a stage, and so none for the last stage",
    )
