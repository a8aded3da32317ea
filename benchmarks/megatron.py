"""Compare the planner's choice for Megatron-LM's published models with the published one (``make bench-megatron``).

``benchmarks/published/megatron.py`` has the published figures, and the profiles and clusters that are planned for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "megatron.md"
sys.path[:0] = [str(ROOT)]

from autopipe.errors import PlanError, ScheduleError  # noqa: E402 - the path must be set first
from autopipe.ir.cluster import Cluster  # noqa: E402
from autopipe.ir.plan import Plan  # noqa: E402
from autopipe.ir.profile import Profile  # noqa: E402
from autopipe.planning import PlanOptions, make_plan  # noqa: E402
from autopipe.planning.api import cannot_beat, make_problems, solve_problem  # noqa: E402
from autopipe.planning.cost.predict import predict  # noqa: E402
from benchmarks.published.megatron import ROWS, SIZES, Row, cluster_of, profile_of  # noqa: E402

TEAMS = (1, 2, 4, 8)
STAGES_PER_RANK = (1, 2, 3, 4)
# plans of a choice that are simulated, besides those of one stage: as many as have together this many pairs of a stage
# and a microbatch
LEAST_SIMULATED, MOST_SIMULATED, MOST_PAIRS = 2, 6, 200_000


def choices(row: Row, t: int, recompute: str) -> Iterator[PlanOptions]:
    """Yield every division of the teams into pipelines and stages per rank; few stages first."""
    teams = row.gpus // t
    for depth in (p for p in range(1, teams + 1) if teams % p == 0):
        for v in STAGES_PER_RANK if depth > 1 else (1,):
            if depth * v <= row.layers:
                yield options_of(row, teams, depth, v, recompute)


def options_of(row: Row, teams: int, depth: int, v: int, recompute: str) -> PlanOptions:
    """Return the options of one division."""
    return PlanOptions(
        num_ranks=teams,
        batch_size=row.batch,
        schedule="interleaved" if v > 1 else "1f1b",
        stages_per_rank=v,
        replicas=teams // depth,
        recompute=recompute,
    )


def best(row: Row, t: int, profile: Profile, recompute: str) -> list[Plan]:
    """Return the plan of each division that is best by the closed-form estimate, for teams of t."""
    cluster, plans = cluster_of(row, t), []
    for options in choices(row, t, recompute):
        if plans and cannot_beat(min(plans, key=seconds_of), profile, cluster, options):
            continue
        plan = min(plans_of(profile, cluster, options), key=seconds_of, default=None)
        if plan is not None:
            plans.append(plan)
    return plans


def seconds_of(plan: Plan) -> float:
    """Return the estimated seconds of a step."""
    return plan.predicted.step_seconds


def plans_of(profile: Profile, cluster: Cluster, options: PlanOptions) -> Iterator[Plan]:
    """Yield the best plan for each number of microbatches that fits and that the schedule can run."""
    try:
        problems = make_problems(profile, cluster, options)
    except PlanError:  # fewer microbatches than replicas
        return
    for plan in filter(None, map(solve_problem, problems)):
        kind = options.schedule_kind
        with contextlib.suppress(ScheduleError):  # rounds of unequal size
            kind.check(kind.complete(plan.request()))
            yield plan


def published(row: Row, profile: Profile) -> Plan:
    """Return the best cuts for the published configuration, with every layer recomputed."""
    options = dataclasses.replace(
        options_of(row, row.gpus // row.team, row.depth, row.stages_per_rank, "block"),
        microbatch_size=row.microbatch,
    )
    return make_plan(profile, cluster_of(row, row.team), options)


def sizes_of(plan: Plan, t: int) -> tuple[int, int, int]:
    """Return t, p and d of a plan for teams of t."""
    d = plan.stages[0].replicas
    return t, plan.num_ranks // d, d


def text_of(plan: Plan, t: int) -> str:
    """Return a plan as (t, p, d), stages per rank and microbatch size."""
    sizes = sizes_of(plan, t)
    return f"{sizes}, {len(plan.stages) // sizes[1]}, {plan.microbatch_size}"


def modes_of(plan: Plan) -> str:
    """Return how many of the stages recompute."""
    count = sum(stage.recompute != "never" for stage in plan.stages)
    return "none" if not count else "all" if count == len(plan.stages) else f"{count} of {len(plan.stages)}"


def pairs_of(plan: Plan) -> int:
    """Return the pairs of a stage and a microbatch that a simulation runs."""
    return len(plan.stages) * plan.num_microbatches


def chosen(row: Row, profiles: dict[int, Profile], recompute: str) -> tuple[Plan, int, float]:
    """Return the plan that is the fastest in simulation among the best by estimate, its t and its seconds.

    Plans of one stage are among them, as in ``planning.search.alternatives``: the estimate does not overlap their
    all-reduce with the backward.
    """
    estimated = [(t, plan) for t, profile in profiles.items() for plan in best(row, t, profile, recompute)]
    estimated.sort(key=lambda pair: seconds_of(pair[1]))
    simulated, pairs = [], 0
    for place, (t, plan) in enumerate(estimated):
        pairs += pairs_of(plan)
        few = place < LEAST_SIMULATED or (place < MOST_SIMULATED and pairs <= MOST_PAIRS)
        if few or len(plan.stages) == 1:
            simulated.append((predict(plan, profiles[t], cluster_of(row, t)).step_seconds, place))
    seconds, place = min(simulated)
    t, plan = estimated[place]
    return plan, t, seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row and what was predicted for it."""

    row: Row
    again: float  # predicted TFLOP/s per GPU of the published configuration
    sizes: tuple[int, int, int]  # t, p and d that were chosen, with all layers recomputed
    line: str  # of the table

    @property
    def error(self) -> float:
        """Of the prediction, relative to the published throughput."""
        return self.again / self.row.tera - 1


def compare(row: Row) -> Comparison:
    """Plan a row."""
    start = time.process_time()
    profiles = {t: profile_of(row, t) for t in TEAMS}
    theirs = published(row, profiles[row.team])
    again = row.tera_per_gpu(predict(theirs, profiles[row.team], cluster_of(row, row.team)).step_seconds)
    recomputed, t, seconds = chosen(row, profiles, "block")
    free, free_t, free_seconds = chosen(row, profiles, "auto")
    cells = [
        f"{row.parameters:g} B", row.gpus, row.batch, text_of(theirs, row.team), row.tera,
        f"{again:.0f}", f"{again / row.tera - 1:+.0%}",
        text_of(recomputed, t), f"{row.tera_per_gpu(seconds):.0f}",
        text_of(free, free_t), f"{row.tera_per_gpu(free_seconds):.0f}", modes_of(free),
        f"{time.process_time() - start:.0f} s",
    ]  # fmt: skip
    return Comparison(row, again, sizes_of(recomputed, t), "| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    """Plan the rows, print them and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=len(ROWS), help="only the first N rows, without the page")
    parser.add_argument("--processes", type=int, default=1, help="how many rows at once")
    arguments = parser.parse_args()
    print(TABLE, flush=True)
    comparisons = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for comparison in pool.map(compare, ROWS[: arguments.rows]):
            comparisons.append(comparison)
            print(comparison.line, flush=True)
    print(summary(comparisons))
    if arguments.rows >= len(ROWS):
        RESULTS.write_text(page(comparisons), encoding="utf-8")


def summary(comparisons: list[Comparison]) -> str:
    """Return the errors of the predictions, and how many of the choices are as published."""
    errors = [comparison.error for comparison in comparisons]
    equal = sum(each.sizes == each.row.sizes for each in comparisons)
    average = statistics.fmean(map(abs, errors))
    return (
        f"Errors of the predictions are {min(errors):+.0%} to {max(errors):+.0%}, {average:.0%} on average. The "
        f"planner chooses the published (t, p, d) in {equal} of {len(errors)} rows, if all layers are recomputed."
    )


def page(comparisons: list[Comparison]) -> str:
    """Return the page."""
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    lines = [each.line for each in comparisons]
    return "\n".join([HEAD.format(machine=machine), TABLE, *lines, "", summary(comparisons), "", SEARCHED, ""])


TABLE = """\
| model | GPUs | batch | published: (t, p, d), v, b | TFLOP/s | predicted | error \
| chosen, all recomputed | predicted | chosen freely | predicted | recomputes | search |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""

HEAD = """# The planner against Megatron-LM's published configurations

`make bench-megatron`: GPT models with 1.7 B to 1 T parameters on 32 to 3,072 A100-80GB, from table 1 of
[arXiv:2104.04473](https://arxiv.org/abs/2104.04473); b and v from NVIDIA's script for that table. t, p and d are the
tensor-, pipeline- and data-parallel sizes, v the stages per rank and b the microbatch size. TFLOP/s are per GPU by
equation 3 of the paper, which always counts recomputation: for the same model, they are proportional to sequences per
second. Configurations and TFLOP/s are those of the paper's table; b and v agree with NVIDIA's script.

Planned and simulated on {machine}.
Nothing ran on a GPU, and nothing is fitted to the published figures. The profiles are operations and bytes of a GPT
of these sizes, and the datasheet's rates at autopipe's usual assumptions (matrix products at 60 % of the peak,
launches and the host not counted). The work of a layer is divided by t as Megatron-LM divides it; its sums over t
GPUs are added and overlap nothing. Weights, gradients and the state of Adam are float32, and a 16-bit cast of each
weight is kept: 18 bytes per parameter, and 4 bytes per parameter in the sum over replicas.

"predicted" and "error" are those of the published configuration, with all layers recomputed, as published. Then follow
the planner's choice if all layers are recomputed, and its choice if it decides that, too: a plan that keeps the
activations saves a quarter of the operations.
"""

SEARCHED = f"""Searched: t of {", ".join(map(str, TEAMS))}; every p that divides the teams; v of \
{", ".join(map(str, STAGES_PER_RANK))} (1f1b or interleaved);
equal replicas; the numbers of microbatches that the planner tries, of at most {max(SIZES)} sequences; cuts \
between layers.
Each choice is the fastest in simulation of those of one stage and the {LEAST_SIMULATED} to {MOST_SIMULATED} best by \
estimate: fewer for large models, whose simulations are long. The number decides where plans are close:
with 4 for all rows, the choice of 7.5 B is the published one, and with 6 it is not.
"search" is CPU time of a row, with its simulations."""


if __name__ == "__main__":
    main()
